"""Tests of planning one step ahead: placeholders, late ends, stale results, deferred blocks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.own.scheduler.fake_device import FakeDevice, expected_tokens
from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.engines.own.plan import Draft, StepOutput, StepPlan
from tokenmill_worker.engines.own.scheduler.step_builder import MIN_DRAFTS_AHEAD
from tokenmill_worker.engines.own.sequence import Sequence, SequenceStatus


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 23 + position * 3 + seed * position) % 48 + 1 for position in range(length)]


def endless(name: str, seed: int, length: int, max_tokens: int, **fields: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return make_sequence(name, prompt(seed, length), max_tokens, params=params, **fields)


def ahead(*sequences: Sequence, num_blocks: int = 64, **settings: Any) -> Loop:
    loop = Loop.build(make_cache(num_blocks), is_async=True, **settings)
    loop.add(*sequences)
    return loop


def launched(loop: Loop) -> tuple[StepPlan, StepOutput]:
    plan = loop.plan()
    return plan, loop.device.execute(plan)


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
def test_asynchronous_steps_give_the_synchronous_tokens(policy: str) -> None:
    said = []
    for is_async in (False, True):
        loop = Loop.build(
            make_cache(20),
            is_async=is_async,
            policy=policy,
            max_num_batched_tokens=9,
            max_num_seqs=4,
        )
        loop.add(
            *[
                make_sequence(f"r{index}", prompt(index, 4 + index), 20, priority=index % 3)
                for index in range(12)
            ]
        )
        loop.run()
        loop.assert_truth()
        said.append(loop.tokens)
    assert said[0] == said[1]


def test_a_step_is_planned_before_its_token_is_read() -> None:
    sequence = endless("a", 1, 5, 9)
    loop = ahead(sequence)
    first, output = launched(loop)
    assert sequence.num_inflight == 0
    second, _ = launched(loop)
    assert (second.scheduled[0].start, second.scheduled[0].num_tokens) == (5, 1)
    assert (sequence.num_tokens, sequence.num_inflight) == (5, 1)
    loop.scheduler.commit(first, output)
    assert (sequence.num_tokens, sequence.num_inflight, sequence.num_committed_tokens) == (6, 0, 5)
    check_integrity(loop.scheduler)


def test_no_step_is_planned_past_the_last_token() -> None:
    loop = ahead(endless("a", 1, 5, 2))
    launched(loop)
    launched(loop)
    assert loop.plan().is_empty


def test_a_token_computed_after_a_late_found_end_is_dropped() -> None:
    """A stop token is found while the next step is in flight: that step's result is dropped."""
    sequence = endless("a", 1, 4, 20)
    token = _first_token(loop := ahead(sequence))
    sequence.params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(token,))
    first, output = launched(loop)
    second, stale = launched(loop)
    events = loop.scheduler.commit(first, output)
    assert [event.finish_reason for event in events] == [FinishReason.STOP]
    assert loop.scheduler.capacity().free_blocks == 62, (
        "the block that the step in flight writes is not free yet"
    )
    check_integrity(loop.scheduler)
    assert loop.scheduler.commit(second, stale) == []
    assert loop.scheduler.capacity().free_blocks == 63
    check_integrity(loop.scheduler)
    assert sequence.output_ids == [token]


def _first_token(loop: Loop) -> int:
    return loop.truth["a", 0][0]


@pytest.mark.parametrize("when", ["before the step", "in flight", "two in flight"])
def test_a_cancelled_request_has_no_further_events_and_others_continue(when: str) -> None:
    """A cancel while the step that completes a block is in flight does not end the loop."""
    loop = ahead(endless("a", 1, 3, 9), endless("b", 2, 3, 9))
    steps = {"before the step": 0, "in flight": 1, "two in flight": 2}[when]
    pending = [launched(loop) for _ in range(steps)]
    events = loop.cancel("a")
    assert [event.finish_reason for event in events] == [FinishReason.CANCELLED]
    for plan, output in pending:
        assert all(
            event.request_id == "b" for event in loop._take(loop.scheduler.commit(plan, output))
        )
        check_integrity(loop.scheduler)
    loop.run()
    loop.assert_truth()
    assert loop.scheduler.snapshot().blocks_free == 63


def test_a_preempted_sequence_s_result_in_flight_is_dropped() -> None:
    loop = ahead(endless("a", 1, 8, 20), endless("b", 2, 8, 20), num_blocks=9)
    loop.run()
    loop.assert_truth()
    stats = loop.scheduler.snapshot()
    assert stats.preemptions > 0
    assert stats.generated_tokens == 40, "a stale token is not counted, and not said twice"


