"""Tables, counts and swaps of the KV manager, with exact numbers: blocks of 4 tokens."""

from __future__ import annotations

import pytest

from tests.engines.own.scheduler.loop import make_cache, make_sequence
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.kv.manager import KVManager
from tokenmill_worker.engines.own.kv.prefix_cache import CachedPrefix
from tokenmill_worker.engines.own.sequence import Sequence


def manager(
    num_blocks: int = 20,
    windows: tuple[int | Window | None, ...] = (None,),
    host: int = 0,
    margin: float = 0.0,
    kernel_blocks: tuple[int, ...] = (1, 1),
) -> KVManager:
    """Make a manager with `num_blocks` and `host` blocks for each group."""
    cache = make_cache(
        num_blocks, windows=windows, num_host_blocks=host, kernel_blocks=kernel_blocks
    )
    return KVManager(cache, model_key="m", max_chunk=8, safety_margin=margin)


def admitted(kv: KVManager, name: str, length: int) -> Sequence:
    sequence = make_sequence(name, [ord(name) + position for position in range(length)])
    hit = kv.find(sequence)
    assert kv.allocate(sequence, hit, None)
    sequence.num_computed_tokens = sequence.num_committed_tokens = hit.num_tokens
    return sequence


def test_a_prompt_gets_all_its_blocks_at_once() -> None:
    kv = manager()
    sequence = admitted(kv, "a", 10)
    assert sequence.block_tables == [[1, 2, 3]]
    assert sequence.num_slots == 12
    assert (kv.pool.num_free, len(kv.pool.reserved)) == (16, 2)


def test_blocks_are_allocated_in_all_groups_or_in_none() -> None:
    kv = manager(4, windows=(None, None))
    sequence = make_sequence("a", list(range(16)))
    assert not kv.allocate(sequence, kv.find(sequence), None), "3 of 4 blocks in each group"
    assert kv.pool.num_free == 6
    assert sequence.block_tables == []
    kv.pool.allocate()
    small = admitted(kv, "b", 8)
    assert not kv.grow(small, 9), "one block is left, and two groups need one"
    assert kv.pool.num_free == 1
    assert small.num_slots == 8
    assert kv.reach(small, 9) == 8


