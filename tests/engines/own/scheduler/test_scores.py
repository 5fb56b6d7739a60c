"""Log-probabilities of given tokens: each once and in order, whatever else a step holds, and with
as much of the prefix cache as their logits allow.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.engines.own.scheduler.loop import Loop, make_cache, make_given, make_sequence
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.engines.own.plan import MAX_SCORED
from tokenmill_worker.engines.own.sequence import Sequence


def tokens(seed: int, length: int) -> list[int]:
    return [(seed * 11 + position * position * 5 + position) % 48 + 1 for position in range(length)]


def scored(name: str, prompt: list[int], max_tokens: int = 1, **fields: Any) -> Sequence:
    """Make a sequence whose prompt's log-probabilities are wanted."""
    fields |= {"next_scored": 1, "scored_end": len(prompt)}
    return make_sequence(name, prompt, max_tokens, **fields)


def starts(loop: Loop, name: str) -> list[tuple[int, int]]:
    return [
        (item.start, item.num_tokens)
        for plan in loop.plans
        for item in plan.scheduled
        if item.sequence.request_id == name
    ]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_a_scored_prompt_in_any_chunks_reports_each_token_but_the_first_once(
    chunk: int, is_async: bool
) -> None:
    loop = Loop.build(max_num_batched_tokens=chunk, is_async=is_async)
    loop.add(scored("a", tokens(1, 33), 5), scored("b", tokens(2, 1), 5))
    loop.run()
    loop.assert_truth()
    assert len(loop.scores["a", 0]) == 32
    assert loop.scores["b", 0] == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a_scored_cached_prompt_is_recomputed_while_others_hit_the_cache(is_async: bool) -> None:
    """The logits of cached tokens are nowhere; their keys and values are."""
    loop = Loop.build(is_async=is_async)
    loop.add(make_sequence("before", tokens(1, 41), 1))
    loop.run()
    loop.add(scored("scored", tokens(1, 41)))
    loop.add(make_sequence("after", tokens(1, 41), 1))
    loop.run()
    loop.assert_truth()
    assert starts(loop, "scored")[0] == (0, 41)
    assert starts(loop, "after")[0][0] == 40
    cached = {e.request_id: e.num_cached_tokens for e in loop.events if e.token_ids}
    assert cached == {"before": 0, "scored": 0, "after": 40}


def test_blocks_of_a_scored_prompt_are_cached() -> None:
    loop = Loop.build()
    loop.add(scored("scored", tokens(1, 41)))
    loop.run()
    loop.add(make_sequence("after", tokens(1, 41), 1))
    loop.run()
    assert starts(loop, "after")[0][0] == 40


@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_scored_prompt_reports_each_token_once(
    is_async: bool, num_host_blocks: int
) -> None:
    cache = make_cache(14, num_host_blocks=num_host_blocks)
    loop = Loop.build(
        cache, max_num_batched_tokens=6, is_async=is_async, policy="priority", bulk_slowdown=None
    )
    loop.add(scored("bulk", tokens(1, 41), 3, priority=2))
    for _ in range(4):
        loop.step()
    reported = len(loop.scores["bulk", 0])
    assert 0 < reported < 40
    loop.add(make_sequence("urgent", tokens(2, 40), 3, priority=0))
    loop.run()
    loop.assert_truth()
    assert loop.scheduler.stats.preemptions
    assert len(loop.scores["bulk", 0]) == 40


@pytest.mark.parametrize("is_async", [False, True])
def test_given_answers_share_their_prompt_and_draw_no_token(is_async: bool) -> None:
    loop = Loop.build(make_cache(100), is_async=is_async, max_num_batched_tokens=16)
    prompt = tokens(1, 37)
    answers = [tokens(seed, length) for seed, length in ((2, 1), (3, 9), (4, 4), (5, 30))]
    loop.add(*[make_given("job", prompt, ids, choice=i) for i, ids in enumerate(answers)])
    loop.run()
    loop.assert_truth()
    assert [loop.tokens["job", i] for i in range(4)] == answers
    assert set(loop.ends.values()) == {FinishReason.LENGTH}
    assert loop.scheduler.snapshot().generated_tokens == 0
    # 36 tokens in whole blocks are computed once, then each answer with what is left of the prompt
    assert loop.device.computed == 36 + sum(1 + len(ids) for ids in answers)


def test_a_prompt_of_whole_blocks_computes_its_last_block_for_each_given_answer() -> None:
    loop = Loop.build()
    loop.add(*[make_given("job", tokens(1, 16), [i + 1, 2], choice=i) for i in range(3)])
    loop.run()
    loop.assert_truth()
    assert loop.device.computed == 12 + 3 * (4 + 2)


def test_a_resumed_given_answer_reports_only_its_missing_tokens() -> None:
    loop = Loop.build()
    loop.add(
        make_given("a", tokens(1, 9), tokens(2, 6), num_resumed_tokens=4),
        make_given("b", tokens(3, 9), tokens(4, 6), num_resumed_tokens=6),
    )
    loop.run()
    loop.assert_truth()
    assert loop.tokens["a", 0] == tokens(2, 6)[4:]
    assert loop.tokens["b", 0] == []
    assert loop.ends == {("a", 0): FinishReason.LENGTH, ("b", 0): FinishReason.LENGTH}


@pytest.mark.parametrize("chunked", [True, False])
def test_a_step_scores_a_limited_number_of_tokens(chunked: bool) -> None:
    """Also where prompts are not cut into chunks otherwise: the logits of a whole prompt would not
    fit into memory.
    """
    loop = Loop.build(make_cache(400), max_num_batched_tokens=1024, enable_chunked_prefill=chunked)
    for i in range(4):
        loop.add(scored(f"r{i}", tokens(i, 200)), make_sequence(f"other {i}", tokens(9 + i, 50), 3))
    loop.run()
    loop.assert_truth()
    sums = [sum(item.num_scored for item in plan.scheduled) for plan in loop.plans]
    assert max(sums) == MAX_SCORED
    assert sum(sums) == 4 * 199


def test_a_prompt_without_room_for_its_scores_does_not_delay_others() -> None:
    loop = Loop.build(make_cache(400), max_num_batched_tokens=1024, policy="priority")
    loop.add(scored("first", tokens(1, 250), 1, priority=2))
    loop.add(scored("second", tokens(2, 250), 1, priority=0))
    loop.add(make_sequence("third", tokens(3, 20), 1))
    first_plan = loop.plan()
    ran = [item.sequence.request_id for item in first_plan.scheduled]
    assert {"second", "third"} <= set(ran)
    loop.scheduler.commit(first_plan, loop.device.execute(first_plan))
    while loop.scheduler.has_work:
        loop.step()
    assert loop.scheduler.stats.preemptions == 0


def test_failed_steps_leave_no_gap_in_scores() -> None:
    loop = Loop.build(max_num_batched_tokens=5)
    turns = itertools.count()
    loop.device.fails = lambda plan: len(plan.scheduled) > 1 and next(turns) % 2 == 0
    loop.add(*[scored(f"r{i}", tokens(i, 8)) for i in range(3)])
    loop.add(make_given("given", tokens(4, 6), tokens(5, 6)))
    loop.run()
    loop.assert_truth()
    assert next(turns) > 2
