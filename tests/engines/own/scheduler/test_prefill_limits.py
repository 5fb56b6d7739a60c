"""Limits on prefills hold in each step of random arrivals; each answer is the undisturbed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engines.own.scheduler.loop import MAX_MODEL_LEN, Loop, make_cache, make_sequence
from tests.engines.own.scheduler.test_limits import chunks, endless, prompt
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.config.prefill_limits import PrefillLimits
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sequence import Sequence

# (steps before it arrives, tokens of the prompt, tokens of the answer)
arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 6)), min_size=1, max_size=12
)
some_limit = st.sampled_from([None, 0, 1, 2, 3])


def run(
    loop: Loop, wanted: list[tuple[int, int, int]], check: Callable[[Loop], None]
) -> list[Sequence]:
    """Step through the arrivals until all have ended, and call `check` after each step."""
    sequences = []
    for index, (steps, length, max_tokens) in enumerate(wanted):
        sequences.append(endless(f"r{index}", index, length, max_tokens))
        loop.add(sequences[-1])
        for _ in range(steps):
            loop.step()
            check(loop)
    for _ in range(2_000):
        if not loop.scheduler.has_work and not loop.steps.has_in_flight:
            break
        loop.step()
        check(loop)
    loop.assert_truth()
    return sequences


def prefills(loop: Loop) -> list[ScheduledSequence]:
    """Return the items of the last step that compute more than a decode, or sample nothing."""
    items = loop.plans[-1].scheduled if loop.plans else ()
    return [item for item in items if item.num_tokens > 1 or not item.samples]


@settings(max_examples=150, deadline=None)
@given(
    wanted=arrivals,
    threshold=st.sampled_from([0, 5, 9]),
    partial=some_limit,
    long=some_limit,
    policy=st.sampled_from(["fifo", "prefill_first", "priority"]),
    is_async=st.booleans(),
)
@example(  # the first chunk of the last prompt has one token, as a decode has
    wanted=[(2, 50, 1), (3, 1, 1), (0, 9, 1), (0, 9, 1), (0, 10, 1)],
    threshold=9, partial=None, long=None, policy="fifo", is_async=False,
)  # fmt: skip
def test_random_schedules_break_no_prefill_limit(
    wanted: list[tuple[int, int, int]],
    threshold: int,
    partial: int | None,
    long: int | None,
    policy: str,
    is_async: bool,
) -> None:
    values: dict[str, Any] = {
        "long_prefill_token_threshold": threshold,
        "max_num_partial_prefills": partial,
        "max_long_partial_prefills": long,
    }
    try:
        config = EngineConfig(model="m", **values)
    except EngineConfigError:
        return
    limits = config.prefill_limits.for_length(MAX_MODEL_LEN)
    loop = Loop.build(
        make_cache(400), is_async=is_async, max_num_batched_tokens=24, policy=policy, **values
    )
    running: set[str] = set()

    def check(loop: Loop) -> None:
        assert not loop.plans or loop.plans[-1].num_tokens <= 24
        partly = {i.sequence: i for i in prefills(loop) if not i.samples}
        if limits.threshold:
            assert all(item.num_tokens <= limits.threshold for item in prefills(loop))
        if limits.partial:
            assert len(partly) <= limits.partial
        if limits.long and limits.threshold:
            long_ones = [s for s in partly if s.num_prompt_tokens > limits.threshold]
            assert len(long_ones) <= limits.long
        running.update(s.request_id for s in partly)

    sequences = run(loop, wanted, check)
    if limits.threshold:  # also where it was alone
        assert {
            s.request_id for s in sequences if s.num_prompt_tokens > limits.threshold
        } <= running


@settings(max_examples=150, deadline=None)
@given(
    wanted=arrivals,
    policy=st.sampled_from(["fifo", "prefill_first", "priority"]),
    num_blocks=st.sampled_from([24, 60, 400]),
    max_num_seqs=st.sampled_from([2, 16]),
    is_async=st.booleans(),
)
def test_without_chunks_a_prompt_is_taken_whole_or_waits(
    wanted: list[tuple[int, int, int]],
    policy: str,
    num_blocks: int,
    max_num_seqs: int,
    is_async: bool,
) -> None:
    loop = Loop.build(
        make_cache(num_blocks, prefix_cache=False), is_async=is_async, enable_chunked_prefill=False,
        max_num_batched_tokens=70, max_num_seqs=max_num_seqs, policy=policy, bulk_slowdown=None,
    )  # fmt: skip

    def check(loop: Loop) -> None:
        for item in loop.plans[-1].scheduled if loop.plans else ():
            assert item.samples, "a part of a prompt samples nothing"

    run(loop, wanted, check)
    assert len(loop.ends) == len(wanted)


def test_a_prompt_that_waits_for_room_is_bypassed_a_bounded_number_of_times() -> None:
    loop = Loop.build(
        make_cache(400), enable_chunked_prefill=False, max_num_batched_tokens=20, max_bypass=1
    )
    loop.add(endless("runner", 1, 3, 6))
    loop.step()
    loop.add(endless("long", 2, 20, 1))
    loop.add(*[endless(f"small {index}", 3 + index, 3, 3) for index in range(3)])
    loop.run()
    loop.assert_truth()
    order = [name for step in chunks(loop) for name, count in step.items() if count > 1]
    assert order == ["runner", "small 0", "long", "small 1", "small 2"]


def test_a_prompt_with_a_cached_beginning_needs_budget_for_its_rest_only() -> None:
    loop = Loop.build(make_cache(400), enable_chunked_prefill=False, max_num_batched_tokens=40)
    loop.add(make_sequence("first", prompt(1, 32), 1))
    loop.run()
    loop.add(
        make_sequence("second", [*prompt(1, 32), 5], 1), make_sequence("third", prompt(2, 36), 1)
    )
    loop.step()
    assert chunks(loop)[-1] == {"second": 1, "third": 36}


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ((0, None, None), (0, 0, 0)),
        ((6, None, None), (6, 0, 0)),
        ((6, 2, None), (6, 2, 1)),
        ((6, None, 1), (6, 1, 1)),
        ((6, 0, 0), (6, 0, 0)),
        ((0, 1, None), (0, 1, 1)),
        ((0, 3, None), (10, 3, 1)),
        ((0, 3, 2), (10, 3, 2)),
        ((6, None, 0), (6, 0, 0)),
    ],
)
def test_an_unset_prefill_limit_is_one_if_the_other_is_set(
    given: tuple[int, int | None, int | None], limits: tuple[int, int, int]
) -> None:
    found = PrefillLimits.of(True, *given).for_length(256)
    assert (found.threshold, found.partial, found.long) == limits


@pytest.mark.parametrize(
    "changes",
    [
        {"max_long_partial_prefills": 1},
        {"max_long_partial_prefills": 1, "max_num_partial_prefills": 1},
        {"max_long_partial_prefills": 2, "long_prefill_token_threshold": 50},
    ],
    ids=str,
)
def test_a_limit_on_long_prompts_that_contradicts_the_others_is_refused(
    changes: dict[str, Any],
) -> None:
    with pytest.raises(EngineConfigError, match="max_long_partial_prefills"):
        EngineConfig(model="m", **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_long_partial_prefills": 1, "long_prefill_token_threshold": 50},
        # the threshold follows the model's length
        {"max_long_partial_prefills": 1, "max_num_partial_prefills": 2},
    ],
    ids=str,
)
def test_a_limit_on_long_prompts_that_has_an_effect_is_accepted(changes: dict[str, Any]) -> None:
    assert EngineConfig(model="m", **changes)
