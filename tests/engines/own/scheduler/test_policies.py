"""Each policy's schedule, step by step: which sequences, from which position, how many tokens."""

from __future__ import annotations

import pytest

from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.plan import StepPlan
from tokenmill_worker.engines.own.sequence import SequenceStatus


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7 + position * 3) % 48 + 1 for position in range(length)]


def shape(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(item.sequence.request_id, item.start, item.num_tokens) for item in plan.scheduled]


def shapes(loop: Loop, steps: int) -> list[list[tuple[str, int, int]]]:
    for _ in range(steps):
        loop.step()
    return [shape(plan) for plan in loop.plans[-steps:]]


def test_fifo_plans_decodes_then_prefills_then_arrivals() -> None:
    loop = Loop.build(max_num_batched_tokens=10)
    loop.add(make_sequence("a", prompt(1, 4), 9))
    loop.step()
    loop.add(make_sequence("b", prompt(2, 14), 9), make_sequence("c", prompt(3, 5), 9))
    assert shapes(loop, 3) == [
        [("a", 4, 1), ("b", 0, 9)],
        [("a", 5, 1), ("b", 9, 5), ("c", 0, 4)],
        [("a", 6, 1), ("b", 14, 1), ("c", 4, 1)],
    ]


def test_prefill_first_plans_a_running_prefill_before_decodes() -> None:
    loop = Loop.build(max_num_batched_tokens=6, policy="prefill_first")
    loop.add(make_sequence("a", prompt(1, 4), 9))
    loop.step()
    loop.add(make_sequence("b", prompt(2, 14), 9))
    assert shapes(loop, 3) == [
        [("a", 4, 1), ("b", 0, 5)],
        [("b", 5, 6)],
        [("b", 11, 3), ("a", 5, 1)],
    ]


def test_priority_starts_the_urgent_before_a_running_bulk_prefill() -> None:
    loop = Loop.build(max_num_batched_tokens=8, policy="priority")
    loop.add(make_sequence("bulk", prompt(1, 30), 4, priority=2))
    loop.step()
    loop.add(make_sequence("urgent", prompt(2, 6), 4, priority=0))
    assert shapes(loop, 2) == [
        [("urgent", 0, 6), ("bulk", 8, 2)],
        [("urgent", 6, 1), ("bulk", 10, 7)],
    ]


@pytest.mark.parametrize(("policy", "places"), [("priority", 2), ("fifo", 0)])
def test_places_held_by_bulk_count_as_free_for_urgent_jobs(policy: str, places: int) -> None:
    loop = Loop.build(max_num_seqs=3, policy=policy)
    running = [make_sequence(f"bulk {n}", prompt(n, 3), 40, priority=2) for n in range(2)]
    loop.add(*running, make_sequence("standard", prompt(5, 3), 40, priority=1))
    loop.step()
    assert loop.scheduler.capacity().free_urgent == places
    loop.add(make_sequence("urgent", prompt(6, 3), 40, priority=0))
    # it waits, and will take one
    assert loop.scheduler.capacity().free_urgent == max(0, places - 1)
    loop.step()
    assert loop.scheduler.capacity().free_urgent == max(0, places - 1)
    assert (loop.scheduler.stats.preemptions == 1) is (places > 0)


def test_places_that_waiting_bulk_would_take_count_as_free_for_urgent_jobs() -> None:
    loop = Loop.build(max_num_seqs=8, max_num_batched_tokens=4, policy="priority")
    loop.add(*(make_sequence(f"bulk {n}", prompt(n, 6), 40, priority=2) for n in range(8)))
    assert (loop.scheduler.capacity().running, loop.scheduler.capacity().waiting) == (0, 8)
    assert loop.scheduler.capacity().free_urgent == 8
    loop.step()
    assert loop.scheduler.capacity().free_urgent == 8


def test_priority_orders_by_class_then_deadline_then_arrival() -> None:
    loop = Loop.build(max_num_seqs=1, policy="priority")
    now = loop.clock.now
    loop.add(
        make_sequence("late", prompt(1, 3), 1, priority=1),
        make_sequence("bulk", prompt(2, 3), 1, priority=2, deadline=now + 1),
        make_sequence("due later", prompt(3, 3), 1, priority=1, deadline=now + 60),
        make_sequence("due soon", prompt(4, 3), 1, priority=1, deadline=now + 50),
        make_sequence("urgent", prompt(5, 3), 1, priority=0),
        make_sequence("later", prompt(6, 3), 1, priority=1),
    )
    order = [step[0][0] for step in shapes(loop, 6)]
    assert order == ["urgent", "due soon", "due later", "late", "later", "bulk"]


