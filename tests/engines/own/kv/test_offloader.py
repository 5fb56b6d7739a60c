"""Block moves on real tensors, and the runs that make them few."""

from __future__ import annotations

import pytest
import torch

from tokenmill_worker.engines.own.attention.reference import ReferenceAttention
from tokenmill_worker.engines.own.config.cache import LayerGroup, Window
from tokenmill_worker.engines.own.cpu.device import CpuDevice
from tokenmill_worker.engines.own.execution.build import pick_device
from tokenmill_worker.engines.own.kv.offloader import Offloader, runs
from tokenmill_worker.engines.own.kv.tensors import KVCachePool
from tokenmill_worker.engines.own.plan import BlockCopy, StepPlan

GROUPS = (LayerGroup((0, 2), 2, 4), LayerGroup((1,), 1, 8, window=Window(4), kernel_blocks=2))
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def make_pool(num_blocks: int, device: str) -> KVCachePool:
    """Make a pool in which every block holds its own number."""
    pool = KVCachePool.allocate(
        GROUPS, num_blocks, 4, ReferenceAttention(), torch.float32, pick_device(device)
    )
    pool.blocks[:] = torch.arange(num_blocks, device=device)[:, None]
    return pool


def held(tensor: torch.Tensor) -> list[float]:
    """Return the number in each block; it must be the same in all of the block."""
    flat = tensor.cpu().flatten(1)
    assert (flat == flat[:, :1]).all()
    return [float(value) for value in flat[:, 0]]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("max_staging", [1, 1 << 20])
def test_moved_blocks_keep_all_their_bytes(device: str, max_staging: int) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pool, host = make_pool(8, device), make_pool(8, "cpu")
    pinned = pick_device(device).pin([host.blocks])
    mover = Offloader(pool, host, pick_device(device).copy_stream(), max_staging)
    swap_out = tuple(BlockCopy(*pair) for pair in ((5, 1), (2, 2), (7, 6), (4, 3)))
    mover.run(StepPlan(0, (), swap_out=swap_out))
    swap_in = tuple(BlockCopy(*pair) for pair in ((1, 3), (6, 4), (3, 6)))
    mover.run(StepPlan(1, (), swap_in=swap_in))
    mover.synchronize()
    if pinned is not None:
        pinned.close()
    assert held(host.blocks) == [0, 5, 2, 4, 4, 5, 7, 7]
    assert held(pool.blocks) == [0, 1, 2, 5, 7, 5, 4, 7]
    assert held(pool.groups[1][12:14]) == [4, 4]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16], ids=["8 bits", "16 bits"])
def test_blocks_of_a_large_pool_move(device: str, dtype: torch.dtype) -> None:
    """The pool has more than 2³¹ elements; on a CPU, blocks that are not used take no memory."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    groups = (LayerGroup(tuple(range(32)), 8, 128),)
    last = 2**31 // (32 * 2 * 8 * 16 * 128) + 2
    pool, host = (
        KVCachePool.allocate(groups, count, 16, ReferenceAttention(), dtype, pick_device(where))
        for count, where in ((last + 1, device), (4, "cpu"))
    )
    assert pool.blocks.numel() > 2**31
    near, far = 1, last
    pool.blocks[near].fill_(1)
    pool.blocks[far].fill_(2)
    pinned = pick_device(device).pin([host.blocks])
    mover = Offloader(pool, host, pick_device(device).copy_stream())
    mover.run(StepPlan(0, (), swap_out=(BlockCopy(far, 2), BlockCopy(near, 3))))
    mover.run(StepPlan(1, (), swap_in=(BlockCopy(2, near), BlockCopy(3, far - 1))))
    mover.synchronize()
    if pinned is not None:
        pinned.close()
    assert held(host.blocks.float()) == [0, 0, 2, 1]
    assert held(torch.stack([pool.blocks[place].float() for place in (near, far - 1, far)])) == [
        2,
        1,
        2,
    ]


def test_a_step_copies_blocks_out_before_in() -> None:
    pool, host = make_pool(4, "cpu"), make_pool(4, "cpu")
    plan = StepPlan(0, (), swap_out=(BlockCopy(1, 3),), swap_in=(BlockCopy(3, 2),))
    Offloader(pool, host).run(plan)
    assert held(pool.blocks) == [0, 1, 1, 3]


def test_blocks_of_8_bits_move_as_bytes() -> None:
    pools = [
        KVCachePool.allocate(GROUPS, 4, 4, ReferenceAttention(), torch.float8_e4m3fn, CpuDevice())
        for _ in range(2)
    ]
    pool, host = pools
    for block in range(4):
        pool.blocks[block].fill_(block)
    plan = StepPlan(0, (), swap_out=(BlockCopy(1, 3),), swap_in=(BlockCopy(3, 2),))
    Offloader(pool, host).run(plan)
    assert held(pool.blocks.float()) == [0, 1, 1, 3]
    assert held(host.blocks.float()) == [0, 0, 0, 1]


def test_swaps_without_a_host_pool_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="no host pool"):
        Offloader(make_pool(4, "cpu"), None).run(StepPlan(0, (), swap_out=(BlockCopy(1, 0),)))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], []),
        ([3], [(0, 1)]),
        ([3, 4, 5], [(0, 3)]),
        ([3, 4, 6, 7, 7, 2], [(0, 2), (2, 4), (4, 5), (5, 6)]),
    ],
)
def test_runs_of_consecutive_blocks(ids: list[int], expected: list[tuple[int, int]]) -> None:
    assert list(runs(ids)) == expected


def test_large_moves_take_few_operations() -> None:
    """One gather and one scatter per direction, however many blocks."""
    pool, host = make_pool(100, "cpu"), make_pool(100, "cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        Offloader(pool, host).run(
            StepPlan(0, (), swap_out=tuple(BlockCopy(i, 99 - i) for i in range(1, 99)))
        )
    names = [event.name for event in profile.events() or ()]
    assert names.count("aten::index_select") == 1
    assert names.count("aten::index_copy_") == 1


def test_moves_are_sorted_by_host_block() -> None:
    """Blocks that lie side by side there travel in one copy, in whatever order they were given."""
    pool, host = make_pool(8, "cpu"), make_pool(8, "cpu")
    mover = Offloader(pool, host)
    plan = StepPlan(0, (), swap_out=tuple(BlockCopy(*pair) for pair in ((5, 3), (1, 1), (7, 2))))
    ((sources, targets),) = mover._parts(plan.swap_out, lambda copy: copy.target)
    assert (sources, targets) == ([1, 7, 5], [1, 2, 3])
    mover.run(plan)
    assert held(host.blocks)[1:4] == [1, 7, 5]
