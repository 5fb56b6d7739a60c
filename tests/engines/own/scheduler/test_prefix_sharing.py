"""Prompts that share a prefix compute it once, counted in computed tokens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.plan import StepPlan
from tokenmill_worker.engines.own.sequence import Sequence


def tokens(seed: int, length: int) -> list[int]:
    return [(seed * 11 + position * position * 5 + position) % 48 + 1 for position in range(length)]


def one_token(name: str, prompt: list[int], **fields: Any) -> Sequence:
    return make_sequence(name, prompt, 1, **fields)


@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
@pytest.mark.parametrize("windows", [(None,), (None, 40), (24, None)])
def test_64_requests_that_share_a_prefix_compute_it_once(
    policy: str, windows: tuple[int | None, ...]
) -> None:
    cache = make_cache(300, block_size=4, windows=windows)
    loop = Loop.build(cache, policy=policy, max_num_batched_tokens=32, max_num_seqs=64)
    loop.checks = False
    shared = tokens(1, 128)
    loop.add(
        *[
            one_token(f"r{index}", [*shared, index % 8 + 1, index // 8 + 1, 3, 4, 5])
            for index in range(64)
        ]
    )
    loop.run()
    loop.assert_truth()
    assert loop.device.computed == 128 + 64 * 5
    assert loop.scheduler.snapshot().computed_tokens == loop.device.computed


def test_64_equal_prompts_of_full_blocks_compute_their_last_block_each() -> None:
    loop = Loop.build(make_cache(300, block_size=16), max_num_batched_tokens=256, max_num_seqs=64)
    loop.add(*[one_token(f"r{index}", (tokens(1, 128) * 2)[:240]) for index in range(64)])
    loop.run()
    loop.assert_truth()
    assert loop.device.computed == 240 + 63 * 16


def test_later_requests_wait_for_a_prefix_that_is_being_computed_in_chunks() -> None:
    loop = Loop.build(make_cache(64), max_num_batched_tokens=8, long_prefill_token_threshold=4)
    loop.add(one_token("first", tokens(1, 33)))
    loop.step()
    loop.add(one_token("second", [*tokens(1, 32), 48]), one_token("other", tokens(5, 3)))
    loop.run()
    loop.assert_truth()
    assert loop.device.computed == 33 + 1 + 3
    ran = [item.sequence.request_id for plan in loop.plans for item in plan.scheduled]
    assert ran.index("other") < ran.index("second"), "who waits for a block holds nobody up"
    cached = {e.request_id: e.num_cached_tokens for e in loop.events}
    assert cached == {"first": 0, "second": 32, "other": 0}


def test_the_next_turn_of_a_chat_hits_the_generated_tokens() -> None:
    loop = Loop.build(make_cache(64))
    first = make_sequence(
        "turn 1", tokens(1, 10), 11, params=SamplingParams(max_tokens=11, ignore_eos=True)
    )
    loop.add(first)
    loop.run()
    second = make_sequence("turn 2", [*first.token_ids, 3, 4, 5], 1)
    loop.add(second)
    loop.run()
    loop.assert_truth()
    assert second.num_cached_tokens == 20, (
        "21 tokens of the first turn, the last of them never computed: 5 blocks"
    )


def test_a_one_token_job_fills_the_cache() -> None:
    loop = Loop.build(make_cache(64))
    loop.add(one_token("a", tokens(1, 20)))
    loop.run()
    loop.add(one_token("b", [*tokens(1, 20), 1]))
    loop.run()
    assert loop.events[-1].num_cached_tokens == 20


def test_the_last_block_of_a_cached_prompt_is_computed_again() -> None:
    loop = Loop.build(make_cache(64))
    for length in (7, 7, 8, 8, 4):
        loop.add(one_token(f"r{len(loop.events)}", tokens(1, length)))
        loop.run()
    assert [event.num_cached_tokens for event in loop.events] == [0, 4, 4, 4, 0]
    loop.assert_truth()


def test_tenants_do_not_share_blocks() -> None:
    loop = Loop.build(make_cache(64))
    for salt in ("one", "two", "one"):
        loop.add(one_token(f"r{len(loop.events)}", tokens(1, 17), cache_salt=salt))
        loop.run()
    assert [event.num_cached_tokens for event in loop.events] == [0, 0, 16]


def test_blocks_of_a_failed_step_are_not_cached() -> None:
    """The prefix is registered before it is computed; if that fails, no sequence may use it."""
    loop = Loop.build(make_cache(64))

    def failing_runs(plan: StepPlan) -> bool:
        return any(item.sequence.request_id == "guilty" for item in plan.scheduled)

    loop.device.fails = failing_runs
    loop.add(one_token("guilty", tokens(1, 17)), one_token("innocent", [*tokens(1, 16), 9]))
    loop.run()
    loop.assert_truth()
    ends = {event.request_id: (event.error, event.num_cached_tokens) for event in loop.events}
    assert ends == {
        "guilty": ("the model failed on this request: RuntimeError: the launch failed", 0),
        "innocent": (None, 0),
    }


def test_after_a_reset_of_the_prefix_cache_no_block_is_hit() -> None:
    loop = Loop.build(make_cache(64))
    for name in "ab":
        loop.add(one_token(name, tokens(1, 17)))
        loop.run()
        loop.scheduler.reset_prefix_cache()
    assert [event.num_cached_tokens for event in loop.events] == [0, 0]


def test_with_the_prefix_cache_off_nothing_is_looked_up() -> None:
    """Nothing is looked up, and no look-up is counted."""
    loop = Loop.build(make_cache(64, prefix_cache=False))
    loop.add(one_token("a", tokens(1, 17)), one_token("b", tokens(1, 17)))
    loop.run()
    assert loop.device.computed == 34
    stats = loop.scheduler.snapshot()
    assert (stats.prefix_queries, stats.cached_tokens) == (0, 0)


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
def test_choices_share_their_prompts_full_blocks(windows: tuple[int | None, ...]) -> None:
    """Two blocks of 4 are shared of 10 tokens; each choice computes the other 2."""
    loop = Loop.build(make_cache(64, windows=windows))
    loop.add(
        *[make_sequence("r", tokens(1, 10), 6, choice=choice, seed=choice) for choice in range(4)]
    )
    loop.step()
    assert loop.device.computed == 10
    loop.step()
    assert loop.device.computed == 10 + 1 + 3 * 2
    tables = [s.block_tables[-1] for s in loop.scheduler.sequences("r")]
    assert len({table[1] for table in tables}) == 1
    assert len({table[2] for table in tables}) == len(tables)
    loop.run()
    loop.assert_truth()


def test_without_the_prefix_cache_every_choice_computes_the_prompt() -> None:
    loop = Loop.build(make_cache(64, prefix_cache=False))
    loop.add(
        *[make_sequence("r", tokens(1, 10), 6, choice=choice, seed=choice) for choice in range(4)]
    )
    loop.step()
    assert loop.device.computed == 4 * 10
    loop.run()
    loop.assert_truth()


def test_a_batch_is_ordered_for_hits() -> None:
    """Requests with a common beginning run side by side, the longest first.

    Unrelated ones keep their order.
    """
    loop = Loop.build(make_cache(64), max_num_seqs=1)
    a, b = tokens(1, 12), tokens(2, 12)
    loop.add(
        one_token("a short", a[:6]), one_token("b", b),
        one_token("a long", a), one_token("b too", b),
        one_token("c", tokens(3, 5)),
    )  # fmt: skip
    loop.run()
    assert [event.request_id for event in loop.events] == ["a long", "a short", "b", "b too", "c"]
