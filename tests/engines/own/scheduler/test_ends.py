"""Sequences end by stop tokens, lengths, deadlines, cancels in every state, and device errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.own.scheduler.fake_device import EOS, expected_tokens
from tests.engines.own.scheduler.integrity import check_integrity, held_blocks
from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tokenmill_schemas.generation import FinishReason, SamplingParams, TokenLogprob
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.own.plan import Draft, RequestFault, StepOutput
from tokenmill_worker.engines.own.sequence import Sequence, SequenceStatus


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 29 + position * 3 + seed * position) % 48 + 1 for position in range(length)]


def endless(name: str, salt: int, length: int, max_tokens: int, **fields: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return make_sequence(name, prompt(salt, length), max_tokens, params=params, **fields)


def step_with(
    loop: Loop, *tokens: int, logprobs: tuple[TokenLogprob, ...] | None = None
) -> list[TokenEvent]:
    plan = loop.scheduler.plan()
    return loop.scheduler.commit(plan, StepOutput(plan.step_id, (tokens,), (logprobs,), {}))


def test_eos_ends_with_stop_and_is_the_last_token() -> None:
    loop = Loop.build()
    loop.scheduler.add([make_sequence("a", [5, 6], 9)])
    assert step_with(loop, 7)[0].finish_reason is None
    (event,) = step_with(loop, EOS)
    assert (event.token_ids, event.finish_reason) == ((EOS,), FinishReason.STOP)
    assert not loop.scheduler.has_work


@pytest.mark.parametrize(
    ("params", "tokens", "reason"),
    [
        (SamplingParams(ignore_eos=True), (EOS, 7, 8), FinishReason.LENGTH),
        (SamplingParams(min_tokens=2), (EOS, EOS), FinishReason.STOP),
        (SamplingParams(stop_token_ids=(9,)), (7, 9), FinishReason.STOP),
        (SamplingParams(stop_token_ids=(9,), min_tokens=3), (9, 9, 9), FinishReason.STOP),
        (SamplingParams(), (7, 8, EOS), FinishReason.STOP),
        (SamplingParams(), (7, 8, 9), FinishReason.LENGTH),
    ],
)
def test_each_stop_condition_ends_the_answer_with_its_reason(
    params: SamplingParams, tokens: tuple[int, ...], reason: FinishReason
) -> None:
    loop = Loop.build()
    loop.scheduler.add([make_sequence("a", [5, 6], 3, params=params)])
    for token in tokens[:-1]:
        assert step_with(loop, token)[0].finish_reason is None
    assert step_with(loop, tokens[-1])[0].finish_reason is reason


def test_resumed_tokens_count_towards_the_length_and_give_no_events() -> None:
    loop = Loop.build()
    whole = endless("whole", 1, 6, 8)
    said = expected_tokens(whole)
    loop.add(whole)
    loop.run()
    resumed = endless("resumed", 1, 6, 8, resumed=tuple(said[:5]))
    loop.add(resumed)
    loop.run()
    cached = [one.num_cached_tokens for one in loop.events if one.request_id == "resumed"]
    assert cached == [6, 0, 0], "of the prompt, with the first event"
    assert loop.tokens["resumed", 0] == said[5:]
    assert loop.ends["resumed", 0] is FinishReason.LENGTH


@pytest.mark.parametrize("num_host_blocks", [0, 16])
@pytest.mark.parametrize("status", list(SequenceStatus)[:-1])
def test_cancelling_frees_every_block_in_every_state(
    status: SequenceStatus, num_host_blocks: int
) -> None:
    loop = Loop.build(
        make_cache(9, num_host_blocks=num_host_blocks), max_num_batched_tokens=10, max_num_seqs=2
    )
    loop.add(endless("a", 1, 8, 20), endless("b", 2, 12, 16), endless("c", 3, 8, 20))
    for _ in range(200):
        found = [s for name in "abc" for s in loop.scheduler.sequences(name) if s.status is status]
        if found or not loop.scheduler.has_work:
            break
        loop.step()
    if not found:
        assert (status, num_host_blocks) == (SequenceStatus.OFFLOADED, 0)
        return
    held = [
        (group, block)
        for group, table in enumerate(found[0].block_tables)
        for block in table
        if block
    ]
    free = loop.scheduler.capacity().free_blocks
    (event,) = loop.cancel(found[0].request_id)
    assert event.finish_reason is FinishReason.CANCELLED
    assert loop.scheduler.capacity().free_blocks == free + len(held)
    check_integrity(loop.scheduler)
    assert loop.cancel(found[0].request_id) == []
    assert found[0].status is SequenceStatus.FINISHED
    loop.run()
    loop.assert_truth()
    assert loop.scheduler.snapshot().blocks_free == 8
    assert not held_blocks(loop.scheduler.kv.tier.pool)


def test_a_single_choice_can_be_cancelled() -> None:
    loop = Loop.build()
    loop.add(*[endless("a", 1, 6, 6, choice=choice, seed=choice) for choice in range(3)])
    loop.step()
    assert [event.choice for event in loop.cancel("a", 0)] == [0], (
        "the one that the others' prompt comes from"
    )
    loop.run()
    loop.assert_truth()
    assert loop.ends["a", 0] is FinishReason.CANCELLED
    assert loop.ends["a", 1] is loop.ends["a", 2] is FinishReason.LENGTH


def test_deadlines_end_waiting_and_running_requests() -> None:
    loop = Loop.build(max_num_seqs=1)
    now = loop.clock.now
    loop.add(
        endless("runs", 1, 4, 99, deadline=now + 5), endless("waits", 2, 4, 99, deadline=now + 3)
    )
    loop.add(endless("in time", 3, 4, 2, deadline=now + 50))
    for _ in range(3):
        loop.step()
    assert loop.ends == {}
    loop.clock.now += 3
    assert [event.request_id for event in loop.step() if event.finish_reason] == ["waits"]
    loop.clock.now += 2
    assert [event.request_id for event in loop.scheduler.expire()] == ["runs"]
    loop.run()
    assert loop.ends["in time", 0] is FinishReason.LENGTH


def test_a_device_error_of_one_sequence_ends_only_that_sequence() -> None:
    loop = Loop.build()
    loop.add(endless("a", 1, 4, 5), endless("b", 2, 4, 5))
    plan = loop.scheduler.plan()
    output = loop.device.execute(plan)
    broken = StepOutput(
        plan.step_id, ((), output.token_ids[1]), (None, None), {0: "its logits are not finite"}
    )
    events = loop._take(loop.scheduler.commit(plan, broken))
    assert [(e.request_id, e.error, e.error_code) for e in events] == [
        ("a", "its logits are not finite", "engine_error"),
        ("b", None, None),
    ]
    loop.run()
    loop.assert_truth()
    assert loop.ends["b", 0] is FinishReason.LENGTH


def test_an_error_caused_by_the_request_has_the_code_invalid_request() -> None:
    loop = Loop.build()
    loop.add(endless("a", 1, 4, 5))
    plan = loop.scheduler.plan()
    broken = StepOutput(plan.step_id, ((),), (None,), {0: RequestFault("it has a dead end")})
    (event,) = loop._take(loop.scheduler.commit(plan, broken))
    assert (event.error, event.error_code) == ("it has a dead end", "invalid_request")
    assert type(event.error) is str


def test_drafts_are_accepted_up_to_the_first_wrong_token() -> None:
    truth = expected_tokens(endless("a", 1, 6, 30))
    wrong = [(token + 1) % 50 for token in truth]

    def proposer(sequence: Sequence) -> Draft:
        done = sequence.num_output_tokens
        return Draft((*truth[done : done + 2], *wrong[done + 2 : done + 3]))

    loop = Loop.build(proposer=proposer)
    loop.add(endless("a", 1, 6, 30))
    loop.run()
    loop.assert_truth()
    assert len(loop.plans) == 10, "three tokens a step, that of the prompt included"
    stats = loop.scheduler.snapshot()
    assert (stats.generated_tokens, stats.accepted_tokens) == (30, 20)
    assert stats.draft_tokens > stats.accepted_tokens


def test_drafts_use_only_budget_and_blocks_that_are_left() -> None:
    loop = Loop.build(
        make_cache(9),
        proposer=lambda sequence: Draft((1,) * 20),
        max_num_batched_tokens=6,
        max_num_seqs=2,
    )
    loop.add(endless("a", 1, 3, 20), endless("b", 2, 3, 3))
    loop.run()
    loop.assert_truth()
    assert all(plan.num_tokens <= 6 for plan in loop.plans)
    assert loop.scheduler.snapshot().preemptions == 0, "nobody is preempted for a guess"
    both = [plan for plan in loop.plans if len(plan.scheduled) == 2 and plan.scheduled[0].draft_ids]
    assert both


def test_a_request_can_refuse_drafts() -> None:
    loop = Loop.build(proposer=lambda sequence: Draft((1, 2)))
    params = SamplingParams(max_tokens=5, ignore_eos=True, speculate=False)
    loop.add(make_sequence("a", [3, 4], 5, params=params))
    loop.run()
    assert loop.scheduler.snapshot().draft_tokens == 0


def test_a_stop_token_inside_accepted_drafts_cuts_the_rest() -> None:
    loop = Loop.build(proposer=lambda sequence: Draft((7, EOS, 8)))
    loop.scheduler.add([make_sequence("a", [5, 6], 9)])
    step_with(loop, 3)
    plan = loop.scheduler.plan()
    logprobs = tuple(TokenLogprob(-float(index)) for index in range(4))
    (event,) = loop.scheduler.commit(
        plan, StepOutput(plan.step_id, ((7, EOS, 8, 9),), (logprobs,), {})
    )
    assert (event.token_ids, event.finish_reason) == ((7, EOS), FinishReason.STOP)
    assert event.logprobs == logprobs[:2]
    check_integrity(loop.scheduler)


def test_deadlines_of_ended_requests_are_dropped_before_they_pass() -> None:
    loop = Loop.build(max_num_seqs=8)
    loop.checks = False
    far = loop.clock.now + 86_400
    for number in range(600):
        loop.add(make_sequence(f"s{number}", [1 + number % 40, 2, 3], 1, deadline=far))
        loop.step()
    state = loop.scheduler._state
    assert len(state.deadlines) <= 200
    check_integrity(loop.scheduler)
    loop.add(make_sequence("due", [4, 5, 6], 100, deadline=loop.clock.now + 5))
    loop.step()
    loop.clock.now += 6
    loop.run()
    assert loop.ends["due", 0] is FinishReason.EXPIRED
