"""Out of blocks: which sequence is preempted, to where, and that each comes back and finishes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.engines.own.scheduler.preemption import PROTECTED_AFTER, victims_first
from tokenmill_worker.engines.own.scheduler.queues import QueueEntry
from tokenmill_worker.engines.own.sequence import Sequence, SequenceStatus


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 13 + position * 5 + seed * position) % 48 + 1 for position in range(length)]


def long_one(name: str, seed: int, length: int, max_tokens: int, **fields: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return make_sequence(name, prompt(seed, length), max_tokens, params=params, **fields)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 20])
@pytest.mark.parametrize("windows", [(None,), (None, 7)])
@pytest.mark.parametrize("preempt", ["least_wasted", "newest", "oldest"])
def test_a_pool_for_one_request_completes_32(
    is_async: bool, num_host_blocks: int, windows: tuple[int | None, ...], preempt: str
) -> None:
    cache = make_cache(9, windows=windows, num_host_blocks=num_host_blocks)
    loop = Loop.build(
        cache, is_async=is_async, preempt=preempt, max_num_batched_tokens=16, max_num_seqs=8
    )
    loop.add(  # twelve of these prompts come twice, so that blocks are shared too
        *[long_one(f"r{index}", index % 20, 9 + index % 5, 18 + index % 3) for index in range(32)]
    )
    loop.run(20_000)
    loop.assert_truth()
    assert len(loop.ends) == 32
    assert loop.scheduler.snapshot().preemptions > 0


@pytest.mark.parametrize("preempt", ["least_wasted", "newest"])
def test_a_newcomer_does_not_start_if_running_sequences_may_need_its_blocks(preempt: str) -> None:
    """An admission leaves free a block for each running sequence. If the newcomer took it all the
    same, it would be preempted by the next step, for ever.
    """
    loop = Loop.build(
        make_cache(10, block_size=2, windows=(5,)),
        is_async=True,
        ageing_s=5.0,
        policy="priority",
        preempt=preempt,
        max_num_batched_tokens=64,
        max_num_seqs=16,
    )
    arrivals = {0: [(22, 4, 2)], 2: [(25, 8, 2), (44, 5, 0)], 5: [(17, 5, 2)]}
    for step in range(400):
        for seed, (length, max_tokens, priority) in enumerate(arrivals.get(step, ()), step):
            loop.add(long_one(f"r{seed}", seed, length, max_tokens, priority=priority))
        loop.clock.now += 0.5
        loop.step()
    assert len(loop.ends) == 4
    loop.assert_truth()


def test_a_preempted_sequence_is_recomputed_without_repeating_an_event() -> None:
    loop = Loop.build(make_cache(9), max_num_seqs=2)
    sequences = [long_one("a", 1, 8, 20), long_one("b", 2, 8, 20)]
    loop.add(*sequences)
    while not loop.scheduler.snapshot().preemptions:
        loop.step()
    (victim,) = [s for s in sequences if s.status is SequenceStatus.WAITING]
    assert victim.num_computed_tokens == 0
    assert victim.num_output_tokens > 0
    assert victim in loop.runner.take_released()
    loop.run()
    loop.assert_truth()
    stats = loop.scheduler.snapshot()
    assert stats.blocks_swapped_out == 0
    assert stats.recomputed_tokens > 0


def test_a_preempted_sequence_is_offloaded_to_the_host_pool_without_recomputation() -> None:
    loop = Loop.build(make_cache(9, num_host_blocks=16), max_num_seqs=2)
    loop.add(long_one("a", 1, 8, 20), long_one("b", 2, 8, 20))
    states = set()
    while loop.scheduler.has_work:
        loop.step()
        states |= {s.status for name in "ab" for s in loop.scheduler.sequences(name)}
    loop.assert_truth()
    stats = loop.scheduler.snapshot()
    assert SequenceStatus.OFFLOADED in states
    assert stats.preemptions > 0
    assert stats.recomputed_tokens == 0
    assert stats.blocks_swapped_out > 0
    assert stats.blocks_swapped_in > 0
    assert loop.device.computed == 2 * (8 + 19)


def test_a_restored_partial_block_is_shared_only_after_it_is_full() -> None:
    """The sequence is preempted in its prompt and returns for a step that does not fill the block.

    Then it is cancelled.
    """
    loop = Loop.build(make_cache(8, num_host_blocks=12), max_num_batched_tokens=3, max_num_seqs=4)
    loop.add(
        *[long_one(name, seed, 1, length) for name, seed, length in (("a", 30, 6), ("b", 31, 9))]
    )
    for _ in range(3):
        loop.step()
    half = long_one("half", 1, 16, 4)
    loop.add(half)
    while not (half.preemptions and half.status is SequenceStatus.PREFILLING):
        loop.step()
    assert loop.plans[-1].swap_in
    assert half.num_committed_tokens == 3, "of a block's 4"
    loop.cancel("half")
    loop.add(long_one("same", 1, 16, 4))
    loop.run()
    loop.assert_truth()


def test_with_a_full_host_pool_a_preempted_sequence_is_recomputed() -> None:
    loop = Loop.build(make_cache(9, num_host_blocks=1), max_num_seqs=2)
    loop.add(long_one("a", 1, 8, 20), long_one("b", 2, 8, 20))
    loop.run()
    loop.assert_truth()
    assert loop.scheduler.snapshot().recomputed_tokens > 0


def test_an_evicted_prefix_is_restored_from_the_host() -> None:
    loop = Loop.build(make_cache(9, num_host_blocks=16))
    loop.add(make_sequence("a", prompt(1, 17), 1))
    loop.run()
    loop.add(make_sequence("b", prompt(2, 30), 1))  # needs every block: what "a" left is evicted
    loop.run()
    loop.add(make_sequence("a again", [*prompt(1, 16), 7], 1))
    loop.run()
    loop.assert_truth()
    assert loop.events[-1].num_cached_tokens == 16
    stats = loop.scheduler.snapshot()
    assert (stats.evicted_blocks, stats.blocks_swapped_in) == (len(loop.plans[1].swap_out) + 4, 4)
    assert loop.device.computed == 17 + 30 + 1


def test_without_a_host_pool_an_evicted_prefix_is_computed_again() -> None:
    loop = Loop.build(make_cache(9))
    for name, seed, length in (("a", 1, 17), ("b", 2, 30), ("a again", 1, 17)):
        loop.add(make_sequence(name, prompt(seed, length), 1))
        loop.run()
    assert loop.events[-1].num_cached_tokens == 0


def places(
    *, committed: list[int], ranks: list[int], preemptions: list[int]
) -> dict[Sequence, QueueEntry]:
    found = {}
    for ticket, (tokens, rank, times) in enumerate(zip(committed, ranks, preemptions, strict=True)):
        sequence = make_sequence(str(ticket), [1])
        sequence.num_committed_tokens, sequence.preemptions = tokens, times
        found[sequence] = QueueEntry(sequence, ticket, 0.0, rank, 0.0)
    return found


@pytest.mark.parametrize(
    ("rule", "order"), [("newest", "3210"), ("oldest", "0123"), ("least_wasted", "2310")]
)  # fmt: skip
def test_the_preempt_rule_orders_victims_within_a_class(rule: str, order: str) -> None:
    found = places(committed=[50, 9, 4, 4 + 1], ranks=[1] * 4, preemptions=[0] * 4)
    assert "".join(s.request_id for s in victims_first(found, found, rule)) == order  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["newest", "oldest", "least_wasted"])
def test_the_lowest_class_is_preempted_first_under_every_rule(rule: str) -> None:
    found = places(committed=[5, 5, 5], ranks=[0, 2, 1], preemptions=[0, PROTECTED_AFTER, 0])
    assert [s.request_id for s in victims_first(found, found, rule)] == ["1", "2", "0"]  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["newest", "oldest", "least_wasted"])
def test_a_sequence_preempted_often_is_the_last_victim(rule: str) -> None:
    found = places(
        committed=[1, 2, 3], ranks=[1] * 3, preemptions=[PROTECTED_AFTER, 0, PROTECTED_AFTER]
    )
    assert [s.request_id for s in victims_first(found, found, rule)] == ["1", "2", "0"]  # type: ignore[arg-type]


def test_bulk_is_preempted_before_interactive() -> None:
    loop = Loop.build(make_cache(9), max_num_seqs=3, preempt="newest")
    loop.add(long_one("bulk", 1, 4, 24, priority=2))
    loop.step()
    loop.add(long_one("interactive", 2, 4, 24, priority=0))
    loop.run()
    loop.assert_truth()
    preempted = {event.request_id: event.preemptions for event in loop.events}
    assert preempted["interactive"] == 0
    assert preempted["bulk"] > 0


def test_a_preempted_sequence_keeps_its_place_before_later_arrivals() -> None:
    loop = Loop.build(make_cache(9), max_num_seqs=2, preempt="newest")
    loop.add(long_one("a", 1, 8, 20), long_one("b", 2, 8, 20))
    loop.step()
    loop.add(*[long_one(f"later {index}", 3 + index, 8, 20) for index in range(3)])
    loop.run()
    finished = [event.request_id for event in loop.events if event.finish_reason]
    assert finished[:2] == ["a", "b"]


def test_decodes_use_the_safety_margin_but_new_requests_do_not() -> None:
    loop = Loop.build(make_cache(21), safety_margin=0.5)
    loop.add(long_one("a", 1, 28, 20))  # 7 of 20 blocks
    loop.step()
    loop.add(long_one("b", 2, 16, 4))  # would leave 8 of 12 free
    loop.step()
    assert loop.scheduler.capacity().running == 1
    loop.add(long_one("c", 3, 5, 4))  # leaves 10
    loop.step()
    assert [item.sequence.request_id for item in loop.plans[-1].scheduled] == ["a", "c"]
    loop.run()
    loop.assert_truth()


def test_host_blocks_of_a_failed_step_s_copies_are_not_hit() -> None:
    """The step that needs the blocks of "a" evicts them to the host, and fails before the copies.
    Run once more, it has nothing to copy."""
    loop = Loop.build(make_cache(9, num_host_blocks=16))
    loop.add(make_sequence("a", prompt(1, 17), 1))
    loop.run()
    loop.device.fails = lambda plan: bool(plan.swap_out)
    loop.add(make_sequence("breaks", prompt(2, 30), 1))
    loop.run()
    assert loop.ends["breaks", 0] is FinishReason.LENGTH
    loop.add(make_sequence("a again", [*prompt(1, 16), 7], 1))
    loop.run()
    loop.assert_truth()
    assert loop.events[-1].num_cached_tokens == 0


def test_a_sequence_whose_offload_failed_is_computed_again() -> None:
    loop = Loop.build(make_cache(9, num_host_blocks=16), max_num_seqs=2)
    loop.add(long_one("a", 1, 8, 20), long_one("b", 2, 8, 20))
    failures = [True]
    loop.device.fails = lambda plan: bool(plan.swap_out and failures and failures.pop())
    while failures:
        loop.step()
    loop.run()
    loop.assert_truth()
    assert loop.scheduler.snapshot().recomputed_tokens > 0


def test_blocks_of_a_failed_restore_are_computed_again() -> None:
    loop = Loop.build(make_cache(9, num_host_blocks=16), max_num_seqs=2)
    loop.add(long_one("a", 1, 8, 20), long_one("b", 2, 8, 20))
    failures = [True]
    loop.device.fails = lambda plan: bool(plan.swap_in and failures and failures.pop())
    while failures:
        loop.step()
    loop.run()
    loop.assert_truth()


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 8), (8,)])
@pytest.mark.parametrize("num_host_blocks", [0, 12])
def test_shared_prompts_choices_and_preemption_together_give_the_true_tokens(
    policy: str, is_async: bool, windows: tuple[int | None, ...], num_host_blocks: int
) -> None:
    """Shared prompts, several choices, preemption and offload."""
    rng = random.Random(1)
    cache = make_cache(12, windows=windows, num_host_blocks=num_host_blocks)
    loop = Loop.build(
        cache, is_async=is_async, policy=policy, max_num_batched_tokens=16, max_num_seqs=6
    )
    shared = [rng.randrange(1, 50) for _ in range(13)]
    for index in range(30):
        own = [rng.randrange(1, 50) for _ in range(rng.randrange(1, 14))]
        ids = (shared if index % 2 else []) + own
        lengths = [rng.randrange(1, 12) for _ in range(3 if index % 5 == 0 else 1)]
        loop.add(
            *[
                make_sequence(
                    f"r{index}", ids, length, choice=choice, seed=choice, priority=index % 3
                )
                for choice, length in enumerate(lengths)
            ]
        )
        if index % 3 == 0:
            loop.step()
    loop.run()
    loop.assert_truth()


def test_after_a_reset_of_the_prefix_cache_an_offloaded_sequence_is_recomputed() -> None:
    loop = Loop.build(make_cache(9, num_host_blocks=16), max_num_seqs=2)
    loop.add(long_one("a", 1, 8, 20), long_one("b", 2, 8, 20))
    while not loop.scheduler.snapshot().num_offloaded:
        loop.step()
    loop.scheduler.reset_prefix_cache()
    assert loop.scheduler.snapshot().num_offloaded == 0
    loop.run()
    loop.assert_truth()


@pytest.mark.parametrize("windows", [(None,), (None, None)])
def test_a_preempted_sequence_is_readmitted_only_with_room_to_grow(
    windows: tuple[None, ...],
) -> None:
    """A sequence without it would be the next victim: these six would be preempted ten times."""
    loop = Loop.build(make_cache(20, windows=windows), max_num_seqs=6)
    loop.add(*[long_one(f"r{index}", index, 4 + index % 3, 30) for index in range(6)])
    loop.run()
    loop.assert_truth()
    assert loop.scheduler.snapshot().preemptions <= 6


def test_a_failed_step_leaves_no_hash_registered() -> None:
    loop = Loop.build()
    loop.scheduler.add([long_one("a", 1, 20, 4)])
    plan = loop.scheduler.plan()
    pool = loop.scheduler.kv.pool
    assert len(pool.cached) == len(pool.reserved) == 5
    loop.scheduler.abandon(plan)
    assert (pool.cached, pool.reserved) == ({}, {})
    check_integrity(loop.scheduler)
