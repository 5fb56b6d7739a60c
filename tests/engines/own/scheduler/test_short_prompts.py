"""Tests that a short prompt starts in the next step beside a long one that is being computed."""

from __future__ import annotations

import pytest

from tests.engines.own.scheduler.loop import Loop, make_sequence
from tests.engines.own.scheduler.test_limits import chunks, prompt

POLICIES = ["fifo", "prefill_first", "priority"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_prompt_starts_beside_a_long_ones_chunks(policy: str) -> None:
    loop = Loop.build(max_num_batched_tokens=20, policy=policy)
    loop.add(make_sequence("long", prompt(1, 70), 1))
    loop.step()
    loop.add(make_sequence("short", prompt(2, 5), 1))
    loop.step()
    assert chunks(loop) == [{"long": 20}, {"long": 15, "short": 5}]
    loop.run()
    loop.assert_truth()


def test_short_prompts_take_at_most_half_of_a_step_s_remaining_tokens() -> None:
    loop = Loop.build(max_num_batched_tokens=20)
    loop.add(make_sequence("long", prompt(1, 60), 1))
    loop.step()
    loop.add(*[make_sequence(f"short {index}", prompt(index + 2, 4), 1) for index in range(5)])
    loop.step()
    loop.step()
    assert chunks(loop)[1:] == [
        {"long": 12, "short 0": 4, "short 1": 4},
        {"long": 12, "short 2": 4, "short 3": 4},
    ]


def test_a_short_prompt_does_not_pass_a_waiting_long_prompt() -> None:
    loop = Loop.build(max_num_batched_tokens=20)
    loop.add(make_sequence("long", prompt(1, 60), 1))
    loop.step()
    loop.add(make_sequence("long too", prompt(3, 30), 1), make_sequence("short", prompt(2, 5), 1))
    loop.step()
    assert chunks(loop)[1] == {"long": 20}


def test_a_long_prompt_keeps_the_whole_step_if_no_row_is_free() -> None:
    loop = Loop.build(max_num_batched_tokens=20, max_num_seqs=1)
    loop.add(make_sequence("long", prompt(1, 60), 1))
    loop.step()
    loop.add(make_sequence("short", prompt(2, 5), 1))
    loop.step()
    assert chunks(loop)[1] == {"long": 20}


def test_a_short_bulk_prompt_takes_no_tokens_from_an_interactive_prompt() -> None:
    loop = Loop.build(max_num_batched_tokens=20, policy="priority")
    loop.add(make_sequence("long", prompt(1, 60), 1, priority=0))
    loop.step()
    loop.add(make_sequence("short", prompt(2, 5), 1, priority=2))
    loop.step()
    assert chunks(loop)[1] == {"long": 20}
