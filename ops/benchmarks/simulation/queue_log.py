"""Simulates how steps enter the log, as the service and the publisher append them.

    steps that have piled up ─▶ parts of as many events as a step may have ─▶ an append for each ─▶
    ends, then room

When all earlier steps are logged, the waiting steps are taken together and split by jobs; steps of
interactive jobs stay one part. Tokens of the same job share chunks. The jobs that end in a part
leave the worker with the part's append.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ops.benchmarks.simulation.queue_load import Cutting, Observations
from ops.benchmarks.simulation.queue_server import QueueServer, ScriptCosts
from tokenmill_worker.publish.chunker import MOST_TOGETHER
from tokenmill_worker.publish.fair_batches import EVENTS_AT_ONCE
from tokenmill_worker.publish.publisher import PublishLimits

MAX_APPENDS = PublishLimits().max_appends


@dataclass(frozen=True, slots=True)
class Steps:
    """Output of one or more engine steps of `jobs` different jobs.

    `ats` has the end of each step; `opened` counts the chunks that are the first of their job.
    """

    ats: tuple[float, ...]
    jobs: int
    events: int
    tokens: int
    chunks: int
    opened: int
    ended: int

    def cut(self, jobs: int) -> tuple[Steps, Steps]:
        """Split off the output of the first `jobs` jobs; return it and the rest."""
        names = ("events", "tokens", "chunks", "opened", "ended")
        first = {name: getattr(self, name) * jobs // self.jobs for name in names}
        rest = {name: getattr(self, name) - count for name, count in first.items()}
        return replace(self, jobs=jobs, **first), replace(self, jobs=self.jobs - jobs, **rest)


def together(steps: Sequence[Steps]) -> Steps:
    """Add up steps of the same jobs; some jobs may be missing in some steps."""
    sums = {
        name: sum(getattr(step, name) for step in steps)
        for name in ("events", "tokens", "chunks", "opened", "ended")
    }
    return Steps(
        tuple(at for step in steps for at in step.ats),
        jobs=max(step.jobs for step in steps),
        **sums,
    )


def in_parts(pile: Steps, at_once: int) -> list[Steps]:
    """Split the steps into parts of whole jobs with at most `at_once` events.

    This is tokenmill_worker.publish.fair_batches.split_batches for jobs that are not urgent.
    """
    if pile.events <= at_once:
        return [pile]
    jobs = max(1, at_once * pile.jobs // pile.events)
    parts = []
    while pile.jobs > jobs:
        part, pile = pile.cut(jobs)
        parts.append(part)
    return [*parts, pile]


def num_chunks(part: Steps, cutting: Cutting) -> int:
    """Return the number of chunks; tokens of one stream that come together share chunks."""
    if not cutting.is_published or not part.jobs:
        return part.chunks
    return min(
        part.chunks,
        min(part.events, part.jobs) * math.ceil(part.events / part.jobs / MOST_TOGETHER),
    )


class Log:
    """Log of one worker.

    Args:
        on_ended: receives the number of jobs that ended, once per part.
        on_room: called when a batch of parts is appended completely.
    """

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
        """Append the next part that has a chunk; a part without chunks only ends its jobs."""
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
        while (
            fitting < len(steps)
            and num_chunks(together(steps[: fitting + 1]), self._cutting) <= MAX_APPENDS
        ):
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
        shared = max(0, part.tokens - chunks * size)  # tokens that share a chunk with others
        return opened * costs.opened + (chunks - opened) * costs.chunk[size] + shared * costs.token
