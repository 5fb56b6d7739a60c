"""The queue server in virtual time: one thread that serves scripts in order of arrival, a hop away from everybody.

It knows what scripts cost and nothing of what they do.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

HOP_S = 100e-6  # one way, within a data centre


@dataclass(frozen=True, slots=True)
class ScriptCosts:
    """Seconds of the server's main thread, as `calibrate` measures them: a call's own part, and per item in it.

    `chunk`: per chunk of an append, by the tokens in it (those of a checkpoint are told to nobody), where the worker's
    voucher holds. `opened`: per chunk that is its job's first, for which the job is asked for, and its log begun.
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
        """Each that goes along in a chunk."""
        return max(0.0, self.chunk[8] - self.chunk[1]) / 7


class Clock:
    """Events in order of time; of equal times, in order of planning."""

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
    """`busy` is the thread's time per script, of those that end in the measured time."""

    clock: Clock
    measured_from: float
    measured_to: float
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _free_at: float = 0.0

    def call(self, script: str, seconds: float, then: Callable[[float], None] | None = None) -> None:
        """Send now; `then(effect)` runs when the reply is back, `effect` is when the script had ended."""

        def arrive() -> None:
            done = self._free_at = max(self._free_at, self.clock.now) + seconds
            if self.measured_from <= done <= self.measured_to:
                self.busy[script] += seconds
            if then is not None:
                self.clock.at(done + HOP_S, lambda: then(done))

        self.clock.at(self.clock.now + HOP_S, arrive)
