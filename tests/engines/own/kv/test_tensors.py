"""The pool's memory: when it is taken, and who sees which part of it."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path

import pytest
import torch

from tokenmill_worker.engines.own.attention.reference import ReferenceAttention
from tokenmill_worker.engines.own.config.cache import LayerGroup, Window, with_common_blocks
from tokenmill_worker.engines.own.cpu import huge_pages
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.kv.tensors import KVCachePool

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_pool_takes_its_memory_when_it_gets_its_pages_and_keeps_what_it_holds() -> None:
    group = LayerGroup(layers=(0, 1), num_kv_heads=4, head_dim=64, window=None)
    before = resident_bytes()
    pool = KVCachePool.allocate([group], 4096, 16, ReferenceAttention(), torch.float32, CpuDevice())
    assert pool.num_bytes == 256 * MIB
    pool.blocks[7] = 1
    assert resident_bytes() - before < 32 * MIB
    huge_pages.populate(pool.blocks).join(60)
    assert resident_bytes() - before > 240 * MIB
    assert pool.blocks[7].all()
    assert pool.blocks.count_nonzero() == pool.blocks[7].numel()


def test_memory_that_is_freed_ends_the_thread_that_gives_it_pages() -> None:
    memory = huge_pages.zeros(256 * MIB)
    thread = huge_pages.populate(memory)
    freed = weakref.ref(memory)
    del memory
    thread.join(60)
    assert not thread.is_alive()
    assert freed() is None


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_groups_share_the_memory_block_by_block(block_size: int) -> None:
    """A group writes to its kernel blocks of some blocks, and other blocks stay as they were."""
    groups = with_common_blocks(
        [LayerGroup(tuple(range(11)), 2, 8, window=Window(9)), LayerGroup((11, 12), 2, 8)]
    )
    pool = KVCachePool.allocate(
        groups, 6, block_size, ReferenceAttention(), torch.bfloat16, CpuDevice()
    )
    assert [len(group) for group in pool.groups] == [6, 36]
    pool.groups[1][12:18] = 1  # the kernel blocks of block 2
    assert [bool(block.any()) for block in pool.blocks] == [False, False, True] + [False] * 3
    assert pool.blocks[2].count_nonzero() == 6 * block_size * groups[1].token_size
    for index in range(11):
        pool.layer(0, index)[4] = 2
    assert pool.blocks[4].count_nonzero() == block_size * groups[0].token_size
    for layer in (*(pool.layer(0, i) for i in range(11)), *(pool.layer(1, i) for i in range(2))):
        assert layer.stride(0) * layer.element_size() % 128 == 0
