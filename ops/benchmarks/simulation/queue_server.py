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
        chunk: per chunk of an append, by its number of tokens, while the worker's ownership version
        is
            valid; checkpoints are not published.
        opened: per first chunk of a job, for which the job is looked up and its log begun.
    """

    append: float
    chunk: dict[int, float]
    opened: float
    claim: float
    claimed: float
    finish: float
    finished: float
    heartbeat: float
    held: float
    submit: float

    @property
    def token(self) -> float:
        """Cost of each further token of a chunk."""
        return max(0.0, self.chunk[8] - self.chunk[1]) / 7


class Clock:
    """Runs events in order of time; events of equal time run in the order of their adding."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = until


@dataclass(slots=True)
class QueueServer:
    """Server with one thread.

    `busy` has the thread's seconds per script, of scripts that end within the measured time.
    """

    clock: Clock
    measured_from: float
    measured_to: float
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _free_at: float = 0.0

    def call(
        self, script: str, seconds: float, then: Callable[[float], None] | None = None
    ) -> None:
        """Send a call now; `then(effect)` runs at its reply, `effect` is the script's end."""

        def arrive() -> None:
            done = self._free_at = max(self._free_at, self.clock.now) + seconds
            if self.measured_from <= done <= self.measured_to:
                self.busy[script] += seconds
            if then is not None:
                self.clock.at(done + HOP_S, lambda: then(done))

        self.clock.at(self.clock.now + HOP_S, arrive)
