"""Plans a step: the sequence that starved in the last one, then all others in the policy's order.

The cost of a plan grows with the batch, not with the backlog: only a bounded number of waiting
sequences is examined.
"""

from __future__ import annotations

from collections.abc import Collection

from tokenmill_worker.engines.own.plan import StepPlan
from tokenmill_worker.engines.own.scheduler.admission import SequenceAdmission
from tokenmill_worker.engines.own.scheduler.policies import PolicyOrder
from tokenmill_worker.engines.own.scheduler.state import DECODING, PREFILLING, SchedulerState
from tokenmill_worker.engines.own.scheduler.step_builder import Proposer, StepBuilder, StepDraft
from tokenmill_worker.engines.own.scheduler.step_time import MIN_TOKENS, StepTimeModel
from tokenmill_worker.engines.own.sequence import Sequence


class Planner:
    """Plans steps under one policy."""

    def __init__(
        self,
        state: SchedulerState,
        proposer: Proposer | None,
        ageing_s: float,
        step_times: StepTimeModel,
    ) -> None:
        self._state = state
        self._builder = StepBuilder(state, proposer, step_times)
        self._admission = SequenceAdmission(state, self._builder)
        self._order = PolicyOrder(state, self._builder, self._admission, ageing_s, step_times)

    def plan(self, only: Collection[Sequence] | None = None) -> StepPlan:
        """Plan the next step.

        With `only`, the step holds these sequences alone, and waiting ones among them are admitted.
        """
        state, config = self._state, self._state.config
        state.count_in_flight()
        step = StepDraft(state.next_step, config.max_num_batched_tokens, config.max_read_tokens)
        state.kv.oldest_step = next(iter(state.in_flight), step.step_id)
        if only is None:
            self._run_starved_first(step)
            self._order.fill(step)
        else:
            step.only = frozenset(only)
            self._fill_only(step, only)
        copies = state.kv.tier.take_copies()
        plan = StepPlan(
            step.step_id, tuple(step.items), tuple(copies.swap_out), tuple(copies.swap_in)
        )
        if not plan.is_empty:
            state.launch(plan, copies)
        return plan

    def _run_starved_first(self, step: StepDraft) -> None:
        """Schedule first the sequence that the read budget rejected in the previous step.

        Behind shorter sequences it would find too few reads in every step. A limited bulk sequence
        gets MIN_TOKENS, which bulk work may use in any step.
        """
        sequence = self._builder.take_starved()
        if sequence is None or sequence.status not in (PREFILLING, DECODING):
            return
        step.starved = sequence
        if self._builder.is_limited_bulk(sequence):
            step.reserve = max(0, step.tokens - MIN_TOKENS)
        self._builder.schedule(step, sequence)
        step.reserve = 0

    def _fill_only(self, step: StepDraft, only: Collection[Sequence]) -> None:
        waiting = [
            s for s in only if s in self._state.entries and s.status not in (DECODING, PREFILLING)
        ]
        self._builder.schedule_decodes(step, [s for s in only if s.status is DECODING])
        self._builder.schedule_prefills(step, [s for s in only if s.status is PREFILLING])
        for sequence in waiting:
            self._admission.admit_one(step, sequence)
