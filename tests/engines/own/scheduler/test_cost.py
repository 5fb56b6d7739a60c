"""Tests that a step's cost, in Python calls, grows with the batch and not with the backlog."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from tests.engines.own.scheduler.integrity import check_integrity
from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tokenmill_schemas.generation import FinishReason


def calls_of_a_step(loop: Loop) -> int:
    """Count the Python and C calls of one plan and commit."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(trace)
    try:
        plan = loop.scheduler.plan()
    finally:
        sys.setprofile(None)
    output = loop.device.execute(plan)
    sys.setprofile(trace)
    try:
        loop.scheduler.commit(plan, output)
    finally:
        sys.setprofile(None)
    return count


def filled(policy: str, waiting: int, running: int = 8, blocked_by: str = "rows") -> Loop:
    """Make a loop of `running` decodes, and of `waiting` that lack rows or blocks to start."""
    num_blocks = 1 + running * 12 if blocked_by == "rows" else 1 + running * 3
    rows = running if blocked_by == "rows" else 1000
    loop = Loop.build(
        make_cache(num_blocks),
        policy=policy,
        max_num_seqs=rows,
        max_num_batched_tokens=4096,
    )
    loop.scheduler.add(
        [make_sequence(f"r{i}", [i % 48 + 1, 2, 3, 4, 5], 40) for i in range(running)]
    )
    for _ in range(3):
        calls_of_a_step(loop)
    backlog = [
        make_sequence(
            f"w{i}",
            [i % 47 + 1, i % 5 + 1, 9, i % 3 + 1] * 12,
            1,
            tenant=f"t{i % 50}",
            deadline=9e9,
            priority=i % 2,
        )
        for i in range(waiting)
    ]
    loop.scheduler.add(backlog)
    calls_of_a_step(loop)
    return loop


@pytest.mark.parametrize("blocked_by", ["rows", "blocks"])
@pytest.mark.parametrize("policy", ["fifo", "prefill_first", "priority"])
def test_a_step_s_cost_does_not_grow_with_the_backlog(policy: str, blocked_by: str) -> None:
    few, many = (
        calls_of_a_step(filled(policy, waiting, blocked_by=blocked_by)) for waiting in (40, 4_000)
    )
    assert many <= few + 20


def test_a_step_s_cost_grows_at_most_in_proportion_to_the_batch() -> None:
    small, large = (calls_of_a_step(filled("fifo", 10, running)) for running in (16, 128))
    assert large <= 8 * small


def test_ending_a_large_backlog_is_not_quadratic() -> None:
    loop = filled("priority", 20_000)
    for index in range(19_990):
        loop.scheduler.cancel(f"w{index}", FinishReason.CANCELLED)
    assert loop.scheduler.capacity().waiting == 10
    check_integrity(loop.scheduler)
