"""Decodes over the same blocks are computed together, and no result changes by that."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention import AttentionMetadata, AttentionShape
from tokenmill_worker.engines.own.cpu.attention import CpuAttention
from tokenmill_worker.engines.own.cpu.kernels.toolchain import KernelUnavailableError

TILE = 256  # positions, as in attention_plan.h
DIM = 32


@pytest.fixture(scope="module", params=["native", "x86-64-v3"])
def backend(request: pytest.FixtureRequest) -> CpuAttention:
    try:
        return CpuAttention(march=request.param, uses_amx=False)
    except KernelUnavailableError as error:
        pytest.skip(f"no kernel: {error}")


def decode(
    backend: CpuAttention,
    tables: list[list[int]],
    lens: list[int],
    block_size: int,
    group: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the results of all sequences in one call, and of each in a call of its own."""
    generator = torch.Generator().manual_seed(3)
    heads, count, width = 2, len(tables), max(map(len, tables))
    num_blocks = 1 + max(max(table) for table in tables)
    cache = torch.randn(
        num_blocks, 2, *backend.block_shape(block_size, heads, DIM), generator=generator
    ).to(dtype)
    query = torch.randn(count, heads * group, DIM, generator=generator)
    shape = AttentionShape(heads * group, heads, DIM, 0.3)
    metadata = AttentionMetadata(
        query_start=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        block_table=torch.tensor(
            [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        slot_mapping=torch.zeros(count, dtype=torch.int64),
        max_query_len=1, max_seq_len=max(lens), block_size=block_size, window=None,
    )  # fmt: skip
    alone = [
        backend.attend(
            query[i : i + 1],
            cache,
            dataclasses.replace(
                metadata,
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=metadata.seq_lens[i : i + 1],
                block_table=metadata.block_table[i : i + 1],
            ),
            shape,
        )
        for i in range(count)
    ]
    return backend.attend(query, cache, metadata, shape), torch.cat(alone)


def blocks(first: int, positions: int, block_size: int) -> list[int]:
    return list(range(first, first + -(-positions // block_size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("block_size", [8, 16, 24, 64])  # 24: tiles are no whole blocks
@pytest.mark.parametrize("group", [1, 3])
def test_computing_a_common_prompt_together_changes_no_bit(
    backend: CpuAttention, block_size: int, group: int, dtype: torch.dtype
) -> None:
    """Two prompts of two tiles and a bit, in mixed order, and sequences that share nothing or end
    within a tile.
    """
    most = -(-(2 * TILE + 90) // block_size)  # blocks of one sequence
    common = {name: blocks(1 + most * name, 2 * TILE + 80, block_size) for name in range(2)}
    tables, lens = [], []
    order = random.Random(5)
    for index in range(45):
        length = order.choice([TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 40, 2 * TILE + 90])
        own = blocks(1 + most * (2 + index), length, block_size)
        kept = common[index % 2][: min(length, 2 * TILE + 40) // block_size] if index % 5 else []
        tables.append(kept + own[len(kept) :])
        lens.append(length)
    together, alone = decode(backend, tables, lens, block_size, group, dtype)
    assert torch.equal(together, alone)


def test_more_sequences_than_one_group_holds_have_the_same_bits(backend: CpuAttention) -> None:
    tables = [[*blocks(1, TILE, 16), 50 + index] for index in range(150)]
    together, alone = decode(
        backend, tables, [TILE + 1 + index % 16 for index in range(150)], 16, 3, torch.float32
    )
    assert torch.equal(together, alone)


def test_a_tile_that_shares_only_its_first_blocks_is_not_shared(backend: CpuAttention) -> None:
    first = blocks(1, 2 * TILE, 16)
    tables = [list(first) for _ in range(4)]
    tables[1][15], tables[2][1], tables[3][20] = 60, 61, 62
    together, alone = decode(backend, tables, [2 * TILE] * 4, 16, 2, torch.float32)
    assert torch.equal(together, alone)
    assert not torch.allclose(together[0], together[1])
