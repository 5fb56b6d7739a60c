"""The priority policy over time: ageing, tenants, preemption; no policy starves a sequence."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own.requests import CHOICES_OF_CLASS, RequestValidator
from tokenmill_worker.engines.own.scheduler.preemption import PROTECTED_AFTER
from tokenmill_worker.engines.own.scheduler.queues import (
    FifoQueue,
    PriorityQueue,
    QueueEntry,
    WaitingQueue,
)
from tokenmill_worker.engines.own.sequence import Sequence


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 19 + position * 11 + seed * position) % 48 + 1 for position in range(length)]


def endless(name: str, seed: int, length: int, max_tokens: int, **fields: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return make_sequence(name, prompt(seed, length), max_tokens, params=params, **fields)


def place(
    ticket: int, rank: int = 1, tenant: str = "", deadline: float | None = None, at: float = 0.0
) -> QueueEntry:
    sequence = make_sequence(str(ticket), [1], tenant=tenant, deadline=deadline)
    return QueueEntry(sequence, ticket, at, rank, since=at)


def drain(queue: WaitingQueue) -> str:
    found = []
    while (one := queue.pop()) is not None:
        found.append(one.sequence.request_id)
    return "".join(found)


@pytest.mark.parametrize("queue", [FifoQueue(), PriorityQueue(30.0)])
def test_a_queue_drops_discarded_entries_and_takes_back_popped_ones(queue: WaitingQueue) -> None:
    every = [place(ticket) for ticket in range(300)]
    for one in every:
        queue.push(one)
    for one in every[3:]:
        queue.discard(one)
    assert len(queue) == 3
    first = queue.pop()
    assert first is every[0]
    queue.put_back(first)
    assert every[0].queued
    queue.discard(every[1])
    queue.push(every[1])  # left, and came again, while its old entry is still there
    assert len(queue) == 3
    assert drain(queue) == "012"
    assert len(queue) == 0


def test_ageing_moves_up_one_class_at_a_time() -> None:
    queue = PriorityQueue(30.0)
    old = place(0, rank=2, at=0.0)
    queue.push(old)
    for now, rank in ((29.0, 2), (30.0, 1), (59.0, 1), (60.0, 0), (600.0, 0)):
        queue.refresh(now)
        assert old.rank == rank
    queue.push(place(1, rank=0, at=590.0))
    assert drain(queue) == "01"


def test_bulk_that_has_waited_goes_before_fresh_interactive_work() -> None:
    loop = Loop.build(policy="priority", max_num_seqs=1, ageing_s=10.0)
    loop.add(endless("bulk", 1, 4, 2, priority=2))
    for index in range(30):
        loop.add(endless(f"interactive {index}", 2 + index, 4, 2, priority=0))
        loop.clock.now += 2.0
        loop.step()
        if ("bulk", 0) in loop.ends:
            break
    assert ("bulk", 0) in loop.ends


def test_requests_with_deadlines_do_not_pass_an_aged_request_for_ever() -> None:
    queue = PriorityQueue(10.0)
    queue.push(place(0, rank=0, at=0.0))
    for ticket in range(1, 9):
        now = ticket * 10.0
        queue.push(place(ticket, rank=0, at=now, deadline=now + 5.0))
        popped = queue.pop()
        assert popped is not None
        if popped.ticket == 0:
            break
    assert now <= 50.0


def test_tenants_share_by_served_tokens() -> None:
    """One tenant floods, another asks now and then: each gets half of what both want."""
    loop = Loop.build(policy="priority", max_num_seqs=1)
    loop.add(*[endless(f"flood {index}", index, 4, 4, tenant="flood") for index in range(20)])
    loop.add(*[endless(f"small {index}", 50 + index, 4, 4, tenant="small") for index in range(5)])
    loop.run()
    finished = [event.request_id.split()[0] for event in loop.events if event.finish_reason]
    assert finished[:10].count("small") in (4, 5)
    assert finished[:4].count("small") == 2


def test_a_tenant_with_twice_the_cost_per_request_gets_half_as_many() -> None:
    loop = Loop.build(policy="priority", max_num_seqs=1)
    for index in range(12):
        loop.add(endless(f"heavy {index}", index, 8, 8, tenant="heavy"))
        loop.add(endless(f"light {index}", 50 + index, 4, 4, tenant="light"))
    while len(loop.ends) < 9:
        loop.step()
    finished = [name.split()[0] for name, _ in loop.ends]
    assert (finished.count("light"), finished.count("heavy")) == (6, 3)


def test_a_tenant_earns_no_credit_while_it_has_no_requests() -> None:
    queue = PriorityQueue(30.0)
    queue.push(place(0, tenant="busy"))
    for _ in range(3):
        queue.pop()
        queue.charge("busy", 1000)
        queue.push(place(1, tenant="busy"))
    queue.pop()
    for ticket in (2, 3, 4, 5):
        queue.push(place(ticket, tenant="back" if ticket % 2 else "busy"))
    taken = []
    while (one := queue.pop()) is not None:
        taken.append(one.sequence.tenant)
        queue.charge(one.sequence.tenant, 100)
    assert taken.count("back") == 2
    assert taken[:2] != ["back", "back"], "it does not catch up on 3000 tokens"


def test_a_newcomer_gets_no_credit_from_a_less_served_class() -> None:
    queue = PriorityQueue(30.0)
    queue.push(place(0, rank=2, tenant="low"))
    queue.charge("much", 1000)
    for ticket in (1, 2):
        queue.push(place(ticket, rank=0, tenant="much"))
    popped = [one.sequence.tenant for _ in range(3) if (one := queue.pop()) is not None]
    assert popped == ["much", "much", "low"]
    queue.push(place(3, rank=0, tenant="much"))
    queue.push(place(4, rank=0, tenant="new"))
    assert drain(queue) == "34"


@pytest.mark.parametrize("max_bypass", [0, 4])
def test_an_interactive_request_preempts_bulk_but_not_standard(max_bypass: int) -> None:
    for priority, preempts in ((2, True), (1, False)):
        loop = Loop.build(policy="priority", max_num_seqs=2, max_bypass=max_bypass)
        loop.add(
            endless("a", 1, 4, 30, priority=priority), endless("b", 2, 4, 30, priority=priority)
        )
        loop.step()
        loop.add(endless("now", 3, 4, 4, priority=0))
        loop.step()
        running = {item.sequence.request_id for item in loop.plans[-1].scheduled}
        assert running == ({"a", "now"} if preempts else {"a", "b"})
        loop.run()
        loop.assert_truth()


@pytest.mark.parametrize("priority", [0, 1])
def test_an_interactive_request_starts_beside_another_s_many_choices(priority: int) -> None:
    loop = Loop.build(policy="priority", max_num_seqs=8)
    params = SamplingParams(n=16, max_tokens=30, ignore_eos=True)
    loop.add(*_validated("many", params, priority))
    loop.step()
    assert loop.scheduler.capacity().free_sequences == 0
    assert loop.scheduler.capacity().free_urgent == 8 - CHOICES_OF_CLASS  # so it is claimed
    loop.add(*_validated("now", SamplingParams(max_tokens=4), 0))
    loop.step()
    running = [item.sequence.request_id for item in loop.plans[-1].scheduled]
    assert running.count("now") == 1
    loop.run()
    loop.assert_truth()


def _validated(name: str, params: SamplingParams, priority: int) -> list[Sequence]:
    request = GenerationRequest(
        request_id=name, prompt=Prompt((1, 2, 3)), params=params, priority=priority
    )
    return RequestValidator(vocab_size=100, max_model_len=200).validate(request)


def test_bulk_that_was_preempted_often_is_not_preempted() -> None:
    loop = Loop.build(policy="priority", max_num_seqs=1)
    loop.add(endless("bulk", 1, 4, 30, priority=2, preemptions=PROTECTED_AFTER))
    loop.step()
    loop.add(endless("now", 2, 4, 4, priority=0))
    loop.step()
    assert loop.scheduler.snapshot().preemptions == 0


def test_bulk_aged_to_the_most_urgent_class_is_not_preempted() -> None:
    loop = Loop.build(policy="priority", max_num_seqs=1, ageing_s=30.0)
    loop.add(endless("first", 1, 4, 90, priority=0), endless("bulk", 2, 4, 30, priority=2))
    for _ in range(2):
        loop.clock.now += 31.0
        loop.step()
    loop.cancel("first")
    loop.step()
    loop.add(endless("now", 3, 4, 4, priority=0))
    loop.step()
    assert loop.scheduler.snapshot().preemptions == 0
    assert [item.sequence.request_id for item in loop.plans[-1].scheduled] == ["bulk"]


def test_an_interactive_request_preempts_bulk_only_if_it_can_start_then() -> None:
    loop = Loop.build(make_cache(9), policy="priority")
    loop.add(endless("standard", 1, 12, 5, priority=1), endless("bulk", 2, 8, 5, priority=2))
    loop.step()
    loop.add(endless("too big", 3, 25, 2, priority=0))
    loop.step()
    assert loop.scheduler.snapshot().preemptions == 0
    loop.cancel("too big")
    loop.add(endless("fits", 4, 11, 2, priority=0))
    loop.step()
    assert {item.sequence.request_id for item in loop.plans[-1].scheduled} == {"standard", "fits"}
    loop.run()
    loop.assert_truth()


@pytest.mark.parametrize(("length", "preempts"), [(80, True), (84, False)])
def test_an_interactive_request_preempts_no_bulk_if_the_safety_margin_would_still_refuse(
    length: int, preempts: bool
) -> None:
    """The standard sequence needs 16 of the 40 blocks, and the safety margin is 4."""
    loop = Loop.build(make_cache(41, prefix_cache=False), policy="priority", safety_margin=0.1)
    loop.add(endless("standard", 1, 60, 60, priority=1))
    loop.add(*[endless(f"bulk {number}", 2 + number, 15, 40, priority=2) for number in range(2)])
    for _ in range(3):
        loop.step()
    loop.add(endless("urgent", 4, length, 4, priority=0))
    loop.step()
    assert (loop.scheduler.snapshot().preemptions > 0) is preempts
    assert ("urgent" in {item.sequence.request_id for item in loop.plans[-1].scheduled}) is preempts
    loop.run()
    loop.assert_truth()


def test_fifo_does_not_preempt_to_admit() -> None:
    loop = Loop.build(max_num_seqs=1)
    loop.add(endless("bulk", 1, 4, 9, priority=2))
    loop.step()
    loop.add(endless("now", 2, 4, 4, priority=0))
    loop.run()
    assert loop.scheduler.snapshot().preemptions == 0


@pytest.mark.parametrize("preempt", ["least_wasted", "newest", "oldest"])
@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
def test_every_request_finishes_under_endless_load(policy: str, preempt: str) -> None:
    """More requests of all classes and sizes arrive than a tight pool can serve.

    The first hundred must all end.
    """
    rng = random.Random(3)
    loop = Loop.build(
        make_cache(17),
        policy=policy,
        preempt=preempt,
        max_num_batched_tokens=12,
        max_num_seqs=5,
        ageing_s=20.0,
        max_bypass=4,
    )
    loop.checks = False
    count = 0

    def arrive() -> None:
        nonlocal count
        length, answer = rng.choice([(3, 4), (9, 12), (30, 20)])
        loop.add(
            endless(f"r{count}", count, length, answer, priority=count % 3, tenant=f"t{count % 4}")
        )
        count += 1

    for _ in range(100):
        arrive()
    for _ in range(6000):
        loop.clock.now += 0.5
        if rng.random() < 0.25:
            arrive()
        loop.step()
        if all((f"r{index}", 0) in loop.ends for index in range(100)):
            break
    missing = [index for index in range(100) if (f"r{index}", 0) not in loop.ends]
    assert not missing
    assert set(loop.ends.values()) == {FinishReason.LENGTH}
    check_integrity(loop.scheduler)
    loop.assert_truth()
