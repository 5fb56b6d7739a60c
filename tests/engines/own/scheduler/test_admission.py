"""An urgent request preempts bulk work if it can start then, and otherwise preempts nothing."""

from __future__ import annotations

from typing import Any

from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tests.engines.own.scheduler.test_fairness import endless
from tokenmill_worker.engines.own.kv.manager import KVManager
from tokenmill_worker.engines.own.scheduler.missing_blocks import MissingBlocks
from tokenmill_worker.engines.own.sequence import Sequence

URGENT, STANDARD, BULK = 0, 1, 2


def full(num_blocks: int, *running: Sequence, **settings: Any) -> Loop:
    """Return a loop with one row for each running sequence."""
    loop = Loop.build(
        make_cache(num_blocks + 1), policy="priority", max_num_seqs=len(running), **settings
    )
    for sequence in running:
        loop.add(sequence)
        loop.step()
    return loop


def starts(loop: Loop, urgent: Sequence) -> int:
    """Return how many sequences were preempted so that `urgent` starts in the next step.

    If it does not start then, no sequence may be preempted for it. Later steps preempt none either.
    """
    loop.add(urgent)
    loop.step()
    names = {item.sequence.request_id for item in loop.plans[-1].scheduled}
    num_gone = loop.scheduler.snapshot().preemptions
    assert (urgent.request_id in names) is (num_gone > 0)
    for _ in range(2):
        loop.step()
    assert loop.scheduler.snapshot().preemptions == num_gone
    loop.run()
    assert (urgent.request_id, 0) in loop.ends
    loop.assert_truth()
    return num_gone


def test_bulk_is_not_preempted_if_blocks_would_still_be_missing() -> None:
    loop = full(
        10,
        endless("standard", 1, 23, 9, priority=STANDARD),
        endless("bulk", 2, 4, 12, priority=BULK),
    )
    assert not starts(loop, endless("urgent", 3, 21, 3, priority=URGENT))


def test_an_urgent_request_preempts_several_bulk_sequences_in_one_step() -> None:
    loop = full(
        9, *(endless(f"bulk {number}", number, 9, 12, priority=BULK) for number in range(3))
    )
    assert starts(loop, endless("urgent", 5, 15, 1, priority=URGENT)) == 2


def test_bulk_is_not_preempted_if_an_adapter_slot_would_still_be_missing() -> None:
    standard, bulk = (
        endless("s", 1, 4, 9, priority=STANDARD, adapter="a"),
        endless("b", 2, 4, 12, priority=BULK),
    )
    assert not starts(
        full(60, standard, bulk, max_loras=1), endless("u", 3, 4, 3, priority=URGENT, adapter="b")
    )


def test_bulk_is_preempted_for_its_adapter_slot() -> None:
    """The sequence that would be preempted first has no adapter."""
    bulk = [
        endless("without", 1, 4, 12, priority=BULK),
        endless("with one", 2, 9, 12, priority=BULK, adapter="a"),
        endless("as well", 3, 8, 12, priority=BULK, adapter="a"),
    ]
    assert starts(full(60, *bulk, max_loras=1), endless("u", 4, 4, 3, priority=URGENT, adapter="b"))


def test_bulk_is_not_preempted_if_the_prefill_limit_would_still_hold() -> None:
    settings = {
        "max_num_batched_tokens": 8,
        "max_num_partial_prefills": 1,
        "long_prefill_token_threshold": 4,
    }
    running = endless("b", 2, 3, 40, priority=BULK), endless("s", 1, 60, 3, priority=STANDARD)
    assert not starts(full(60, *running, **settings), endless("u", 3, 30, 3, priority=URGENT))


def test_a_bulk_prefill_is_preempted_for_its_place_in_the_prefill_limit() -> None:
    settings = {
        "max_num_batched_tokens": 8,
        "max_num_partial_prefills": 1,
        "long_prefill_token_threshold": 4,
    }
    running = endless("s", 1, 3, 40, priority=STANDARD), endless("b", 2, 60, 3, priority=BULK)
    assert starts(full(60, *running, **settings), endless("u", 3, 30, 3, priority=URGENT))


def test_cached_blocks_of_an_urgent_request_do_not_count_as_missing() -> None:
    standard, bulk = (
        endless("standard", 1, 20, 9, priority=STANDARD),
        endless("bulk", 2, 4, 12, priority=BULK),
    )
    assert starts(full(8, standard, bulk), endless("urgent", 1, 22, 3, priority=URGENT))


def test_blocks_shared_with_bulk_work_do_not_count_as_freed() -> None:
    standard, bulk = (
        endless("standard", 1, 17, 9, priority=STANDARD),
        endless("bulk", 2, 8, 12, priority=BULK),
    )
    assert not starts(full(9, standard, bulk), endless("urgent", 2, 18, 3, priority=URGENT))


def test_blocks_shared_among_bulk_sequences_are_freed_with_the_last_of_them() -> None:
    bulk = [endless("bulk", 1, 15, 9, priority=BULK, choice=choice) for choice in range(2)]
    loop = Loop.build(make_cache(10), policy="priority", max_num_seqs=2)
    loop.add(*bulk)
    for _ in range(3):
        loop.step()
    loop.add(endless("urgent", 2, 30, 3, priority=URGENT))
    loop.step()
    assert {item.sequence.request_id for item in loop.plans[-1].scheduled} == {"urgent"}
    loop.run()
    loop.assert_truth()


def test_cached_blocks_before_a_window_do_not_count_as_missing() -> None:
    """The last two of six cached blocks are visible; from 19 blocks more and more are taken."""
    fits = []
    for num_taken in range(18):
        kv = KVManager(make_cache(20, windows=(6,)), model_key="m", max_chunk=8, safety_margin=0.0)
        sequence = make_sequence("a", list(range(25)))
        kv.hasher.extend(sequence)
        for key in kv.keys(sequence, 0, 0, 6):
            block = kv.pool.allocate()
            kv.pool.commit_hash(block, key)
            kv.pool.release(block)
        for _ in range(num_taken):
            kv.pool.allocate()
        hit = kv.find(sequence)
        fits.append(MissingBlocks(kv, sequence, hit.num_tokens).are_none(None))
        assert kv.allocate(sequence, hit, None) is fits[-1]
    assert set(fits) == {True, False}


def test_an_offloaded_sequence_does_not_count_blocks_that_another_is_filling() -> None:
    """It needs three blocks for itself, and two of four are free."""
    cache = make_cache(5, num_host_blocks=4)
    kv = KVManager(cache, model_key="m", max_chunk=8, safety_margin=0.0)
    sequence, other = make_sequence("a", list(range(9))), make_sequence("b", list(range(9)))
    assert kv.allocate(sequence, kv.find(sequence), None)
    kv.advance(sequence, 8)
    assert kv.offload(sequence, in_flight=False)
    kv.pool.forget_all()
    kv.pool.reserve_hash(kv.pool.allocate(), kv.keys(sequence, 0, 0, 1)[0], other)
    kv.pool.allocate()
    assert not MissingBlocks(kv, sequence, 8).are_none(None)
    assert not kv.restore(sequence, None)
