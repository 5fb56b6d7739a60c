"""A cache pool takes the machine's memory when it is touched."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tokenmill_worker.engine.attention.reference import ReferenceAttention
from tokenmill_worker.engine.cache_config import LayerGroup
from tokenmill_worker.engine.cpu.device import CpuDevice
from tokenmill_worker.engine.kv.tensors import KVCachePool

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_pool_takes_its_memory_when_it_is_touched() -> None:
    group = LayerGroup(layers=(0, 1), num_kv_heads=4, head_dim=64, window=None)
    before = resident_bytes()
    pool = KVCachePool.allocate(
        [group], [4096], 16, ReferenceAttention(), torch.float32, CpuDevice()
    )
    assert pool.num_bytes == 256 * MIB
    assert resident_bytes() - before < 32 * MIB
    pool.touch()
    assert resident_bytes() - before > 240 * MIB
    assert not pool.tensors[0].any()
