"""Tests of the limits on prefills, of bounded bypass, and of refused requests."""

from __future__ import annotations

import pytest

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.scheduler.loop import (
    MAX_MODEL_LEN,
    Loop,
    make_cache,
    make_given,
    make_sequence,
)
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.requests import RequestError
from tokenmill_worker.engines.own.scheduler import scheduler
from tokenmill_worker.engines.own.scheduler.step_builder import StepDraft
from tokenmill_worker.engines.own.sequence import Sequence


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 17 + position * 7 + seed * position) % 48 + 1 for position in range(length)]


def endless(name: str, seed: int, length: int, max_tokens: int) -> Sequence:
    return make_sequence(
        name,
        prompt(seed, length),
        max_tokens,
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def chunks(loop: Loop) -> list[dict[str, int]]:
    return [
        {item.sequence.request_id: item.num_tokens for item in plan.scheduled}
        for plan in loop.plans
    ]


def test_a_long_prompt_beside_others_is_cut_to_the_threshold() -> None:
    loop = Loop.build(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    loop.add(make_sequence("long", prompt(1, 40), 1), make_sequence("short", prompt(2, 5), 9))
    loop.step()
    loop.step()
    assert chunks(loop) == [{"long": 6, "short": 5}, {"short": 1, "long": 6}]


def test_a_lone_long_prompt_is_cut_to_the_threshold() -> None:
    loop = Loop.build(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    loop.add(make_sequence("long", prompt(1, 40), 1))
    loop.run()
    assert chunks(loop) == [{"long": 6}] * 6 + [{"long": 4}]
    loop.assert_truth()


def test_a_sequence_may_end_at_the_model_s_length_but_not_begin_there() -> None:
    loop = Loop.build(make_cache(100))
    loop.add(make_sequence("fits", prompt(1, MAX_MODEL_LEN - 1), 1))
    loop.run()
    assert len(loop.tokens["fits", 0]) == 1
    without_limit = make_sequence("a", prompt(2, MAX_MODEL_LEN), 0, params=SamplingParams())
    for sequence in (without_limit, make_sequence("b", prompt(3, MAX_MODEL_LEN - 1), 2)):
        with pytest.raises(RequestError, match="can never fit"):
            loop.add(sequence)


def test_without_limits_a_lone_prompt_takes_the_whole_step() -> None:
    loop = Loop.build(max_num_batched_tokens=20)
    loop.add(make_sequence("long", prompt(1, 40), 1))
    loop.run()
    assert chunks(loop) == [{"long": 20}] * 2


def test_all_free_rows_are_filled_in_one_step_without_bypassing() -> None:
    loop = Loop.build(max_num_seqs=6, max_bypass=0)
    loop.add(*[make_sequence(f"{index}", prompt(index, 5), 2) for index in range(8)])
    loop.step()
    assert chunks(loop) == [{f"{index}": 5 for index in range(6)}]


def test_a_threshold_alone_cuts_each_long_prompt_and_fills_the_step() -> None:
    """The plan is that of vLLM's own test of concurrent partial prefills."""
    loop = Loop.build(
        make_cache(700),
        max_num_batched_tokens=1024,
        long_prefill_token_threshold=400,
        max_model_len=2048,
    )
    loop.add(*[endless(name, index, 800, 9) for index, name in enumerate("abc")])
    for _ in range(3):
        loop.step()
    assert chunks(loop) == [
        {"a": 400, "b": 400, "c": 224},
        {"a": 400, "b": 400, "c": 224},
        {"a": 1, "b": 1, "c": 352},
    ]
    loop.run()
    loop.assert_truth()


def test_several_partial_prefills_allow_one_long_prompt_by_default() -> None:
    loop = Loop.build(max_num_batched_tokens=64, max_num_partial_prefills=2)
    loop.add(make_sequence("a", prompt(1, 40), 1), make_sequence("b", prompt(2, 40), 1))
    loop.step()
    assert chunks(loop) == [{"a": int(MAX_MODEL_LEN * 0.04)}]


def test_long_prompts_prefill_up_to_their_limit_and_short_prompts_pass_them() -> None:
    loop = Loop.build(
        max_num_batched_tokens=30,
        long_prefill_token_threshold=6,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
    )
    loop.add(*[make_sequence(f"long {index}", prompt(index, 12), 1) for index in range(3)])
    loop.add(make_sequence("short", prompt(9, 5), 1))
    loop.run()
    assert chunks(loop) == [
        {"long 0": 6, "short": 5},
        {"long 0": 6, "long 1": 6},
        {"long 1": 6, "long 2": 6},
        {"long 2": 6},
    ]
    loop.assert_truth()


def test_a_prompt_as_long_as_the_threshold_does_not_count_as_long() -> None:
    loop = Loop.build(
        max_num_batched_tokens=8,
        long_prefill_token_threshold=6,
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
    )
    loop.add(make_sequence("long", prompt(1, 12), 1), make_sequence("six", prompt(2, 6), 1))
    loop.step()
    assert chunks(loop) == [{"long": 6, "six": 2}]


def test_partial_prefills_are_limited_and_whole_prefills_are_not() -> None:
    loop = Loop.build(
        max_num_batched_tokens=20, max_num_partial_prefills=1, long_prefill_token_threshold=4
    )
    for name, length in (("a", 12), ("b", 12), ("c", 2)):
        loop.add(make_sequence(name, prompt(ord(name), length), 1))
    loop.run()
    assert chunks(loop)[:4] == [{"a": 4, "c": 2}, {"a": 4}, {"a": 4, "b": 4}, {"b": 4}]


def test_with_several_partial_prefills_prompts_over_four_percent_of_the_context_are_long() -> None:
    loop = Loop.build(
        max_num_batched_tokens=64, max_num_partial_prefills=2, max_long_partial_prefills=2
    )
    loop.add(make_sequence("a", prompt(1, 40), 1), make_sequence("b", prompt(2, 40), 1))
    loop.step()
    assert chunks(loop) == [{"a": int(MAX_MODEL_LEN * 0.04), "b": int(MAX_MODEL_LEN * 0.04)}]


def test_at_most_max_bypass_requests_pass_a_head_that_does_not_fit() -> None:
    """The running sequence holds 8 to 10 of 20 blocks; the head needs 15, each small one 1."""
    loop = Loop.build(make_cache(21), max_bypass=3)
    loop.add(endless("runner", 1, 30, 8))
    loop.step()
    loop.add(endless("head", 2, 60, 1))
    loop.add(*[endless(f"small {index}", 3 + index, 3, 1) for index in range(8)])
    loop.run()
    loop.assert_truth()
    finished = [event.request_id for event in loop.events if event.finish_reason]
    assert finished[:3] == ["small 0", "small 1", "small 2"]
    assert finished.index("head") < finished.index("small 3")


def test_a_head_that_started_may_be_bypassed_anew_after_preemption() -> None:
    loop = Loop.build(make_cache(21), max_bypass=3)
    loop.add(endless("runner", 1, 30, 8))
    loop.step()
    head = endless("head", 2, 60, 9)
    loop.add(head, endless("small", 3, 3, 1))
    loop.step()
    entry = loop.scheduler._state.entries[head]
    assert entry.bypassed == 1
    while entry.queued:
        loop.step()
    assert entry.bypassed == 0


def test_a_sequence_not_tried_in_a_full_step_is_tried_in_the_next() -> None:
    """The head does not fit, "second" fills the step, and "third" has not been tried yet."""
    loop = Loop.build(make_cache(21), max_num_batched_tokens=8)
    loop.add(endless("runner", 1, 30, 40))
    while loop.scheduler.snapshot().generated_tokens == 0:
        loop.step()
    loop.add(endless("head", 2, 60, 1), endless("second", 3, 7, 9), endless("third", 4, 4, 9))
    loop.step()
    loop.step()
    assert chunks(loop)[-2:] == [{"runner": 1, "second": 7}, {"runner": 1, "second": 1, "third": 4}]


def test_with_max_bypass_zero_the_order_is_strict() -> None:
    loop = Loop.build(make_cache(21), max_bypass=0)
    loop.add(endless("runner", 1, 30, 8))
    loop.step()
    loop.add(endless("head", 2, 60, 1), endless("small", 3, 3, 1))
    loop.run()
    assert [event.request_id for event in loop.events if event.finish_reason] == [
        "runner",
        "head",
        "small",
    ]


def test_a_stream_of_small_requests_does_not_starve_a_large_one() -> None:
    loop = Loop.build(make_cache(21), max_num_seqs=8)
    loop.add(*[endless(f"first {index}", index, 3, 12) for index in range(6)])
    loop.step()
    loop.add(endless("large", 50, 76, 1))
    for index in range(200):
        loop.add(endless(f"small {index}", 60 + index, 3, 12))
        loop.step()
        if ("large", 0) in loop.ends:
            break
    assert loop.ends["large", 0] is FinishReason.LENGTH
    assert index < 100


# ── the door ──


def refused(loop: Loop, *sequences: Sequence) -> RequestError:
    with pytest.raises(RequestError) as caught:
        loop.add(*sequences)
    assert not loop.scheduler.has_work or loop.scheduler.request_ids() == ["known"]
    check_integrity(loop.scheduler)
    return caught.value


def test_a_request_that_can_never_fit_is_refused_and_others_continue() -> None:
    loop = Loop.build(make_cache(9))
    error = refused(loop, make_sequence("big", prompt(1, 33), 1))
    assert error.code == "context_length_exceeded"
    assert "33" in str(error)
    refused(loop, make_sequence("grows", prompt(1, 20), 14))
    loop.add(make_sequence("fits", prompt(1, 20), 13), make_sequence("alone", prompt(2, 32), 1))
    loop.run()
    loop.assert_truth()


def test_a_small_window_group_does_not_limit_the_length() -> None:
    loop = Loop.build(make_cache(9, windows=(8,)), max_num_batched_tokens=64)
    loop.add(endless("long", 1, 100, 50))
    loop.run()
    loop.assert_truth()


def test_a_request_beyond_the_model_s_length_is_refused() -> None:
    loop = Loop.build(make_cache(200))
    refused(loop, make_sequence("long", prompt(1, MAX_MODEL_LEN), 1))
    refused(loop, make_sequence("longer", prompt(1, 200), 100))


def test_a_request_without_max_tokens_is_cut_to_the_length_that_fits() -> None:
    loop = Loop.build(make_cache(9))
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    loop.add(make_sequence("open", prompt(1, 10), 0, params=params))
    loop.run()
    assert len(loop.tokens["open", 0]) == 32 + 1 - 10, "the last token needs no block"
    assert loop.ends["open", 0] is FinishReason.LENGTH


def test_a_sequence_removed_from_a_step_returns_its_budgets() -> None:
    step, sequence = StepDraft(0, tokens=100), make_given("a", [1, 2, 3], [4, 5])
    budgets = (step.tokens, step.scores, step.drafts)
    step.add(sequence, 4, True, ((), (7, 8)))
    assert (step.tokens, step.scores, step.drafts) == tuple(
        before - used for before, used in zip(budgets, (6, 2, 2), strict=True)
    )
    step.remove(sequence)
    assert (step.tokens, step.scores, step.drafts) == budgets


def test_an_empty_prompt_is_refused() -> None:
    assert "empty" in str(refused(Loop.build(), make_sequence("none", [], 4)))


def test_a_request_id_in_use_is_refused() -> None:
    loop = Loop.build()
    loop.add(make_sequence("known", prompt(1, 5), 4))
    assert "known" in str(
        refused(
            loop, make_sequence("new", prompt(2, 5), 4), make_sequence("known", prompt(1, 5), 4)
        )
    )
    loop.run()
    loop.assert_truth()
    loop.ends.clear()
    loop.tokens.clear()
    loop.add(make_sequence("known", prompt(1, 5), 4))
    loop.run()
    loop.assert_truth()


def test_a_request_beyond_the_backlog_s_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_WAITING", 3)
    loop = Loop.build()
    refused(loop, *[make_sequence(f"r{index}", prompt(index, 3), 1) for index in range(4)])


def test_capacity_and_statistics_match_the_state() -> None:
    loop = Loop.build(make_cache(21), max_num_seqs=2)
    loop.add(*[endless(f"r{index}", index, 9, 5) for index in range(3)])
    loop.step()
    capacity = loop.scheduler.capacity()
    assert (capacity.free_sequences, capacity.free_blocks, capacity.waiting, capacity.running) == (
        0,
        14,
        1,
        2,
    )
    stats = loop.scheduler.snapshot()
    assert (stats.num_running, stats.num_waiting, stats.blocks_total, stats.blocks_free) == (
        2,
        1,
        20,
        14,
    )
    assert (stats.prompt_tokens, stats.computed_tokens, stats.generated_tokens) == (27, 18, 2)
    loop.run()
    stats = loop.scheduler.snapshot()
    assert (stats.finished, stats.blocks_free) == (3, 20)
    assert stats.blocks_cached > 0