def test_a_group_with_fewer_bytes_per_token_holds_more_tokens_in_a_block() -> None:
    kv = manager(windows=(None, 6), kernel_blocks=(3, 1))
    sequence = admitted(kv, "a", 25)
    assert [len(table) for table in sequence.block_tables] == [3, 5]  # of 12 and of 4 tokens
    assert sequence.num_slots == 20
    kv.advance(sequence, 17)
    assert [len(kv.keys(sequence, group, 0, 9)) for group in (0, 1)] == [2, 6]
    assert kv.grow(sequence, 25)
    kv.advance(sequence, 25)
    kv.free(sequence, in_flight=False)
    again = make_sequence("again", sequence.token_ids)
    assert kv.find(again).num_tokens == 24, "a whole number of blocks of both groups"
    shorter = make_sequence("shorter", sequence.token_ids[:23])
    assert kv.find(shorter).num_tokens == 12
    assert kv.allocate(again, kv.find(again), None)
    assert [len(table) for table in again.block_tables] == [3, 7]
    assert again.block_tables[1][:4] == [0] * 4
    assert kv.reach(again, 1000) == 28 + 4 * (kv.pool.num_free - kv.pool.num_free // 4)


def test_groups_share_one_pool_of_blocks() -> None:
    """A long sequence takes what short ones would hold in the sliding group."""
    kv = manager(20, windows=(None, 6))
    long = admitted(kv, "a", 120)
    assert [len(table) for table in long.block_tables] == [30, 5]
    assert kv.pool.num_free == 2 * 19 - 35
    assert kv.max_tokens_alone(1000) == 4 * (2 * 19 - 5)


def test_cached_blocks_count_as_free_once() -> None:
    """4 usable blocks: two of them are the hit itself, so five blocks do not fit and four do."""
    kv = manager(5)
    first = admitted(kv, "a", 8)
    kv.advance(first, 8)
    kv.free(first, in_flight=False)
    assert (kv.pool.num_free, kv.pool.num_free_cached) == (4, 2)
    for length, fits in ((17, False), (16, True)):
        again = make_sequence("again", first.token_ids[:8] + list(range(length - 8)))
        hit = kv.find(again)
        assert hit.num_tokens == 8
        assert kv.allocate(again, hit, None) is fits
        assert kv.pool.num_free == (4 if not fits else 0)


def test_an_allocation_leaves_the_safety_margin_and_headroom_free() -> None:
    kv = manager(11, margin=0.2)
    sequence = make_sequence("a", list(range(33)))
    assert not kv.allocate(sequence, kv.find(sequence), 0), "9 of 10 would leave 1, the margin is 2"
    assert not kv.allocate(make_sequence("b", list(range(29))), kv.find(make_sequence("c", [1])), 3)
    assert kv.allocate(sequence, kv.find(sequence), None)


def test_blocks_behind_a_moving_window_are_freed() -> None:
    kv = manager(windows=(None, 6))
    sequence = admitted(kv, "a", 24)
    full, sliding = sequence.block_tables
    assert (len(full), len(sliding)) == (6, 5)
    kv.advance(sequence, 8)  # the query at 8 sees 3..8
    assert sliding[0] != 0
    kv.advance(sequence, 12)  # 7..12
    assert (sliding[0], sliding[1] != 0) == (0, True)
    assert kv.grow(sequence, 24)
    kv.advance(sequence, 20)  # 15..20
    assert [index for index, block in enumerate(sliding) if block] == [3, 4, 5]
    assert 0 not in full
    assert kv.pool.num_free == 38 - 6 - 3
    assert len(kv.pool.cached) == 12, "freed and still findable"


def test_blocks_of_a_chunk_are_freed_at_the_next_chunk() -> None:
    kv = manager(windows=(None, Window(8, is_chunked=True)))
    sequence = admitted(kv, "a", 25)
    full, chunked = sequence.block_tables
    kv.advance(sequence, 7)  # the query at 7 sees 0..7
    assert all(chunked)
    kv.advance(sequence, 8)  # 8
    assert [index for index, block in enumerate(chunked) if not block] == [0, 1]
    assert kv.grow(sequence, 25)
    kv.advance(sequence, 24)
    assert not any(chunked[:6])
    assert all(full)
    kv.free(sequence, in_flight=False)
    again = make_sequence("again", sequence.token_ids[:21])
    assert kv.find(again).num_tokens == 20
    assert kv.allocate(again, kv.find(again), None)
    assert [bool(block) for block in again.block_tables[1]] == [False] * 4 + [True] * 2


def test_a_sliding_group_allocates_only_blocks_that_a_step_can_reach() -> None:
    kv = manager(40, windows=(6,))
    sequence = admitted(kv, "a", 100)
    assert len(sequence.block_tables[0]) == -(-(6 - 1 + 8) // 4) + 1


def test_a_hit_in_a_sliding_group_needs_only_the_last_blocks() -> None:
    kv = manager(windows=(None, 6))
    first = admitted(kv, "a", 25)
    assert kv.grow(first, 25)
    kv.advance(first, 24)
    kv.free(first, in_flight=False)
    for key in kv.keys(first, 1, 0, 3):
        block = kv.pool.cached[key]
        kv.pool.share(block)
        kv.pool.forget(block)
    again = make_sequence("again", first.token_ids)
    hit = kv.find(again)
    assert hit.num_tokens == 24
    kv.allocate(again, hit, None)
    assert again.block_tables[1][:3] == [0, 0, 0]
    assert all(again.block_tables[1][4:])
    assert again.block_tables[0][:6] == [kv.pool.cached[content] for content in first.block_hashes]


def test_an_identical_prompt_computes_its_last_block() -> None:
    kv = manager()
    first = admitted(kv, "a", 12)
    kv.advance(first, 12)
    again = make_sequence("again", list(first.token_ids))
    hit = kv.find(again)
    assert hit.num_tokens == 8
    assert kv.allocate(again, hit, None)
    assert again.block_tables[0][:2] == first.block_tables[0][:2]
    assert again.block_tables[0][2] != first.block_tables[0][2]


@pytest.mark.parametrize("window", [5, 6, 7, 8, 9])
def test_a_hit_never_contains_a_block_that_is_not_filled(window: int) -> None:
    """The first 8 of 12 cached tokens are a hit once they are filled, for every window size."""
    kv = manager(windows=(window,))
    first = admitted(kv, "a", 12)
    first.last_step = kv.oldest_step  # a step in flight fills its blocks
    for committed in (4, 8, 12):
        hit = kv.find(make_sequence("again", list(first.token_ids)))
        assert (hit.num_tokens, hit.pending is None) == (8, committed > 8)
        kv.advance(first, committed)


def test_a_block_is_pending_until_its_owner_commits_or_skips_a_step() -> None:
    kv = manager()
    first = admitted(kv, "a", 12)
    first.last_step = kv.oldest_step
    awaited = kv.find(make_sequence("again", list(first.token_ids))).pending
    assert awaited is not None
    assert kv.is_pending(awaited)
    kv.oldest_step += 1  # the owner was in no step since
    assert not kv.is_pending(awaited)
    kv.oldest_step -= 1
    kv.advance(first, 8)
    assert not kv.is_pending(awaited), "the block is filled"
    kv.free(first, in_flight=False)
    assert not kv.is_pending(b"unknown"), "no block has this hash"


def test_a_hit_that_the_host_has_lost_is_an_error() -> None:
    kv = manager(host=8)
    sequence = make_sequence("a", list(range(9)))
    kv.hasher.extend(sequence)
    with pytest.raises(RuntimeError, match="lost a cached block"):
        kv.allocate(sequence, CachedPrefix(8), None)


def test_the_last_blocks_of_a_prefix_are_evicted_first() -> None:
    kv = manager(5)
    sequence = admitted(kv, "a", 12)
    kv.advance(sequence, 12)
    kv.free(sequence, in_flight=False)
    assert [kv.pool.allocate() for _ in range(4)] == [4, 3, 2, 1]


def test_blocks_that_a_step_in_flight_may_write_are_freed_after_the_step() -> None:
    kv = manager()
    sequence = admitted(kv, "a", 10)
    kv.advance(sequence, 4)
    sequence.last_step = 7
    kv.free(sequence, in_flight=True)
    assert kv.pool.num_free == 17, "the committed block is free at once"
    kv.release_deferred(7)
    assert kv.pool.num_free == 17
    kv.release_deferred(8)
    assert kv.pool.num_free == 19


def test_offload_and_restore_copy_only_visible_blocks() -> None:
    kv = manager(windows=(None, 6), host=12)
    sequence = admitted(kv, "a", 18)
    kv.advance(sequence, 18)
    assert kv.offload(sequence, in_flight=False)
    out = kv.tier.take_copies().swap_out
    assert len(out) == 5 + 2, "the query at 18 sees 13..18"
    kv.pool.forget_all()
    assert kv.restore(sequence, None)
    copies = kv.tier.take_copies()
    assert {copy.source for copy in copies.swap_in} == {copy.target for copy in out}
    assert sequence.num_committed_tokens == 18
    assert kv.tier.pool.num_free == 17, "its host blocks are read by the step that is planned"
    kv.tier.commit(copies, kv.pool)
    assert kv.tier.pool.num_free == 24
    assert not kv.pool.reserved


def test_a_reset_forgets_the_blocks_of_device_and_host() -> None:
    kv = manager(6, host=12)
    first = admitted(kv, "a", 9)
    kv.advance(first, 9)
    kv.free(first, in_flight=False)
    second = admitted(kv, "b", 18)  # its blocks evict those of the first to the host
    kv.advance(second, 18)
    device, host = kv.pool, kv.tier.pool
    evicted = [content for content in first.block_hashes if content in host]
    assert evicted
    assert device.cached
    kv.reset_prefix_cache()
    assert not device.cached
    assert not any(content in host for content in evicted)


def test_restore_shares_blocks_that_the_device_still_has() -> None:
    kv = manager(host=12)
    sequence = admitted(kv, "a", 18)
    kv.advance(sequence, 18)
    kv.offload(sequence, in_flight=False)
    kv.tier.take_copies()
    assert kv.restore(sequence, None)
    assert len(kv.tier.take_copies().swap_in) == 1, "only the partial block has no hash"


def test_restored_full_blocks_can_be_shared_after_the_step() -> None:
    kv = manager(host=8)
    sequence = admitted(kv, "a", 9)
    kv.advance(sequence, 8)
    assert kv.offload(sequence, in_flight=False)
    kv.pool.forget_all()
    assert kv.restore(sequence, None)
    assert len(kv.pool.reserved) == 2
    kv.tier.commit(kv.tier.take_copies(), kv.pool)
    assert kv.pool.reserved == {}


def test_a_restored_block_evicts_no_cached_block_of_another_group() -> None:
    """The second group's cached block is the next to be evicted."""
    kv = manager(3, windows=(None, None), host=1)
    sequence = make_sequence("a", list(range(8)))
    kv.hasher.extend(sequence)
    kv.tier.pool.keep(kv.keys(sequence, 0, 0, 1)[0])
    blocks = [kv.pool.allocate() for _ in range(4)]
    contents = [kv.keys(sequence, 1, 0, 1)[0], b"x", b"y", b"z"]
    for block, content in zip(blocks, contents, strict=True):
        kv.pool.commit_hash(block, content)
        kv.pool.release(block)
    assert kv.allocate(sequence, kv.find(sequence), None)
    assert sequence.block_tables[1][0] == blocks[0] != sequence.block_tables[0][0]


def test_an_offload_that_does_not_fit_the_host_pool_is_refused() -> None:
    kv = manager(host=2)
    sequence = admitted(kv, "a", 18)
    kv.advance(sequence, 18)
    assert not kv.offload(sequence, in_flight=False)
    assert len(sequence.block_tables[0]) == 5
    assert kv.tier.pool.num_free == 2
