"""Plans a step: the sequence that starved in the last one, then all others in the policy's order:
decodes, running prefills, admissions.

The cost of a plan grows with the batch, not with the backlog: only a bounded number of waiting
sequences is examined.
"""

from __future__ import annotations

from collections.abc import Collection

from tokenmill_worker.engines.own.plan import StepPlan
from tokenmill_worker.engines.own.scheduler.admission import SequenceAdmission
from tokenmill_worker.engines.own.scheduler.state import DECODING, PREFILLING, SchedulerState
from tokenmill_worker.engines.own.scheduler.step_builder import Proposer, StepBuilder, StepDraft
from tokenmill_worker.engines.own.scheduler.step_time import MIN_TOKENS, StepTimeModel
from tokenmill_worker.engines.own.sequence import BULK, Sequence
from tokenmill_worker.engines.own.types import SchedulingPolicy

_MAX_STEPS_WITHOUT_PREFILL = 8  # after so many, bulk decodes leave tokens to bulk prefills


class PolicyOrder:
    """Schedules the sequences of a step in the order of a policy."""

    def __init__(
        self,
        state: SchedulerState,
        builder: StepBuilder,
        admission: SequenceAdmission,
        ageing_s: float,
        step_times: StepTimeModel,
    ) -> None:
        self._state = state
        self._builder = builder
        self._admission = admission
        self._ageing_s = ageing_s
        self._step_times = step_times

    def fill(self, step: StepDraft) -> None:
        """Schedule a step's sequences in the order of the configured policy."""
        match self._state.config.policy:
            case SchedulingPolicy.FIFO:
                self._decodes_first(step)
            case SchedulingPolicy.PREFILL_FIRST:
                self._prefills_first(step)
            case SchedulingPolicy.PRIORITY:
                self._by_class(step)

    def _decodes_first(self, step: StepDraft) -> None:
        self._builder.schedule_decodes(step, list(self._state.decoding))
        self._running_prefills(step, list(self._state.prefilling))
        self._admission.admit(step)

    def _prefills_first(self, step: StepDraft) -> None:
        decoding = list(self._state.decoding)  # without the prefills that this step completes
        self._running_prefills(step, list(self._state.prefilling))
        self._builder.schedule_decodes(step, decoding)
        self._admission.admit(step)

    def _by_class(self, step: StepDraft) -> None:
        """Schedule decodes, then prefills by class.

        A waiting sequence precedes a running one of a worse class. Where `StepTimeModel` limits
        bulk work, all of it is scheduled after the other sequences, in the room that is left. Bulk
        decodes leave a part of that room to bulk prefills if none of these ran for many steps.
        """
        state, now = self._state, self._state.clock()
        state.queue.refresh(now)
        decodes, prefills, admitted_below = list(state.decoding), self._ranked(now), 0
        if self._step_times.limits_bulk:
            bulk = [sequence for sequence in decodes if sequence.priority >= BULK]
            bulk_prefills = [entry for entry in prefills if entry[1].priority >= BULK]
            step.reserve = min(
                MIN_TOKENS if bulk_prefills else len(bulk), MIN_TOKENS, step.tokens // 8
            )
            self._builder.schedule_decodes(
                step, [sequence for sequence in decodes if sequence.priority < BULK]
            )
            self._prefills_by_class(step, [entry for entry in prefills if entry[1].priority < BULK])
            if state.queue.num_below(BULK):
                self._admission.admit(step, max_rank=BULK - 1)
            decodes, prefills, admitted_below = bulk, bulk_prefills, BULK
        reserved = self._bulk_reserve(step, now)
        step.reserve = reserved + self._prefill_reserve(
            step.tokens - reserved, step.step_id, prefills
        )
        self._builder.schedule_decodes(step, decodes)
        step.reserve = reserved
        self._prefills_by_class(step, prefills, admitted_below)
        self._admission.admit(step)

    def _ranked(self, now: float) -> list[tuple[int, Sequence]]:
        """Return the running prefills with their classes after ageing, the most urgent first."""
        ranked = []
        for sequence in self._state.prefilling:
            entry = self._state.entries[sequence]
            ranked.append(
                (max(0, entry.rank - int((now - entry.since) / self._ageing_s)), sequence)
            )
        ranked.sort(key=lambda entry: entry[0])
        return ranked

    def _prefill_reserve(
        self, room: int, step_id: int, prefills: list[tuple[int, Sequence]]
    ) -> int:
        """Return the tokens that bulk decodes leave to bulk prefills that did not run for long."""
        newest = max((sequence.last_step for _, sequence in prefills), default=step_id)
        is_due = self._step_times.limits_bulk and step_id - newest > _MAX_STEPS_WITHOUT_PREFILL
        return min(MIN_TOKENS, room // 2) if is_due else 0

    def _bulk_reserve(self, step: StepDraft, now: float) -> int:
        """Return the tokens of the budget that bulk work must not use in this step."""
        others = sum(item.num_tokens for item in step.items if item.sequence.priority < BULK)
        room = self._step_times.bulk_token_budget(now, others)
        return 0 if room is None else max(0, step.tokens - room)

    def _prefills_by_class(
        self, step: StepDraft, ranked: list[tuple[int, Sequence]], admitted_below: int = 0
    ) -> None:
        """Schedule running prefills by rank.

        Before each rank, admit waiting sequences of better ranks. Those of ranks below
        `admitted_below` were already tried in this step.
        """
        for rank, sequence in ranked:
            if rank > admitted_below:
                self._admission.admit(step, max_rank=rank - 1)
                admitted_below = rank
            self._running_prefills(step, [sequence], max_rank=rank)

    def _running_prefills(
        self, step: StepDraft, prefills: list[Sequence], max_rank: int | None = None
    ) -> None:
        """Schedule chunks of running prefills; reserve room for short prompts that wait."""
        for_short = self._admission.short_waiting(step, max_rank) if prefills else 0
        step.reserve += for_short
        self._builder.schedule_prefills(step, prefills)
        step.reserve -= for_short


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
        state.kv.tier.plan_saves(state.kv.pool)
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
