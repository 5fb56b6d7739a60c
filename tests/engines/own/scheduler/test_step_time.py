"""Bulk work beside more urgent work: how much of it a step carries."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tests.engines.own.scheduler.test_policies import prompt
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.scheduler.step_time import (
    ALONE_S,
    FIRST_TOKENS,
    MIN_TOKENS,
    RECENT_S,
    SHORT_S,
    StepTimeModel,
)
from tokenmill_worker.engines.own.sequence import Sequence


def taught(slowdown: float | None, fixed: float, each: float) -> StepTimeModel:
    step_times = StepTimeModel(slowdown)
    for count in (1, 64, 30, 7) * 5:
        step_times.note(count, fixed + each * count)
    return step_times


def test_bulk_tokens_are_limited_if_tokens_cost_time() -> None:
    step_times = taught(0.5, fixed=0.1, each=0.01)
    # 0.2 s alone, 0.3 s with 10 more
    assert step_times.shared_bulk_budget(10) == pytest.approx(10, abs=1)
    assert taught(0.0, fixed=0.1, each=0.01).shared_bulk_budget(10) == MIN_TOKENS


def test_bulk_tokens_are_admitted_if_tokens_cost_no_time() -> None:
    # more than 64 at once was never seen
    assert taught(0.5, fixed=0.1, each=0.0).shared_bulk_budget(10) == 4 * 64 - 10
    assert taught(None, fixed=0.1, each=0.01).shared_bulk_budget(10) is None


def test_a_short_step_is_filled_with_bulk_tokens() -> None:
    room = taught(0.0, fixed=0.001, each=0.001).shared_bulk_budget(1)
    assert room is not None
    assert 0.002 + room * 0.001 == pytest.approx(SHORT_S, rel=0.05)
    assert taught(0.0, fixed=0.001, each=0.0001).shared_bulk_budget(1) == pytest.approx(190, abs=1)


def test_bulk_tokens_are_bounded_before_any_step_was_measured() -> None:
    step_times = StepTimeModel(0.5)
    assert step_times.bulk_token_budget(0.0, 0) == FIRST_TOKENS
    assert step_times.shared_bulk_budget(1) == FIRST_TOKENS
    for _ in range(50):
        # all of one size: a token's own cost is unknown, so each costs its share
        step_times.note(64, 0.5)
    assert step_times.bulk_token_budget(0.0, 0) == pytest.approx(64 * ALONE_S / 0.5, abs=1)
    assert step_times.shared_bulk_budget(1) == MIN_TOKENS


@pytest.mark.parametrize(
    ("fixed", "lately", "long_ago"),
    [(0.005, 3 * 0.01, ALONE_S), (0.1, ALONE_S, ALONE_S), (0.3, 1.5 * 0.305, 1.5 * 0.305)],
)
def test_a_step_of_bulk_alone_is_short_shortly_after_other_jobs(
    fixed: float, lately: float, long_ago: float
) -> None:
    """Such a step may take three times as long as one token, but no longer than the target.

    A shared step that takes longer raises that bound.
    """
    step_times = taught(0.5, fixed, each=0.005)
    step_times.bulk_token_budget(1000.0, 1)
    seconds = [
        fixed + 0.005 * (step_times.bulk_token_budget(1000.0 + after, 0) or 0)
        for after in (RECENT_S, 2 * RECENT_S)
    ]
    assert seconds == pytest.approx([lately, long_ago], rel=0.1)


def test_bulk_alone_is_bounded_without_earlier_other_jobs() -> None:
    """The first other request waits for the end of the running step."""
    loop = Loop.build(
        make_cache(2000), max_num_seqs=8, max_num_batched_tokens=512, policy="priority"
    )
    loop.seconds_of = lambda plan: 0.02 + 0.002 * plan.num_tokens
    for number in range(8):
        loop.add(forever(f"bulk {number}", number, 20, length=230, priority=2))
    seconds = []
    while loop.scheduler.has_work:
        before = loop.clock.now
        loop.step()
        seconds.append(loop.clock.now - before)
    assert max(seconds) <= ALONE_S + 0.01
    assert max(seconds) >= ALONE_S / 2  # and they are not shorter than they need be
    loop.assert_truth()


def test_the_model_extrapolates_to_smaller_steps() -> None:
    step_times = StepTimeModel(0.5)
    for _ in range(50):
        step_times.note(64, 0.1 + 0.64)
        step_times.note(200, 0.1 + 2.0)
    room = step_times.shared_bulk_budget(1)  # 0.11 s alone
    assert room == pytest.approx(5, abs=1)


def test_a_slow_large_step_is_learnt_at_once_and_budgets_grow_slowly() -> None:
    step_times = StepTimeModel(0.5)
    for _ in range(50):
        step_times.note(1, 0.10)
        step_times.note(5, 0.10)  # nothing says yet that tokens cost
    assert step_times.shared_bulk_budget(1) == 4 * 5 - 1
    step_times.note(300, 4.0)
    room = step_times.shared_bulk_budget(1)
    assert room is not None
    assert room <= 10


def test_a_single_disturbed_step_does_not_change_the_budget() -> None:
    step_times = taught(0.5, fixed=0.1, each=0.01)
    before = step_times.shared_bulk_budget(10)
    step_times.note(3, 30.0)
    after = step_times.shared_bulk_budget(10)
    assert before is not None
    assert after is not None
    assert after <= 4 * before


@pytest.mark.parametrize("slowdown", [0.5, None])
def test_bulk_is_slowed_while_other_jobs_run_and_recovers_after(
    slowdown: float | None,
) -> None:
    loop = Loop.build(make_cache(400), max_num_seqs=24, policy="priority", bulk_slowdown=slowdown)
    loop.seconds_of = lambda plan: 0.02 + 0.005 * plan.num_tokens
    for number in range(20):  # one after the other: steps of many sizes
        loop.add(forever(f"bulk {number}", number, 60, priority=2))
        loop.step()
    loop.add(forever("urgent", 99, 9, priority=0))
    shared = [step_of(loop) for _ in range(9)]
    assert all("urgent" in step for step in shared)
    beside = [len(step) - 1 for step in shared]
    if slowdown is None:
        assert min(beside) == 20
    else:
        assert max(beside) <= 8
        assert min(beside) >= MIN_TOKENS
        assert len({name for step in shared for name in step}) == 21  # in turns
    after = step_of(loop)
    # another may come while this step runs
    assert MIN_TOKENS <= len(after) <= 16 if slowdown else len(after) == 20
    loop.clock.now += RECENT_S + 1
    assert len(step_of(loop)) == 20
    loop.run()
    loop.assert_truth()


def test_endless_urgent_prompts_leave_bulk_decodes_their_part() -> None:
    loop = Loop.build(
        make_cache(400), max_num_seqs=24, max_num_batched_tokens=16, policy="priority"
    )
    loop.add(forever("bulk", 1, 12, priority=2))
    loop.step()
    for number in range(20):
        loop.add(forever(f"urgent {number}", number, 2, length=30, priority=0))
    for _ in range(11):
        assert "bulk" in step_of(loop)
    assert ("bulk", 0) in loop.ends
    loop.run()
    loop.assert_truth()


@pytest.mark.parametrize(("num_decodes", "at_least"), [(0, 200), (9, 14)])
def test_endless_urgent_prompts_leave_a_bulk_prompt_its_part(
    num_decodes: int, at_least: int
) -> None:
    """The bulk prompt advances slowly beside decodes of bulk work, which come first."""
    loop = Loop.build(
        make_cache(2000), max_num_seqs=200, max_num_batched_tokens=32, policy="priority"
    )
    loop.seconds_of = lambda plan: 0.02 + 0.01 * plan.num_tokens
    for number in range(num_decodes):
        loop.add(forever(f"bulk {number}", number, 200, length=1, priority=2))
    loop.step()
    prompt = forever("prompt", 20, 2, length=200, priority=2)
    loop.add(prompt)
    while not prompt.num_committed_tokens:
        loop.step()
    before = prompt.num_committed_tokens
    for number in range(90):
        loop.add(forever(f"urgent {number}", number, 2, length=40, priority=0))
        loop.step()
    assert prompt.is_finished or prompt.num_committed_tokens >= min(200, before + at_least)


def forever(name: str, seed: int, max_tokens: int, length: int = 5, **fields: Any) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return make_sequence(name, prompt(seed, length), max_tokens, params=params, **fields)


def step_of(loop: Loop) -> dict[str, int]:
    """Run the next step and return the number of tokens per request."""
    loop.step()
    return {item.sequence.request_id: item.num_tokens for item in loop.plans[-1].scheduled}
