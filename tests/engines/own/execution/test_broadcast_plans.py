"""Other ranks build rank 0's steps from its plans, whose size does not grow with the context."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch")

from tests.engines.own.scheduler.loop import Loop, make_cache, make_sequence
from tests.engines.own.scheduler.test_random_schedules import oracle_proposer
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.execution.tensor_parallel import (
    BroadcastStep,
    PlanEncoder,
    rebuild,
)
from tokenmill_worker.engines.own.plan import StepPlan
from tokenmill_worker.engines.own.sequence import Sequence


def round_trip(
    plans: PlanEncoder, plan: StepPlan, others: dict[int, Sequence]
) -> tuple[StepPlan, int]:
    """Return the plan as another rank decodes it, and its number of bytes."""
    message = msgspec.msgpack.encode(plans.describe(plan))
    return rebuild(msgspec.msgpack.decode(message, type=BroadcastStep), others), len(message)


@pytest.mark.parametrize("windows", [(None,), (None, 7)])
@pytest.mark.parametrize("num_host_blocks", [0, 20])
def test_other_ranks_have_every_token_and_block_that_a_step_reads(
    windows: tuple[int | None, ...], num_host_blocks: int
) -> None:
    cache = make_cache(12, windows=windows, num_host_blocks=num_host_blocks)
    loop = Loop.build(cache, max_num_batched_tokens=16, max_num_seqs=4, proposer=oracle_proposer)
    plans, others = PlanEncoder(), dict[int, Sequence]()
    kv, shared = loop.scheduler.kv, list(range(1, 10))

    def differs(plan: StepPlan) -> bool:
        theirs, _ = round_trip(plans, plan, others)
        assert (theirs.swap_out, theirs.swap_in) == (plan.swap_out, plan.swap_in)
        for mine, item in zip(plan.scheduled, theirs.scheduled, strict=True):
            assert (item.start, item.num_tokens, item.samples) == (
                mine.start,
                mine.num_tokens,
                mine.samples,
            )
            known = mine.start + mine.num_tokens - mine.num_proposed
            tokens = [*mine.sequence.token_ids[mine.start : known], *mine.forced_ids]
            assert item.sequence.token_ids[mine.start :] == tokens
            assert item.draft_ids == mine.draft_ids
            for group, table in enumerate(mine.sequence.block_tables):
                first = kv.first_visible(group, mine.start)
                assert item.sequence.block_tables[group][first:] == table[first:]
        return False

    loop.device.fails = differs
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for number in range(12):
        loop.add(make_sequence(f"r{number}", [*shared, number + 10], 20, params=params))
    while loop.scheduler.has_work:
        loop.step()
        for key in plans.forget(loop.runner.take_released()):
            del others[key]
    assert loop.scheduler.stats.preemptions
    assert any(item.forced_ids for plan in loop.plans for item in plan.scheduled)
    assert not others


def test_an_encoded_decode_has_the_same_size_after_a_long_prompt() -> None:
    sizes = []
    for length in (8, 200):
        loop, plans, others = Loop.build(make_cache(100)), PlanEncoder(), dict[int, Sequence]()
        loop.add(make_sequence("a", [index % 40 + 1 for index in range(length)], 4))
        for _ in range(2):
            loop.step()
        sizes += [round_trip(plans, plan, others)[1] for plan in loop.plans[:2]][1:]
    assert sizes[1] <= sizes[0] + 8
