"""Steps on their way into the log in virtual time, as worker/service.py and worker/publish put them there.

    steps that have piled up ─▶ parts of as many events as a step may have ─▶ an append for each ─▶ ends, then room

The steps that wait are taken together when all of those before are logged, and parted by jobs; interactive ones go as
one part. A job's tokens share chunks; what a part ends leaves the worker's hands with its append.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ops.benchmarks.simulation.queue_load import Cutting, Observations
from ops.benchmarks.simulation.queue_server import QueueServer, ScriptCosts
from worker.publish.chunker import MOST_TOGETHER
from worker.publish.publisher import PublishLimits
from worker.turns import EVENTS_AT_ONCE

MAX_APPENDS = PublishLimits().max_appends


@dataclass(frozen=True, slots=True)
class Steps:
    """What one engine step made, or several, of `jobs` different jobs; `ats`: when each step was over. `opened` of the
    chunks are their jobs' first ones."""

    ats: tuple[float, ...]
    jobs: int
    events: int
    tokens: int
    chunks: int
    opened: int
    ended: int

    def cut(self, jobs: int) -> tuple[Steps, Steps]:
        """What they made of so many jobs, and the others'."""
        names = ("events", "tokens", "chunks", "opened", "ended")
        first = {name: getattr(self, name) * jobs // self.jobs for name in names}
        rest = {name: getattr(self, name) - count for name, count in first.items()}
        return replace(self, jobs=jobs, **first), replace(self, jobs=self.jobs - jobs, **rest)


def together(steps: Sequence[Steps]) -> Steps:
    """Steps of the same jobs, of which some may not be in all of them."""
    sums = {
        name: sum(getattr(step, name) for step in steps) for name in ("events", "tokens", "chunks", "opened", "ended")
    }
    return Steps(tuple(at for step in steps for at in step.ats), jobs=max(step.jobs for step in steps), **sums)


def in_parts(pile: Steps, at_once: int) -> list[Steps]:
    """Parts of whole jobs, of so many events at most (worker.turns.in_turn, of jobs that are not urgent)."""
    if pile.events <= at_once:
        return [pile]
    jobs = max(1, at_once * pile.jobs // pile.events)
    parts = []
    while pile.jobs > jobs:
        part, pile = pile.cut(jobs)
        parts.append(part)
    return [*parts, pile]


def num_chunks(part: Steps, cutting: Cutting) -> int:
    """A stream's tokens that come together share chunks; never those of several jobs."""
    if not cutting.is_published or not part.jobs:
        return part.chunks
    return min(part.chunks, min(part.events, part.jobs) * math.ceil(part.events / part.jobs / MOST_TOGETHER))


class Log:
    """`on_ended` hears of each part how many jobs it ended, `on_room` when nothing is under way any more."""

    def __init__(
        self,
        server: QueueServer,
        costs: ScriptCosts,
        seen: Observations,
        cutting: Cutting,
        num_places: int,
        on_ended: Callable[[int], None],
        on_room: Callable[[], None],
    ) -> None:
        self._server, self._costs, self._seen, self._cutting = server, costs, seen, cutting
        self._on_ended, self._on_room = on_ended, on_room
        self._at_once = max(EVENTS_AT_ONCE, num_places)
        self._steps: deque[Steps] = deque()
        self._parts: deque[Steps] = deque()
        self._is_appending = False

    def add(self, step: Steps) -> None:
        self._steps.append(step)
        if not self._is_appending:
            self._go_on()

    def _go_on(self) -> None:
        """The next part that has a chunk; of those that have none the jobs just end."""
        while self._parts or self._steps:
            if not self._parts:
                self._parts.extend(self._take())
            part = self._parts.popleft()
            if part.chunks:
                self._append(part)
                return
            self._settle(part, self._server.clock.now)
            if not self._parts:
                self._on_room()

    def _take(self) -> list[Steps]:
        steps = list(self._steps)
        if not self._cutting.is_urgent:
            self._steps.clear()
            return in_parts(together(steps), self._at_once)
        fitting = 1
        while fitting < len(steps) and num_chunks(together(steps[: fitting + 1]), self._cutting) <= MAX_APPENDS:
            fitting += 1
        self._steps = deque(steps[fitting:])
        return [together(steps[:fitting])]

    def _append(self, part: Steps) -> None:
        self._is_appending = True

        def then(effect: float) -> None:
            self._is_appending = False
            if effect >= self._seen.since:
                self._seen.added_s += [effect - at for at in part.ats]
            self._settle(part, effect)
            if not self._parts:
                self._on_room()
            self._go_on()

        self._server.call("append", self._costs.append + self._cost_of(part), then)

    def _settle(self, part: Steps, effect: float) -> None:
        if effect >= self._seen.since:
            self._seen.tokens += part.tokens
        if part.ended:
            self._on_ended(part.ended)

    def _cost_of(self, part: Steps) -> float:
        costs, size = self._costs, self._cutting.tokens
        chunks = num_chunks(part, self._cutting)
        opened = min(chunks, part.opened)
        shared = max(0, part.tokens - chunks * size)  # tokens that go along
        return opened * costs.opened + (chunks - opened) * costs.chunk[size] + shared * costs.token
