"""Finds the blocks that count as the common prefix of a decode, and none where few are shared."""

from __future__ import annotations

import numpy as np
import pytest

from tokenmill_worker.engines.own.attention.common_prefix import (
    LEAST_SEQS,
    LEAST_TOKENS,
    find_prefix,
    least_saved_tokens,
)
from tokenmill_worker.engines.own.config.cache import LayerGroup, Window

BLOCK, BLOCKS = 16, 128
LLAMA = LayerGroup(layers=(0,), num_kv_heads=8, head_dim=128)
(LEAST,) = least_saved_tokens([LLAMA], element_size=2)
assert LEAST is not None


def found(shared: list[int], ends: list[int] | None = None) -> tuple[list[int], int] | None:
    """Return each sequence's tokens of the prefix, and the leader; sequences begin with so many
    blocks of the longest, and have more of their own.
    """
    table = np.arange(1, 1 + len(shared) * BLOCKS, dtype=np.int32).reshape(-1, BLOCKS)
    for row, blocks in zip(table, shared, strict=True):
        row[:blocks] = np.arange(-BLOCKS, blocks - BLOCKS)
    assert LEAST is not None
    prefix = find_prefix(table, np.array(ends or [BLOCK * BLOCKS] * len(shared)), BLOCK, LEAST)
    if prefix is None:
        return None
    tokens = int(prefix.lens.max())
    assert prefix.bounds.tolist() == [0, len(shared), tokens + len(shared)]
    return [int(each) // BLOCK for each in prefix.lens], prefix.leader


def test_a_prefix_is_shared_by_the_sequences_that_have_it_and_not_by_others() -> None:
    assert found([0, *[64] * 40, 3]) == ([0, *[64] * 40, 0], 1)
    assert found([0] * 33) is None


def test_the_prefix_that_saves_the_most_tokens_is_taken() -> None:
    """A longer one of fewer sequences, or a shorter one of more."""
    assert found([50] * 40 + [120] * 8) == ([50] * 48, 0)
    assert found([120] * 40 + [50] * 8) == ([120] * 40 + [0] * 8, 0)


def test_the_prefix_ends_before_a_sequence_s_last_token() -> None:
    """Blocks behind a sequence's end do not count, whatever the table has there."""
    assert found([64] * 64, [64 * BLOCK] * 64) == ([63] * 64, 0)
    assert found([64] * 64, [64 * BLOCK + 1] * 64) == ([64] * 64, 0)
    assert found([64] * 65, [5, *[64 * BLOCK + 1] * 64]) == ([0, *[64] * 64], 0)


@pytest.mark.parametrize(
    ("count", "tokens", "pays"),
    [
        (17, 2032, False),  # 32,512 tokens saved, of 32,768
        (32, 1024, False),
        (33, 1024, True),
        (64, LEAST_TOKENS, False),
        (65, LEAST_TOKENS, True),
        (200, LEAST_TOKENS - BLOCK, False),
    ],
)
def test_a_prefix_that_saves_too_few_tokens_is_not_used(
    count: int, tokens: int, *, pays: bool
) -> None:
    assert (found([tokens // BLOCK] * count) is not None) == pays


def test_a_prefix_of_too_few_sequences_is_not_used() -> None:
    table, ends = np.ones((LEAST_SEQS, 200), np.int32), np.full(LEAST_SEQS, 3200)
    assert find_prefix(table[1:], ends[1:], 16, 1) is None
    assert find_prefix(table, ends, 16, 1)


def test_the_least_length_follows_from_the_bytes_of_a_token() -> None:
    small = LayerGroup(layers=(0,), num_kv_heads=1, head_dim=64)
    window = LayerGroup(layers=(1,), num_kv_heads=8, head_dim=128, window=Window(64))
    assert least_saved_tokens([LLAMA, small, window], 2) == [32_768, 524_288, None]
