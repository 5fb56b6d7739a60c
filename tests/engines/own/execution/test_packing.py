"""A step's tokens are packed in one flat row: no padding, whatever the sequences compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines.own.support import execute, make_sequence
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.execution.build import load_model_runner
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepPlan


@pytest.mark.parametrize(
    ("computed", "prompts", "rows"),
    [
        (1, (3, 2), 6),  # two prompts and a decode: one product of 6 rows
        (7, (100,), 107),  # padded to a rectangle, 8 × 100 would be 693 more
    ],
)
def test_prompts_and_decodes_are_packed_in_one_row_without_padding(
    computed: int, prompts: tuple[int, ...], rows: int, llama: Path
) -> None:
    runner = load_model_runner(
        EngineConfig(
            model=str(llama), dtype="float32", device="cpu", attention="reference", fuse=False,
            block_size=4, num_blocks=100, max_num_seqs=8,
        )
    )  # fmt: skip
    lengths = [*prompts[:1], *[1] * computed, *prompts[1:]]
    starts = [0, *[5] * computed, *[0] * len(prompts[1:])]
    items, block = [], 1
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        sequence = make_sequence(str(index), range(3, 3 + start + length), 4)
        count = -(-(start + length) // 4)
        sequence.block_tables = [list(range(block, block + count))]
        block += count
        items.append(ScheduledSequence(sequence, start, length, True))
    shapes: list[tuple[int, ...]] = []
    layer = runner._loaded.model.get_submodule("model.layers.0.self_attn.q_proj")
    layer.register_forward_hook(lambda _module, args, _output: shapes.append(tuple(args[0].shape)))
    output = execute(runner, StepPlan(0, tuple(items)))
    assert shapes == [(1, rows, 64)]
    assert len(output.token_ids) == len(items)
