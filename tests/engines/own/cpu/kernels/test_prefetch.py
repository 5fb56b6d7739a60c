"""The prefetch (prefetch.h) fetches all blocks that attention reads, once, and no others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from ctypes import addressof, byref, c_char, c_int32, c_int64, c_void_p
from itertools import count

import numpy as np
import pytest

from tests.engines.own.cpu.kernels.compiled import compiled
from tokenmill_worker.engines.own.cpu.attention import AttendArguments

LINE, BLOCK_SIZE, HEAD_DIM, KV_HEADS = 64, 16, 64, 2
BLOCK = KV_HEADS * BLOCK_SIZE * HEAD_DIM  # numbers: a block's keys, or its values
ROWS = count(1)


def fetched(
    tables: Sequence[Sequence[int]], lengths: Sequence[int], *, parts: int = 2,
    calls: int = 4096, window: int = 0, is_chunked: bool = False,
    kv_type: int = 0,
) -> Counter[tuple[str, int]]:  # fmt: skip
    """Count the fetches of each block's keys and values.

    All lines of a block must be fetched equally often.
    """
    size = (4, 2, 2, 1)[kv_type]
    table = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, blocks in zip(table, tables, strict=True):
        row[: len(blocks)] = blocks
    seq_lens = np.array(lengths, np.int32)
    cache = (c_char * 1)()
    attention = AttendArguments(
        cache=addressof(cache), block_table=table.ctypes.data, seq_lens=seq_lens.ctypes.data,
        num_seqs=len(tables),
        table_stride=table.shape[1], block_stride=2 * BLOCK, value_offset=BLOCK,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM, block_size=BLOCK_SIZE, window=window,
        is_chunked=is_chunked, kv_type=kv_type,
    )  # fmt: skip
    addresses = (c_void_p * (parts * calls * 4))()
    lines_of = compiled("prefetch_lines").lines_of
    lines_of.restype = c_int64
    number = lines_of(
        byref(attention), c_int64(next(ROWS)), c_int32(parts), c_int64(calls), addresses
    )
    found = np.array(addresses[:number], np.int64) - addressof(cache)
    assert (found % LINE == 0).all()
    lines = Counter(found.tolist())
    per_half = BLOCK * size // LINE
    halves: dict[tuple[str, int], set[int]] = {}
    for at, times in lines.items():
        block, within = divmod(at, 2 * BLOCK * size)
        halves.setdefault((("keys", "values")[within // (BLOCK * size)], block), set()).add(times)
    assert len(lines) == per_half * len(halves), "parts of blocks"
    assert all(len(times) == 1 for times in halves.values())
    return Counter({half: times.pop() for half, times in halves.items()})


def blocks(*numbers: int) -> Counter[tuple[str, int]]:
    return Counter({(half, number): 1 for number in numbers for half in ("keys", "values")})


@pytest.mark.parametrize("kv_type", range(4))
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_prefetch_fetches_exactly_the_blocks_that_attention_reads(
    parts: int, kv_type: int
) -> None:
    found = fetched([[3, 1, 9], [4, 7, 9], [2, 5, 0]], [33, 32, 17], parts=parts, kv_type=kv_type)
    assert found == blocks(3, 1, 9, 4, 7, 2, 5)


def test_the_prefetch_fetches_a_common_prompt_once_per_thread() -> None:
    tables = [[8, 6, number] for number in range(4)]
    assert fetched(tables, [40] * 4, parts=1) == blocks(8, 6, 0, 1, 2, 3)
    assert fetched(tables, [40] * 4) == blocks(8, 6, 0, 1, 2, 3) + blocks(8, 6)


def test_the_prefetch_leaves_out_blocks_before_the_window() -> None:
    assert fetched([[1, 2, 3, 4]], [64], window=17) == blocks(3, 4)
    assert fetched([[1, 2, 3, 4]], [64], window=64) == blocks(1, 2, 3, 4)
    assert fetched([[1, 2, 3, 4]], [49], window=48, is_chunked=True) == blocks(4)
    assert fetched([[1, 2, 3, 4]], [48], window=48, is_chunked=True) == blocks(1, 2, 3)


def test_the_prefetch_continues_across_calls_and_ends_at_its_limit() -> None:
    assert fetched([[1, 2]], [20], parts=1, calls=64) == blocks(1)
    every = list(range(600))
    some = fetched([every], [600 * BLOCK_SIZE], parts=1, calls=40_000)
    assert some == blocks(*every[: (1 << 22) // (2 * BLOCK * 4)])
