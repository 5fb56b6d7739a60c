"""Tests of host blocks: which block may displace which."""

import pytest

from tests.engines.own.scheduler.integrity import check_host_pool, held_blocks
from tokenmill_worker.engines.own.kv.host_pool import HostPool


def test_a_preempted_sequence_displaces_cached_blocks_oldest_first() -> None:
    pool = HostPool(2)
    a, b = pool.keep(b"a"), pool.keep(b"b")
    assert pool.num_free == 2
    assert pool.take() == a
    assert b"a" not in pool
    assert pool.find(b"b") == b
    assert pool.take() == b
    assert pool.take() is None
    assert pool.keep(b"c") is None, "held blocks do not give way"
    check_host_pool(pool)


def test_a_used_host_block_is_evicted_last() -> None:
    pool = HostPool(2)
    a, b = pool.keep(b"a"), pool.keep(b"b")
    assert a is not None
    pool.pin(a)
    pool.unpin(a)
    assert pool.keep(b"c") == b
    assert b"a" in pool
    assert pool.keep(b"a") is None, "kept already"
    assert pool.keep(b"d") is not None
    assert (b"a" in pool, b"c" in pool) == (True, False)


def test_a_pinned_host_block_is_not_evicted() -> None:
    pool = HostPool(1)
    block = pool.keep(b"a")
    assert block is not None
    pool.pin(block)
    pool.pin(block)
    pool.unpin(block)
    assert pool.num_free == 0
    assert pool.take() is None
    pool.unpin(block)
    assert pool.take() == block


def test_forgotten_and_returned_host_blocks_are_free() -> None:
    pool = HostPool(3)
    pool.keep(b"a")
    held = pool.take()
    assert held is not None
    pool.forget(b"a")
    pool.forget(b"unknown")
    pool.give_back(held)
    assert pool.num_free == 3
    assert held_blocks(pool) == []
    check_host_pool(pool)
    with pytest.raises(KeyError):
        pool.give_back(held)
