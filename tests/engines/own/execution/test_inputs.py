"""Reads which common prefix the inputs of a decode name."""

from __future__ import annotations

import torch

from tests.engines.own.support import make_sequence
from tokenmill_worker.engines.own.attention import AttentionMetadata
from tokenmill_worker.engines.own.config.cache import CacheConfig, LayerGroup, Window
from tokenmill_worker.engines.own.device import Device
from tokenmill_worker.engines.own.execution.inputs import InputBuilder
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepPlan

SEQS, SHARED, TOKENS = 20, 40, 650  # 41 blocks of 16 tokens each, of which 40 may be common
GROUPS = (
    LayerGroup((0,), num_kv_heads=1, head_dim=8, window=Window(64)),
    LayerGroup((1,), num_kv_heads=1, head_dim=8),
)


def metadata_of(num_tokens: int) -> tuple[AttentionMetadata, ...]:
    """Build the last `num_tokens` of each sequence; all but the first begin with common blocks."""
    cache = CacheConfig(16, GROUPS, 2000)
    builder = InputBuilder(cache, 1024, Device(torch.device("cpu")), SEQS, [None, 1])
    items = []
    for number in range(SEQS):
        sequence = make_sequence(f"s{number}", [5] * TOKENS, 4)
        common = [*range(1, 1 + SHARED)] if number else [*range(100, 100 + SHARED)]
        sequence.block_tables = [[*common, 200 + number] for _ in GROUPS]
        items.append(ScheduledSequence(sequence, TOKENS - num_tokens, num_tokens, True))
    return builder.build(StepPlan(0, tuple(items))).metadata


def test_inputs_of_a_decode_name_the_common_prefix_of_the_full_group() -> None:
    windowed, full = metadata_of(1)
    assert windowed.prefix is None
    assert full.prefix is not None
    tokens = SHARED * 16
    assert full.prefix.lens.tolist() == [0, *[tokens] * (SEQS - 1)]
    assert full.prefix.bounds.tolist() == [0, SEQS, tokens + SEQS]
    assert full.prefix.block_table[:SHARED].tolist() == list(range(1, 1 + SHARED))


def test_inputs_of_a_step_with_prompts_name_no_common_prefix() -> None:
    assert [group.prefix for group in metadata_of(2)] == [None, None]
