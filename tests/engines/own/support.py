"""Tools of the engine tests: sequences, and a planner that only chunks and never preempts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.config.cache import CacheConfig
from tokenmill_worker.engines.own.execution.interface import Runner
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepOutput, StepPlan
from tokenmill_worker.engines.own.sequence import Sequence


def execute(runner: Runner, plan: StepPlan) -> StepOutput:
    return runner.finish(runner.launch(plan))


def make_sequence(name: str, prompt: Iterable[int], max_tokens: int, **params: object) -> Sequence:
    """Make a greedy sequence that no end-of-text token ends."""
    ids = list(prompt)
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
    return Sequence(name, ids, len(ids), sampling, max_tokens=max_tokens)


@dataclass
class ChunkingPlanner:
    """Plans everything at once, with prompts in chunks.

    Blocks are handed out in shuffled order and never come back.
    """

    cache: CacheConfig
    chunk: int
    sequences: list[Sequence] = field(default_factory=list)
    _step_ids: itertools.count[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        free = self._free = list(range(1, self.cache.num_blocks))[::-1]
        free[::2], free[1::2] = free[::2][::-1], free[1::2]

    def add(self, sequence: Sequence) -> None:
        sequence.block_tables = [[] for _ in self.cache.groups]
        self.sequences.append(sequence)

    def plan(self) -> StepPlan:
        items = []
        for sequence in self.sequences:
            if sequence.num_output_tokens >= sequence.max_tokens:
                continue
            start = sequence.num_computed_tokens
            count = min(self.chunk, sequence.num_tokens - start)
            self._allocate(sequence, start + count)
            items.append(
                ScheduledSequence(sequence, start, count, start + count == sequence.num_tokens)
            )
        return StepPlan(next(self._step_ids), tuple(items))

    def commit(self, plan: StepPlan, output: StepOutput) -> None:
        tokens = iter(output.token_ids)
        for item in plan.scheduled:
            item.sequence.num_computed_tokens += item.num_tokens
            if item.samples:
                item.sequence.token_ids.extend(next(tokens))

    def _allocate(self, sequence: Sequence, length: int) -> None:
        for table, size in zip(sequence.block_tables, self.cache.block_sizes, strict=True):
            while len(table) * size < length:
                table.append(self._free.pop())
