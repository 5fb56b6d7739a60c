"""Steps on their way into the log in virtual time, as worker/service.py and worker/publish put them there.

    steps that have piled up ─▶ parts of as many events as a step may have ─▶ an append for each ─▶ ends, then room

The steps that wait are taken together when all of those before are logged. Interactive jobs' go as one part. Where a
part holds several tokens of a job they share chunks; what a part ends leaves the worker's hands with its append.
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
from worker.service import EVENTS_AT_ONCE

MAX_APPENDS = PublishLimits().max_appends


@dataclass(frozen=True, slots=True)
class Step:
    """What an engine step made, or a piece of it: its events are of `num_sequences` different jobs at most. `opened` of
    its chunks are their jobs' first ones."""

    at: float
    num_sequences: int
    events: int
    tokens: int
    chunks: int
    opened: int
    ended: int

    def cut(self, events: int) -> tuple[Step, Step]:
        """The first so many events, and the others."""
        names = ("tokens", "chunks", "opened", "ended")
        first = {name: getattr(self, name) * events // self.events for name in names}
        rest = {name: getattr(self, name) - count for name, count in first.items()}
        return replace(self, events=events, **first), replace(self, events=self.events - events, **rest)


def in_parts(steps: Sequence[Step], at_once: int) -> list[list[Step]]:
    """Parts of so many events, the last of what is left (worker.service.in_turn, of jobs that are not urgent)."""
    parts: list[list[Step]] = [[]]
    room = at_once
    for step in steps:
        rest = step
        while rest.events > room:
            piece, rest = rest.cut(room)
            parts[-1].append(piece)
            parts.append([])
            room = at_once
        parts[-1].append(rest)
        room -= rest.events
    return [[step for step in part if step.events] for part in parts if any(step.events for step in part)]


def num_chunks(part: Sequence[Step], cutting: Cutting) -> int:
    """A stream's tokens that come together share chunks; never those of several jobs."""
    chunks = sum(step.chunks for step in part)
    if not cutting.is_published:
        return chunks
    events, most = sum(step.events for step in part), max(step.num_sequences for step in part)
    return min(chunks, min(events, most) * math.ceil(events / most / MOST_TOGETHER))


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
        self._steps: deque[Step] = deque()
        self._parts: deque[list[Step]] = deque()
        self._is_appending = False

    def add(self, step: Step) -> None:
        self._steps.append(step)
        if not self._is_appending:
            self._go_on()

    def _go_on(self) -> None:
        """The next part that has a chunk; of those that have none the jobs just end."""
        while self._parts or self._steps:
            if not self._parts:
                self._parts.extend(self._take())
            part = self._parts.popleft()
            if any(step.chunks for step in part):
                self._append(part)
                return
            self._settle(part, self._server.clock.now)
            if not self._parts:
                self._on_room()

    def _take(self) -> list[list[Step]]:
        steps = list(self._steps)
        if not self._cutting.is_urgent:
            self._steps.clear()
            return in_parts(steps, self._at_once)
        fitting = 1
        while fitting < len(steps) and num_chunks(steps[: fitting + 1], self._cutting) <= MAX_APPENDS:
            fitting += 1
        self._steps = deque(steps[fitting:])
        return [steps[:fitting]]

    def _append(self, part: list[Step]) -> None:
        self._is_appending = True

        def then(effect: float) -> None:
            self._is_appending = False
            if effect >= self._seen.since:
                self._seen.added_s += [effect - step.at for step in part]
            self._settle(part, effect)
            if not self._parts:
                self._on_room()
            self._go_on()

        self._server.call("append", self._costs.append + self._cost_of(part), then)

    def _settle(self, part: list[Step], effect: float) -> None:
        if effect >= self._seen.since:
            self._seen.tokens += sum(step.tokens for step in part)
        if ended := sum(step.ended for step in part):
            self._on_ended(ended)

    def _cost_of(self, part: list[Step]) -> float:
        costs, size = self._costs, self._cutting.tokens
        chunks = num_chunks(part, self._cutting)
        opened = min(chunks, sum(step.opened for step in part))
        shared = max(0, sum(step.tokens for step in part) - chunks * size)  # tokens that go along
        return opened * costs.opened + (chunks - opened) * costs.chunk[size] + shared * costs.token
