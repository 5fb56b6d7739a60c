"""Random schedules through the engine's own `StepExecutor`.

They mix adds, cancels, deadlines, tenants, adapters, choices, tiny pools, offload, windows of every
residue modulo the block size, drafts, and steps that fail at launch or at their end.

After every step the scheduler's bookkeeping agrees. Every slot that a sequence reads holds its own
tokens (the fake device checks). At the end each sequence has the tokens that it generates alone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.engines.own.scheduler.fake_device import expected_tokens
from tests.engines.own.scheduler.integrity import check_integrity, held_blocks
from tests.engines.own.scheduler.loop import MAX_MODEL_LEN, Loop, make_cache, make_sequence
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.requests import RequestError
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.plan import Draft, StepPlan
from tokenmill_worker.engines.own.sequence import Sequence

SHARED = tuple(random.Random(5).randrange(1, 50) for _ in range(40))


def oracle_proposer(sequence: Sequence) -> Draft:
    """Three right drafts, of which up to two are certain, then a wrong one; sometimes none."""
    if sequence.num_tokens % 5 == 0:
        return Draft()
    copy = make_sequence(
        "x", sequence.token_ids, 4, seed=sequence.seed, params=SamplingParams(ignore_eos=True)
    )
    drafts = (*expected_tokens(copy)[:3], 0 if sequence.num_tokens % 3 else 1)
    return Draft(drafts, num_certain=sequence.num_tokens % 4 % 3)


worlds = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(9, 40),
        "block_size": st.sampled_from([1, 2, 4]),
        "windows": st.one_of(
            st.just((None,)),
            st.lists(
                st.one_of(st.none(), st.builds(Window, st.integers(2, 9), st.booleans())),
                min_size=1,
                max_size=3,
            ).map(tuple),
        ),
        "kernel_blocks": st.sampled_from([(1, 1, 1), (1, 1, 1), (1, 3, 2), (2, 1, 5)]),
        "num_host_blocks": st.sampled_from([0, 0, 3, 12]),
        "prefix_cache": st.sampled_from([True, True, True, False]),
        "is_async": st.booleans(),
        "drafts": st.booleans(),
        "policy": st.sampled_from(["fifo", "prefill_first", "priority"]),
        "max_num_batched_tokens": st.sampled_from([1, 3, 8, 64]),
        "max_num_seqs": st.sampled_from([1, 2, 5, 16]),
        "max_read_tokens": st.sampled_from([None, None, 20]),
        "preempt": st.sampled_from(["least_wasted", "newest", "oldest"]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 3]),
        "max_num_partial_prefills": st.sampled_from([None, None, 0, 1, 2]),
        "max_long_partial_prefills": st.sampled_from([None, None, 0, 1]),
        "enable_chunked_prefill": st.sampled_from([True, True, True, False]),
        "safety_margin": st.sampled_from([0.0, 0.2]),
        "max_bypass": st.sampled_from([0, 1, 16]),
        "max_loras": st.sampled_from([1, 2]),
    }
)


class Schedules(RuleBasedStateMachine):
    """One random world. The device fails on steps with a marked request, and at random."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: Loop | None = None
        self.count = self.num_tokens = 0
        self.poison: set[str] = set()
        self.random_failures = 0

    @initialize(world=worlds)
    def build(self, world: dict[str, Any]) -> None:
        has_long = (
            world["long_prefill_token_threshold"] or (world["max_num_partial_prefills"] or 0) > 1
        )  # else no prompt counts as long
        if not has_long:
            world["max_long_partial_prefills"] = None
        if not world["enable_chunked_prefill"]:
            world |= {
                "long_prefill_token_threshold": 0, "max_num_partial_prefills": None,
                "max_long_partial_prefills": None, "max_num_batched_tokens": MAX_MODEL_LEN,
                "bulk_slowdown": None,
            }  # fmt: skip
        names = ("num_blocks", "block_size", "windows", "num_host_blocks", "prefix_cache")
        cache = make_cache(**{name: world.pop(name) for name in (*names, "kernel_blocks")})
        proposer = oracle_proposer if world.pop("drafts") else None
        self.loop = Loop.build(cache, proposer=proposer, ageing_s=5.0, **world)
        self.loop.device.fails = self.fails

    def fails(self, plan: StepPlan) -> bool:
        if self.random_failures and plan.scheduled:
            self.random_failures -= 1
            return len(plan.scheduled) > 1  # a lone sequence would be blamed
        return any(item.sequence.request_id in self.poison for item in plan.scheduled)

    @rule(
        shared=st.integers(0, len(SHARED)),
        own=st.lists(st.integers(1, 49), max_size=6),
        max_tokens=st.integers(1, 9),
        resumed=st.lists(st.integers(1, 49), max_size=3),
        choices=st.sampled_from([1, 1, 1, 3]),
        priority=st.integers(0, 2),
        deadline=st.sampled_from([None, None, None, 4.0]),
        is_poison=st.sampled_from([False] * 9 + [True]),
        burst=st.sampled_from([1, 1, 3]),
        adapter=st.sampled_from(["", "", "a", "b", "c"]),
        kind=st.sampled_from(["drawn", "drawn", "drawn", "prompt scored", "given"]),
    )
    def add(
        self, shared: int, own: list[int], max_tokens: int, resumed: list[int], choices: int,
        priority: int,
        deadline: float | None, is_poison: bool, burst: int, adapter: str, kind: str,
    ) -> None:  # fmt: skip
        assert self.loop is not None
        batch = []
        for _ in range(burst):
            name = f"r{self.count}"
            self.count += 1
            if is_poison:
                self.poison.add(name)
            until = None if deadline is None else self.loop.clock.now + deadline
            batch += [
                make_sequence(
                    name, [*SHARED[:shared], *own] or [7], max_tokens + len(resumed),
                    tuple(resumed), choice,
                    seed=self.count % 2 + choice, priority=priority, deadline=until,
                    tenant=f"t{self.count % 2}", cache_salt=f"t{self.count % 2}", adapter=adapter,
                )
                for choice in range(choices)
            ]  # fmt: skip
        for sequence in batch:
            # the resumed tokens are the answer, of which one was reported before
            if kind == "given":
                first = sequence.num_prompt_tokens + min(1, len(resumed))
                sequence.next_scored, sequence.scored_end = first, sequence.num_tokens
                sequence.max_tokens = len(resumed)
                sequence.num_resumed_tokens = min(1, len(resumed))
            elif kind == "prompt scored" and sequence.choice == 0:
                sequence.next_scored, sequence.scored_end = 1, sequence.num_prompt_tokens
        self.num_tokens += sum(sequence.num_tokens + max_tokens for sequence in batch)
        try:
            self.loop.add(*batch)
        except RequestError:
            assert not any(self.loop.scheduler.knows(s.request_id) for s in batch)

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        assert self.loop is not None
        for _ in range(steps):
            self.loop.clock.now += 0.5
            self.loop.step()

    @rule(index=st.integers(0, 50), choice=st.sampled_from([None, 0, 1]))
    def cancel(self, index: int, choice: int | None) -> None:
        assert self.loop is not None
        names = self.loop.scheduler.request_ids()
        if names:
            self.loop.cancel(names[index % len(names)], choice)

    @rule()
    def break_a_step(self) -> None:
        self.random_failures += 1

    @rule()
    def change_weights(self) -> None:
        assert self.loop is not None
        self.loop.scheduler.reset_prefix_cache()

    @precondition(lambda self: self.loop is not None)
    @invariant()
    def books_agree(self) -> None:
        assert self.loop is not None
        check_integrity(self.loop.scheduler)

    def teardown(self) -> None:
        if self.loop is None:
            return
        self.loop.run(2000 + 4 * self.num_tokens)  # as many where a step has room for one token
        self.loop.assert_truth()
        for name, choice in self.loop.truth:
            reason = self.loop.ends[name, choice]
            assert (reason is FinishReason.ERROR) <= (name in self.poison), (
                f"{name} is blamed and innocent"
            )
        free = self.loop.scheduler.snapshot()
        assert free.blocks_free == free.blocks_total
        assert free.num_running == free.num_waiting == free.num_offloaded == 0
        assert not held_blocks(self.loop.scheduler.kv.tier.pool)
        self.loop.runner.release(self.loop.scheduler.take_released())
        assert not self.loop.runner.known, "the runner keeps rows of sequences that have ended"


Schedules.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedules = Schedules.TestCase


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_random_schedules_give_the_true_tokens(soak_seconds: float) -> None:
    """The same machine, run for longer: some five schedules for each second asked for."""

    class Longer(Schedules):
        pass

    Longer.TestCase.settings = settings(
        max_examples=max(50, int(5 * soak_seconds)),
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    Longer.TestCase().runTest()