def test_more_decodes_than_budget_take_turns() -> None:
    """A running prefill leaves room for two of three decodes in each step."""
    loop = Loop.build(
        max_num_batched_tokens=4, long_prefill_token_threshold=2, policy="prefill_first"
    )
    for name in "abc":
        loop.add(make_sequence(name, prompt(ord(name), 1), 20))
    loop.step()
    loop.add(make_sequence("long", prompt(9, 20), 1))
    loop.step()
    plans = shapes(loop, 6)
    assert [plan[0] for plan in plans] == [("long", start, 2) for start in range(1, 13, 2)]
    served = [name for plan in plans for name, _, _ in plan[1:]]
    assert {name: served.count(name) for name in "abc"} == {"a": 4, "b": 4, "c": 4}


def test_the_read_budget_is_kept_and_every_sequence_gets_a_turn() -> None:
    loop = Loop.build(max_read_tokens=20, max_num_seqs=4)
    for index in range(4):
        loop.add(make_sequence(f"r{index}", prompt(index, 8), 9))
    loop.run()
    for plan in loop.plans:
        reads = sum(item.start + item.num_tokens for item in plan.scheduled)
        assert reads <= 20 or len(plan.scheduled) == 1
    loop.assert_truth()
    assert max(len(plan.scheduled) for plan in loop.plans) == 2


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
@pytest.mark.parametrize(("priority", "is_cached"), [(1, False), (2, False), (1, True)])
def test_endless_short_requests_leave_a_long_request_its_reads(
    policy: str, priority: int, is_cached: bool
) -> None:
    """The long request is in mid-prompt, or its prompt is mostly cached.

    A cached prompt makes its first chunk read all of it.
    """
    loop = Loop.build(
        make_cache(400),
        policy=policy,
        max_num_batched_tokens=16,
        max_num_seqs=8,
        max_read_tokens=100,
        max_bypass=4,
    )
    if is_cached:
        loop.add(make_sequence("first", prompt(50, 150), 1))
        loop.run()
    for number in range(260):
        loop.add(make_sequence(f"short {number}", prompt(number % 40, 10), 12, priority=1))
        if number == 4:
            loop.add(make_sequence("long", prompt(50, 150), 4, priority=priority))
        loop.step()
        loop.clock.now += 1.0
    assert ("long", 0) in loop.ends
    assert loop.scheduler.capacity().waiting
    loop.assert_truth()


def test_the_read_budget_serves_two_long_bulk_decodes_in_turns() -> None:
    """A step has reads for one of them.

    The one that runs first in a step is not first in the next.
    """
    loop = Loop.build(
        make_cache(400),
        policy="priority",
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_read_tokens=70,
    )
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    for index in range(2):
        loop.add(make_sequence(f"r{index}", prompt(index, 40), 200, priority=2, params=params))
    for _ in range(24):
        loop.step()
    served = [item.sequence.request_id for plan in loop.plans[4:] for item in plan.scheduled]
    assert (served.count("r0"), served.count("r1")) == (10, 10)


def test_the_read_budget_postpones_no_prefill_for_ever() -> None:
    """A step has reads for the first of three, and for the one that ran longest ago."""
    loop = Loop.build(
        make_cache(100),
        max_read_tokens=40,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=8,
        max_num_partial_prefills=3,
        max_long_partial_prefills=3,
    )
    prefills = [make_sequence(name, prompt(ord(name), 120), 1) for name in "abc"]
    loop.add(*prefills)
    for _ in range(14):
        loop.step()
    assert [sequence.num_computed_tokens for sequence in prefills] == [72, 40, 32]


def test_a_lone_sequence_longer_than_the_read_budget_still_runs() -> None:
    loop = Loop.build(max_read_tokens=5)
    loop.add(make_sequence("a", prompt(1, 30), 5))
    loop.run()
    loop.assert_truth()


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_states_follow_the_life_of_a_request(policy: str, budget: int) -> None:
    loop = Loop.build(max_num_batched_tokens=budget, policy=policy)
    sequence = make_sequence("a", prompt(1, 12), 3)
    loop.add(sequence)
    seen = [sequence.status]
    while loop.scheduler.has_work:
        loop.step()
        if sequence.status is not seen[-1]:
            seen.append(sequence.status)
    waiting, prefilling, decoding, finished = (
        SequenceStatus.WAITING, SequenceStatus.PREFILLING, SequenceStatus.DECODING,
        SequenceStatus.FINISHED,
    )  # fmt: skip
    chunked = [waiting, prefilling, decoding, finished]
    assert seen == (chunked if budget < 12 else [waiting, decoding, finished])
    loop.assert_truth()


def test_a_finished_sequence_leaves_and_a_waiting_one_joins_at_the_next_step() -> None:
    loop = Loop.build(make_cache(), max_num_seqs=2)
    for name, length in (("a", 1), ("b", 5), ("c", 2)):
        loop.add(make_sequence(name, prompt(ord(name), 3), length))
    first, second, third = shapes(loop, 3)
    assert [name for name, _, _ in first] == ["a", "b"]
    assert [name for name, _, _ in second] == ["b", "c"]
    assert [name for name, _, _ in third] == ["b", "c"]
