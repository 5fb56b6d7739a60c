"""Simulates one worker with the product's loops: steps, appends, claims, finishes.

    free slot ─▶ claim ─▶ joins a step ─▶ a token per step ─▶ append ─▶ slot free ─▶ SQL ─▶ finish

A slot holds one job, from its claim until its end is logged. Each loop has one call at a time, as
the real one. Steps go on while appends wait; tokens that waited share chunks. The backlog never
ends, so each claim gets as many jobs as it asks for.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ops.benchmarks.simulation.costs import CostModel
from ops.benchmarks.simulation.load import MAX_ANSWER, answer_length
from ops.benchmarks.simulation.queue_server import QueueServer, ScriptCosts
from tokenmill_worker.consume.consumer import MAX_AT_ONCE
from tokenmill_worker.consume.credits import LOOKAHEAD
from tokenmill_worker.publish.chunker import CHECKPOINT_TOKENS, MOST_TOGETHER
from tokenmill_worker.publish.fair_batches import EVENTS_AT_ONCE
from tokenmill_worker.settings import Settings

_DEFAULTS = Settings.model_construct()
MAX_GROUP, MAX_BUFFERED = _DEFAULTS.record_group, _DEFAULTS.record_buffer
COMMIT_S = 0.004  # one SQL transaction, whatever its size
DEVICE = CostModel()

Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Answers:
    """Turns answers into chunks of `tokens` tokens.

    Chunks of bulk jobs are logged and not published. What waits of interactive jobs is one part.
    """

    tokens: int = 1
    is_published: bool = True
    is_urgent: bool = False

    def cut(self, held: Counts, opened: Flags, ended: Flags) -> tuple[Counts, Counts]:
        """Return the tokens that leave in chunks, and the number of chunks, by job.

        Args:
            held: tokens that are in no chunk yet.
            opened: whether the job has a chunk already; a stream begins with its first token.
            ended: whether the answer is complete.
        """
        if not self.is_published:
            chunks = held // self.tokens  # the rest is in the result only
            return chunks * self.tokens, chunks
        tokens = np.where((held >= self.tokens) | ~opened | ended, held, 0)
        return tokens, -(-tokens // max(self.tokens, MOST_TOGETHER))


ANSWERS = {
    "token chunks": Answers(),  # stream: true
    "interactive": Answers(is_urgent=True),  # stream: true, priority: interactive
    "chunks of 8": Answers(tokens=8),  # chunk_tokens = 8, and time in which chunks fill
    "checkpoints": Answers(tokens=CHECKPOINT_TOKENS, is_published=False),  # stream: false
}


@dataclass(frozen=True, slots=True)
class Mix:
    """Jobs that read `context` tokens of keys and values per step on average."""

    prompt_tokens: int
    context: int
    num_sequences: int = 256


@dataclass(slots=True)
class Observations:
    """Observations of all workers from `since` on, in seconds; tokens count when logged."""

    since: float
    tokens: int = 0
    jobs: int = 0
    added_s: list[float] = field(default_factory=list)  # from the step's end to the publication


def split(events: Counts, at_once: int) -> Iterator[Counts]:
    """Yield the indices of jobs in parts of at most `at_once` events, a job in one part.

    `tokenmill_worker.publish.fair_batches.split_batches` does so for jobs that are not urgent.
    """
    if events.sum() <= at_once:
        yield np.flatnonzero(events)
        return
    part: list[int] = []
    total = 0
    for job in np.flatnonzero(events):
        if part and total + events[job] > at_once:
            yield np.array(part)
            part, total = [], 0
        part.append(int(job))
        total += int(events[job])
    yield np.array(part, np.int64)


class Worker:
    def __init__(
        self,
        server: QueueServer,
        costs: ScriptCosts,
        mix: Mix,
        answers: Answers,
        seen: Observations,
        source: random.Random,
    ) -> None:
        self._server, self._clock, self._costs = server, server.clock, costs
        self._mix, self._answers, self._seen, self._source = mix, answers, seen, source
        slots = mix.num_sequences + LOOKAHEAD
        self._left = np.zeros(slots, np.int64)  # tokens that the engine will give
        self._events = np.zeros(slots, np.int64)  # tokens of steps that wait for the log
        self._held = np.zeros(slots, np.int64)
        self._running, self._ended, self._opened = (np.zeros(slots, np.bool_) for _ in range(3))
        self._step_ends: list[float] = []
        self._free = list(range(slots))
        self._joining: deque[int] = deque()
        self._is_stepping = self._is_appending = self._is_claiming = False
        self._to_finish = self._finishing = 0

    def start(self, delay: float) -> None:
        """Start with every place taken and each answer partly generated."""
        for _ in range(self._mix.num_sequences):
            slot = self._free.pop()
            self._left[slot] = self._source.randint(1, self._running_length())
            self._running[slot] = True
        self._clock.after(delay, self._begin_step)
        self._clock.after(delay, self._claim)

    def _running_length(self) -> int:
        """Draw the length of an answer that runs at a random time, which favours long ones."""
        while True:
            length = answer_length(self._source)
            if self._source.random() < length / MAX_ANSWER:
                return length

    # ── engine ──

    def _begin_step(self) -> None:
        num_running, joined = int(self._running.sum()), 0
        while self._joining and num_running + joined < self._mix.num_sequences:
            self._running[self._joining.popleft()] = True
            joined += 1
        num_running += joined
        self._is_stepping = num_running > 0
        if self._is_stepping:
            read, new = num_running * self._mix.context, joined * self._mix.prompt_tokens
            pairs = read + new * self._mix.prompt_tokens // 2
            seconds = DEVICE.seconds(num_running + new, num_running, read + new, pairs)
            self._clock.after(seconds, self._end_step)

    def _end_step(self) -> None:
        self._left -= self._running
        self._events += self._running
        self._ended |= self._running & (self._left == 0)
        self._running &= self._left > 0
        self._step_ends.append(self._clock.now)
        if not self._is_appending:
            self._append_waiting()
        self._begin_step()

    # ── log ──

    def _append_waiting(self) -> None:
        """Append the steps that wait, part by part; places are claimed for behind the last one."""
        events, ended, step_ends = self._events.copy(), self._ended.copy(), self._step_ends
        self._events[:], self._ended[:], self._step_ends = 0, False, []
        at_once = max(EVENTS_AT_ONCE, self._mix.num_sequences)
        parts = split(events, int(events.sum()) if self._answers.is_urgent else at_once)

        def go_on() -> None:
            part = next(parts, None)
            if part is not None and len(part):
                self._append(part, events[part], ended[part], step_ends, go_on)
                return
            self._is_appending = False
            self._claim()
            if self._step_ends:
                self._append_waiting()

        self._is_appending = True
        go_on()

    def _append(
        self,
        part: Counts,
        events: Counts,
        ended: Flags,
        step_ends: list[float],
        then: Callable[[], None],
    ) -> None:
        held, opened = self._held[part] + events, self._opened[part]
        tokens, chunks = self._answers.cut(held, opened, ended)

        def logged(end: float) -> None:
            if end >= self._seen.since:
                self._seen.tokens += int(events.sum())
                self._seen.added_s += [end - at for at in step_ends] if chunks.any() else []
            self._held[part] = np.where(ended, 0, held - tokens)
            self._opened[part] = (opened | (chunks > 0)) & ~ended
            gone = part[ended].tolist()
            self._free += gone
            self._to_finish += len(gone)
            self._finish()
            then()

        if chunks.any():
            cost = self._costs.append + self._cost_of(tokens, chunks, opened)
            self._server.call("append", cost, logged)
        else:
            logged(self._clock.now)

    def _cost_of(self, tokens: Counts, chunks: Counts, opened: Flags) -> float:
        costs, num_chunks = self._costs, int(chunks.sum())
        first = int((~opened & (chunks > 0)).sum())
        if not self._answers.is_published:
            return first * costs.opened + (num_chunks - first) * costs.checkpoint
        further = int(tokens.sum()) - num_chunks
        chunk_s = first * costs.opened + (num_chunks - first) * costs.chunk
        return chunk_s + further * costs.token

    # ── jobs ──

    def _claim(self) -> None:
        """Claim for all free slots, unless too many results wait to be recorded."""
        wanted = min(len(self._free), MAX_AT_ONCE)
        if self._is_claiming or not wanted or self._to_finish + self._finishing >= MAX_BUFFERED:
            return
        self._is_claiming = True

        def claimed(_end: float) -> None:
            self._is_claiming = False
            for _ in range(wanted):
                slot = self._free.pop()
                self._left[slot] = answer_length(self._source)
                self._joining.append(slot)
            if not self._is_stepping:
                self._begin_step()
            self._claim()

        self._server.call("claim", self._costs.claim + wanted * self._costs.claimed, claimed)

    def _finish(self) -> None:
        """Commit ended jobs to SQL, then finish them by script; a new job follows each."""
        if self._finishing or not self._to_finish:
            return
        group = self._finishing = min(self._to_finish, MAX_GROUP)
        self._to_finish -= group

        def finished(end: float) -> None:
            self._finishing = 0
            if end >= self._seen.since:
                self._seen.jobs += group
            for _ in range(group):
                self._server.call("submit", self._costs.submit, lambda _end: None)
            self._finish()

        cost = self._costs.finish + group * self._costs.finished
        self._clock.after(COMMIT_S, lambda: self._server.call("finish", cost, finished))
