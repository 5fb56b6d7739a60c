"""Inputs that are counted up are those that would have been made anew, whatever a schedule does
between.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.config.cache import CacheConfig, LayerGroup, Window
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.device import StepInputs
from tokenmill_worker.engines.own.execution.inputs import InputBuilder
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepPlan
from tokenmill_worker.engines.own.sequence import NULL_BLOCK, Sequence

SIZE = 4
PARTS = 3  # kernel blocks in a block of the first group
CONFIG = CacheConfig(
    SIZE,
    (LayerGroup((0,), 1, 8, kernel_blocks=PARTS), LayerGroup((1,), 1, 8, window=Window(6))),
    1000,
)
CPU = CpuDevice()


class Schedule:
    """Random steps over sequences that come, go on, stop for a step, lose what left the window, are
    preempted or offloaded, and fail.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.blocks = iter(range(1, 1_000_000))
        self.running = [self.new() for _ in range(3)]

    def new(self) -> Sequence:
        count = self.chance.randrange(1, 12)
        ids = [self.chance.randrange(100) for _ in range(count)]
        return Sequence("r", ids, count, SamplingParams(), block_tables=[[], []])

    def steps(self, count: int) -> Iterator[list[ScheduledSequence]]:
        for _ in range(count):
            items = [
                self.item(sequence) for sequence in self.running if self.chance.random() > 0.02
            ]
            if not items:
                continue
            yield items
            if self.chance.random() < 0.03:
                continue  # it failed: the same again
            for item in items:
                item.sequence.num_computed_tokens = item.start + item.num_tokens
                if item.samples:
                    item.sequence.token_ids.append(self.chance.randrange(100))
            self.change()

    def item(self, sequence: Sequence) -> ScheduledSequence:
        start, known = sequence.num_computed_tokens, len(sequence.token_ids)
        stop = known if known - start == 1 else self.chance.randrange(start + 1, known + 1)
        for table, size in zip(sequence.block_tables, CONFIG.block_sizes, strict=True):
            while len(table) * size < stop:
                table.append(next(self.blocks) % 1000 or 1)
        return ScheduledSequence(sequence, start, stop - start, stop == known, epoch=sequence.epoch)

    def change(self) -> None:
        if self.chance.random() < 0.05:
            self.running.append(self.new())
        if self.chance.random() < 0.05 and len(self.running) > 1:
            self.running.pop(self.chance.randrange(len(self.running)))
        if self.chance.random() < 0.05:
            self.chance.shuffle(self.running)
        for sequence in self.running:
            beyond = max(0, sequence.num_computed_tokens + 1 - 6) // SIZE
            sequence.block_tables[1][:beyond] = [NULL_BLOCK] * beyond
            if self.chance.random() < 0.02:
                sequence.block_tables, sequence.num_computed_tokens = [[], []], 0
                sequence.epoch += 1
            # it was offloaded, and its last block is back where it was
            elif self.chance.random() < 0.02:
                for table in sequence.block_tables:
                    table[:-1] = [block and (next(self.blocks) % 1000 or 1) for block in table[:-1]]
                sequence.epoch += 1


def whole(inputs: StepInputs, items: list[ScheduledSequence]) -> list[object]:
    """Return all that a model reads; of block tables, the part that is seen."""
    found: list[object] = [
        inputs.input_ids.tolist(),
        inputs.positions.tolist(),
        inputs.rows.tolist(),
    ]
    for group, one in enumerate(inputs.metadata):
        seen = [
            row[(max(0, item.start + 1 - 6) // SIZE if group else 0) : -(-length // SIZE)]
            for row, item, length in zip(
                one.block_table.tolist(), items, one.seq_lens.tolist(), strict=True
            )
        ]
        found += [one.query_start.tolist(), one.seq_lens.tolist(), one.slot_mapping.tolist(), seen]
        found += [
            one.max_query_len,
            one.max_seq_len,
            one.block_size,
            one.window,
            one.query_lens_host,
            one.seq_lens_host,
        ]
        found.append(one.block_table.shape)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_inputs_advanced_in_place_equal_inputs_built_anew(seed: int) -> None:
    builder, kept, steps, last = InputBuilder(CONFIG, 4096, CPU, 2), 0, 0, 0
    for number, items in enumerate(Schedule(seed).steps(150)):
        plan = StepPlan(number, tuple(items))
        inputs = builder.build(plan)
        assert whole(inputs, items) == whole(InputBuilder(CONFIG, 4096, CPU, 2).build(plan), items)
        steps, kept, last = (
            steps + 1,
            kept + (inputs.input_ids.data_ptr() == last),
            inputs.input_ids.data_ptr(),
        )
    assert kept > steps / 10, "hardly any step was counted up"


def test_inputs_of_a_repeated_step_are_built_anew() -> None:
    """The same step comes twice when its first run has failed."""
    sequence = Sequence("r", [1, 2, 3], 3, SamplingParams(), block_tables=[[5], [7]])
    builder, plans = InputBuilder(CONFIG, 64, CPU, 1), []
    for start in (2, 2, 3, 3):
        if start == len(sequence.token_ids):
            sequence.token_ids.append(9)
        plans.append(builder.build(StepPlan(0, (ScheduledSequence(sequence, start, 1, True),))))
        assert plans[-1].positions.tolist() == [start]
        assert plans[-1].metadata[0].slot_mapping.tolist() == [5 * PARTS * SIZE + start]
        assert plans[-1].metadata[1].slot_mapping.tolist() == [7 * SIZE + start]