@pytest.mark.parametrize(("num_bulk", "length"), [(2, 14), (3, 6), (3, 14)])
def test_blocks_freed_for_an_urgent_request_are_not_taken_by_bulk(
    num_bulk: int, length: int
) -> None:
    """Blocks that a step in flight may write come free after it: no sequence starts until then."""
    loop = ahead(num_blocks=21, policy="priority", safety_margin=0.05, bulk_slowdown=None)
    loop.add(
        *[endless(f"bulk {number}", number, length, 60, priority=2) for number in range(num_bulk)]
    )
    for _ in range(6):
        loop.step()
    urgent = endless("urgent", 9, 60, 4, priority=0)
    loop.add(urgent)
    for _ in range(num_bulk + 2):
        loop.step()
    assert urgent.status is not SequenceStatus.WAITING
    assert loop.scheduler.snapshot().preemptions <= num_bulk
    loop.run()
    loop.assert_truth()


def test_a_reused_request_id_does_not_get_a_token_of_its_predecessor() -> None:
    loop = ahead(endless("a", 1, 3, 9))
    plan, output = launched(loop)
    loop.cancel("a")
    loop.ends.clear()
    loop.add(endless("a", 5, 3, 2))
    assert loop.scheduler.commit(plan, output) == []
    loop.run()
    assert loop.tokens["a", 0] == loop.truth["a", 0]


def test_a_failed_step_voids_the_step_on_top_of_it() -> None:
    loop = ahead(endless("a", 1, 5, 6), endless("b", 2, 5, 6))
    first, _ = launched(loop)
    second, _ = launched(loop)
    for plan in (second, first):
        loop.scheduler.abandon(plan)
        check_integrity(loop.scheduler)
    loop.device.computed = 0
    loop.run()
    loop.assert_truth()
    assert loop.device.computed == 2 * (5 + 5)


@pytest.mark.parametrize("num_right", [0, 2, 3, 5])
def test_drafts_beside_a_step_in_flight_change_no_token(num_right: int) -> None:
    """The first proposed token stands for the one in flight, and the step after drafts is missed:
    5 right ones give 5 tokens in 2 steps.
    """
    truth = expected_tokens(endless("a", 1, 6, 31))

    def proposer(sequence: Sequence) -> Draft:
        done = sequence.num_output_tokens
        return Draft((*truth[done : done + num_right], 0))

    loop = Loop.build(is_async=True, proposer=proposer)
    loop.add(endless("a", 1, 6, 31))
    loop.run()
    loop.assert_truth()
    lengths = [len(item.draft_ids) for plan in loop.plans for item in plan.scheduled]
    assert (max(lengths) > 0) == (num_right >= MIN_DRAFTS_AHEAD)
    assert 1 not in lengths
    if num_right == 5:
        assert len(lengths) <= 15
        assert loop.scheduler.snapshot().accepted_tokens >= 16


def test_other_sequences_step_while_one_s_drafts_are_verified() -> None:
    truth = expected_tokens(endless("a", 1, 6, 30))
    loop = ahead(
        endless("b", 2, 6, 30),
        proposer=lambda s: Draft(
            tuple(truth[s.num_output_tokens :][:5]) if s.request_id == "a" else ()
        ),
    )
    loop.add(endless("a", 1, 6, 30))
    loop.run()
    loop.assert_truth()
    missed = [plan for plan in loop.plans if len(plan.scheduled) == 1]
    assert len(missed) >= 5
    assert len(loop.plans) == 30, "b runs in every step"


def test_a_step_on_top_of_a_failed_one_has_no_token_in_flight() -> None:
    loop = Loop.build(is_async=True)
    sequence = endless("a", 1, 4, 9)
    loop.scheduler.add([sequence])
    failed, _ = loop.scheduler.plan(), loop.scheduler.plan()
    loop.scheduler.abandon(failed)
    loop.scheduler.plan()
    assert sequence.num_inflight == 0


def test_no_further_sequence_is_preempted_for_blocks_freed_after_the_step_in_flight() -> None:
    """The first victim's blocks may still be written: they suffice one step later."""
    loop = Loop.build(make_cache(11), is_async=True, max_num_seqs=6)
    loop.add(*[endless(f"r{index}", index, 4 + index % 3, 20) for index in range(6)])
    loop.run()
    loop.assert_truth()
    assert loop.scheduler.snapshot().preemptions <= 10


def test_an_output_of_another_step_is_refused() -> None:
    loop = ahead(endless("a", 1, 5, 6))
    plan, output = launched(loop)
    with pytest.raises(ValueError, match="in flight"):
        loop.scheduler.commit(
            plan, StepOutput(plan.step_id + 1, output.token_ids, output.logprobs, {})
        )
    loop.scheduler.commit(plan, output)
    with pytest.raises(ValueError, match="in flight"):
        loop.scheduler.commit(plan, output)


def test_the_fake_device_detects_a_wrong_block_table() -> None:
    """The tests above mean something only if wrong bookkeeping is seen."""
    loop = Loop.build()
    a, b = endless("a", 1, 6, 5), endless("b", 2, 6, 5)
    loop.add(a, b)
    loop.step()
    a.block_tables[0][0], b.block_tables[0][0] = b.block_tables[0][0], a.block_tables[0][0]
    plan = loop.plan()
    with pytest.raises(Exception, match="not its own"):
        FakeDevice.execute(loop.device, plan)
