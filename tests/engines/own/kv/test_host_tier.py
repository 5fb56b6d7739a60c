"""Tests of the copies of a step: what its commit may still change."""

from tests.engines.own.scheduler.loop import make_sequence
from tokenmill_worker.engines.own.kv.block_pool import BlockPool
from tokenmill_worker.engines.own.kv.host_tier import HostTier, StepCopies


def test_a_commit_does_not_touch_the_reservation_of_a_block_s_next_owner() -> None:
    """The first owner ended while the step was in flight, and its block was allocated again."""
    pool, first, second = BlockPool(2), make_sequence("a", [1]), make_sequence("b", [2])
    block = pool.allocate()
    pool.reserve_hash(block, b"a", first)
    copies = StepCopies(filled_blocks=[(block, first)])
    pool.release(block)
    assert pool.allocate() == block
    pool.reserve_hash(block, b"b", second)
    HostTier(0).commit(copies, pool)
    assert pool.reserved == {block: second}
