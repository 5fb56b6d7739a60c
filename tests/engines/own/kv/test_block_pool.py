"""The free list's order, sharing, fences: small pools, exact block ids."""

import pytest

from tests.engines.own.scheduler.integrity import free_blocks
from tests.engines.own.scheduler.loop import make_sequence
from tokenmill_worker.engines.own.kv.block_pool import BlockPool

OWNER = make_sequence("owner", [1])


def taken(pool: BlockPool, count: int) -> list[int]:
    return [pool.allocate() for _ in range(count)]


def test_block_zero_is_never_allocated() -> None:
    pool = BlockPool(4)
    assert taken(pool, 3) == [1, 2, 3]
    assert pool.num_free == 0
    with pytest.raises(RuntimeError):
        pool.allocate()


def test_unhashed_blocks_are_reused_first_and_hashed_blocks_by_age() -> None:
    pool = BlockPool(6)
    taken(pool, 5)
    for block in (1, 2, 3):
        pool.commit_hash(block, b"%d" % block)
    for block in (2, 5, 1, 4, 3):
        pool.release(block)
    assert free_blocks(pool) == [4, 5, 2, 1, 3]
    assert pool.num_free_cached == 3


def test_a_hit_removes_a_block_from_the_middle_of_the_free_list() -> None:
    pool = BlockPool(6)
    taken(pool, 5)
    for block in range(1, 6):
        pool.commit_hash(block, b"%d" % block)
        pool.release(block)
    pool.share(3)
    assert free_blocks(pool) == [1, 2, 4, 5]
    assert pool.refs[3] == 1
    pool.share(3)
    pool.release(3)
    pool.release(3)
    assert free_blocks(pool) == [1, 2, 4, 5, 3], "used last, evicted last"


def test_an_evicted_block_loses_its_hash_and_is_reported() -> None:
    evicted: list[tuple[bytes, int]] = []
    pool = BlockPool(2, on_evict=lambda content, block: evicted.append((content, block)))
    pool.commit_hash(pool.allocate(), b"a")
    pool.release(1)
    assert pool.cached == {b"a": 1}
    assert pool.allocate() == 1
    assert pool.cached == {}
    assert evicted == [(b"a", 1)]
    assert pool.evicted == 1


def test_the_first_of_two_blocks_with_equal_content_keeps_the_hash() -> None:
    pool = BlockPool(4)
    first, second = taken(pool, 2)
    pool.commit_hash(first, b"same")
    pool.commit_hash(second, b"same")
    assert pool.cached == {b"same": first}
    pool.release(second)
    assert free_blocks(pool)[0] == second, "an unregistered copy is worth nothing"


def test_a_reserved_hash_is_dropped_if_its_block_is_released() -> None:
    pool = BlockPool(4)
    block = pool.allocate()
    pool.reserve_hash(block, b"soon", OWNER)
    assert pool.cached == {b"soon": block}
    pool.release(block)
    assert pool.cached == {}
    assert pool.reserved == {}


def test_a_committed_hash_stays_cached_after_release() -> None:
    pool = BlockPool(4)
    block = pool.allocate()
    pool.reserve_hash(block, b"soon", OWNER)
    pool.commit_hash(block, b"soon")
    pool.release(block)
    assert pool.cached == {b"soon": block}
    assert pool.num_free_cached == 1


def test_forget_all_keeps_held_blocks_and_drops_every_hash() -> None:
    pool = BlockPool(5)
    held, free, reserved = taken(pool, 3)
    pool.commit_hash(held, b"held")
    pool.commit_hash(free, b"free")
    pool.reserve_hash(reserved, b"reserved", OWNER)
    pool.release(free)
    pool.forget_all()
    assert (pool.cached, pool.reserved, pool.num_free_cached) == ({}, {}, 0)
    assert free_blocks(pool)[0] == free
    assert pool.refs[held] == 1


def test_releasing_a_free_block_is_an_error() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(RuntimeError):
        pool.release(block)
