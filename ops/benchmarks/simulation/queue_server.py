"""The queue server in virtual time: one thread runs scripts in order of arrival.

Every client is one network hop away. The server models what scripts cost, not what they do.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

HOP_S = 100e-6  # one way, within a data centre


@dataclass(frozen=True, slots=True)
class ScriptCosts:
    """Seconds of the server's main thread per call and per item of a call; see `calibrate`.

    Args:
        chunk: per chunk of one token, while the worker's ownership version is valid.
        token: per further token of a chunk.
        opened: per first chunk of a job, for which the job is looked up and its log begun.
        checkpoint: per chunk that is logged and not published.
    """

    append: float = 0.0
    chunk: float = 0.0
    token: float = 0.0
    opened: float = 0.0
    checkpoint: float = 0.0
    claim: float = 0.0
    claimed: float = 0.0
    finish: float = 0.0
    finished: float = 0.0
    submit: float = 0.0


class Clock:
    """Runs events in order of time; events of equal time run in the order of their adding."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until


@dataclass(slots=True)
class QueueServer:
    """Server with one thread; `busy` has its seconds per script, from `since` to `until`."""

    clock: Clock
    since: float = 0.0
    until: float = float("inf")
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _free_at: float = 0.0

    def call(self, script: str, seconds: float, then: Callable[[float], None]) -> None:
        """Send a call now; `then(end)` runs at its reply, `end` is the script's end."""

        def arrive() -> None:
            end = self._free_at = max(self._free_at, self.clock.now) + seconds
            if self.since <= end <= self.until:
                self.busy[script] += seconds
            self.clock.after(end + HOP_S - self.clock.now, lambda: then(end))

        self.clock.after(HOP_S, arrive)
