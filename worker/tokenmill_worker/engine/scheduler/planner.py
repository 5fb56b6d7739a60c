"""Builds a step's plan: decodes, running prefills and admissions in the policy's order, within the
budgets.

One counter per sequence, `num_computed_tokens`, follows the tokens it holds, so a decode, a prefill
chunk and a resumed answer are handled alike. Counters advance when a step is planned; commit or
abandon corrects them. The cost of a plan grows with the batch, not with the backlog: only a bounded
number of waiting sequences is examined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from tokenmill_worker.engine.plan import ScheduledSequence, StepPlan
from tokenmill_worker.engine.scheduler.admission import Admission
from tokenmill_worker.engine.scheduler.preemption import victims_first
from tokenmill_worker.engine.scheduler.state import DECODING, PREFILLING, State
from tokenmill_worker.engine.scheduler.step_builder import Step
from tokenmill_worker.engine.scheduler.step_time import BULK, MIN_TOKENS, Pace
from tokenmill_worker.engine.sequence import Sequence
from tokenmill_worker.engine.types import SchedulingPolicy

_PATIENCE = 8  # steps that bulk prefills may get nothing beside bulk decodes
Proposer = Callable[[Sequence], tuple[int, ...]]


class Planner:
    """Plans steps under one policy.

    `proposer` returns draft tokens. It is not used when steps are launched before the last one's
    results.
    """

    def __init__(
        self, state: State, proposer: Proposer | None, ageing_s: float, pace: Pace
    ) -> None:
        self._state = state
        self._pace = pace
        self._config = state.config
        self._proposer = proposer if state.async_depth == 0 else None
        self._ageing_s = ageing_s
        self._admission = Admission(state, self)
        self._stood_back: Sequence | None = None
        phases = {
            SchedulingPolicy.FIFO: self._decodes_first,
            SchedulingPolicy.PREFILL_FIRST: self._prefills_first,
            SchedulingPolicy.PRIORITY: self._by_class,
        }
        self._fill = phases[self._config.policy]
        windows = state.kv.windows
        self._widest = (
            None if None in windows else max(window for window in windows if window is not None)
        )
        self.threshold = self._config.long_prefill_token_threshold
        if not self.threshold and self._config.max_num_partial_prefills > 1:
            self.threshold = max(1, int(state.max_model_len * 0.04))

    def plan(self, only: Collection[Sequence] | None = None) -> StepPlan:
        """Plan the next step.

        With `only`, the step holds these sequences alone, and waiting ones among them are admitted.
        """
        state = self._state
        state.count_in_flight()
        budget, reads = self._config.max_num_batched_tokens, self._config.max_read_tokens
        step = Step(state.next_step, budget, reads)
        state.kv.oldest_step = next(iter(state.in_flight), step.step_id)
        if only is None:
            self._favour(step)
            self._fill(step)
        else:
            step.only = frozenset(only)
            self._fill_only(step, only)
        moves = state.kv.tier.take_moves()
        plan = StepPlan(
            step.step_id, tuple(step.items), tuple(moves.swap_out), tuple(moves.swap_in)
        )
        if not plan.is_empty:
            state.launch(plan, moves)
        return plan

    def _favour(self, step: Step) -> None:
        """Schedule first the sequence that the read budget rejected in the previous step.

        Behind shorter sequences it would find too few reads in every step. A bulk sequence gets
        MIN_TOKENS, its share of any step.
        """
        sequence, self._stood_back = self._stood_back, None
        if sequence is None or sequence.status not in (PREFILLING, DECODING):
            return
        step.favoured = sequence
        step.reserve = max(0, step.tokens - MIN_TOKENS) if self._is_held_back(sequence) else 0
        self.schedule(step, sequence)
        step.reserve = 0

    def _stand_back(self, step: Step, sequence: Sequence) -> None:
        """Remember a sequence without reads as the one to favour in the next step.

        Among several it is the one that ran longest ago. A step that favours a sequence remembers
        none. Decodes take turns anyway; only bulk decodes, which are scheduled after all others,
        are remembered.
        """
        if step.favoured is not None or not (
            sequence.status is PREFILLING or self._is_held_back(sequence)
        ):
            return
        first = self._stood_back
        if first is None or sequence.last_step < first.last_step:
            self._stood_back = sequence

    def _is_held_back(self, sequence: Sequence) -> bool:
        return self._pace.is_kept and sequence.priority >= BULK

    # ── the policies' orders ──

    def _decodes_first(self, step: Step) -> None:
        self._decodes(step, list(self._state.decoding))
        self._running_prefills(step, list(self._state.prefilling))
        self._admission.admit(step)

    def _prefills_first(self, step: Step) -> None:
        decoding = list(self._state.decoding)  # without the prefills that this step completes
        self._running_prefills(step, list(self._state.prefilling))
        self._decodes(step, decoding)
        self._admission.admit(step)

    def _by_class(self, step: Step) -> None:
        """Schedule decodes, then prefills by class; a waiting sequence precedes a running one of a
        worse class.

        Where `Pace` limits bulk work, all of it is scheduled after the other sequences, in the room
        that is left. Bulk decodes leave a part of that room to bulk prefills if none of these has
        run for long.
        """
        state, now = self._state, self._state.clock()
        state.queue.refresh(now)
        decodes, prefills, admitted_below = list(state.decoding), self._ranked(now), 0
        if self._pace.is_kept:
            bulk = [sequence for sequence in decodes if sequence.priority >= BULK]
            bulk_prefills = [entry for entry in prefills if entry[1].priority >= BULK]
            step.reserve = min(
                MIN_TOKENS if bulk_prefills else len(bulk), MIN_TOKENS, step.tokens // 8
            )
            self._decodes(step, [sequence for sequence in decodes if sequence.priority < BULK])
            self._prefills_by_class(step, [entry for entry in prefills if entry[1].priority < BULK])
            if state.queue.num_below(BULK):
                self._admission.admit(step, max_rank=BULK - 1)
            decodes, prefills, admitted_below = bulk, bulk_prefills, BULK
        held_back = self._held_back(step, now)
        step.reserve = held_back + self._owed(step.tokens - held_back, step.step_id, prefills)
        self._decodes(step, decodes)
        step.reserve = held_back
        self._prefills_by_class(step, prefills, admitted_below)
        self._admission.admit(step)

    def _ranked(self, now: float) -> list[tuple[int, Sequence]]:
        """Return the running prefills with their classes after ageing, the most urgent first."""
        ranked = []
        for sequence in self._state.prefilling:
            place = self._state.places[sequence]
            ranked.append(
                (max(0, place.rank - int((now - place.since) / self._ageing_s)), sequence)
            )
        ranked.sort(key=lambda entry: entry[0])
        return ranked

    def _owed(self, room: int, step_id: int, prefills: list[tuple[int, Sequence]]) -> int:
        """Return the tokens that bulk decodes leave to bulk prefills, if none of these has run for long."""
        newest = max((sequence.last_step for _, sequence in prefills), default=step_id)
        is_owed = self._pace.is_kept and step_id - newest > _PATIENCE
        return min(MIN_TOKENS, room // 2) if is_owed else 0

    def _held_back(self, step: Step, now: float) -> int:
        """Return the tokens of the budget that bulk work must not use in this step."""
        others = sum(item.num_tokens for item in step.items if item.sequence.priority < BULK)
        room = self._pace.room_at(now, others)
        return 0 if room is None else max(0, step.tokens - room)

    def _prefills_by_class(
        self, step: Step, ranked: list[tuple[int, Sequence]], admitted_below: int = 0
    ) -> None:
        """Schedule running prefills by rank; before each rank, admit waiting sequences of better ranks.

        Waiting sequences of ranks below `admitted_below` were already tried in this step.
        """
        for rank, sequence in ranked:
            if rank > admitted_below:
                self._admission.admit(step, max_rank=rank - 1)
                admitted_below = rank
            self._running_prefills(step, [sequence], max_rank=rank)

    def _fill_only(self, step: Step, only: Collection[Sequence]) -> None:
        waiting = [
            s for s in only if s in self._state.places and s.status not in (DECODING, PREFILLING)
        ]
        self._decodes(step, [s for s in only if s.status is DECODING])
        self._prefills(step, [s for s in only if s.status is PREFILLING])
        for sequence in waiting:
            self._admission.admit_one(step, sequence)

    # ── running sequences ──

    def _decodes(self, step: Step, decodes: list[Sequence]) -> None:
        """Schedule one token per sequence, and its drafts.

        The first sequence that finds no budget left is scheduled first in the next step.
        """
        fast = self._proposer is None and step.reads is None
        left, step_id, append = step.room, step.step_id, step.items.append
        starved: Sequence | None = None
        for index, sequence in enumerate(decodes):
            if left <= 0:
                starved = starved or sequence
                break
            start = sequence.num_computed_tokens
            known = len(sequence.token_ids)
            if sequence.num_inflight:
                known += sequence.num_inflight
                if known - sequence.num_prompt_tokens >= sequence.max_tokens:
                    continue  # a step in flight samples its last token
            if (
                fast
                and known - start == 1
                and known <= sequence.num_slots
                and not step.has_preempted
            ):
                append(ScheduledSequence(sequence, start, 1, True, (), sequence.epoch))
                sequence.num_computed_tokens = known
                sequence.last_step = step_id
                left -= 1
            elif sequence.status is DECODING and sequence is not step.favoured:
                step.tokens = left + step.reserve
                if (
                    not self.schedule(step, sequence, num_after=len(decodes) - index - 1)
                    and step.reads is not None
                ):
                    starved = starved or sequence
                left = step.room
        step.tokens = left + step.reserve
        if starved is not None:
            self._rotate(starved)

    def _rotate(self, first: Sequence) -> None:
        decoding = self._state.decoding
        if first in decoding:
            index = decoding.index(first)
            decoding[:] = decoding[index:] + decoding[:index]

    def _running_prefills(
        self, step: Step, prefills: list[Sequence], max_rank: int | None = None
    ) -> None:
        """Schedule chunks of running prefills; reserve room for short prompts that wait behind them."""
        for_short = self._admission.short_waiting(step, max_rank) if prefills else 0
        step.reserve += for_short
        self._prefills(step, prefills)
        step.reserve -= for_short

    def _prefills(self, step: Step, prefills: list[Sequence]) -> None:
        for sequence in prefills:
            if step.room <= 0:
                return
            if sequence.status is PREFILLING and sequence is not step.favoured:
                self.schedule(step, sequence)

    def chunk_limit(self, sequence: Sequence, start: int) -> int:
        """Return how many tokens of the sequence one step may prefill.

        The long-prefill threshold applies only if other sequences run or wait.
        """
        state = self._state
        others = state.num_running + len(state.queue) - (sequence.status is PREFILLING)
        if self.threshold and others > 0:
            return self.threshold
        return sequence.num_tokens + sequence.num_inflight - start

    def read_cost(self, end: int) -> int:
        return end if self._widest is None else min(end, self._widest)

    def schedule(
        self, step: Step, sequence: Sequence, num_after: int = 0, may_preempt: bool = True
    ) -> bool:
        """Schedule as many tokens of a running sequence as the budgets allow.

        Drafts leave one token for each of `num_after` other sequences. Return False if the sequence
        cannot run in this step.
        """
        start = sequence.num_computed_tokens
        known = len(sequence.token_ids) + sequence.num_inflight
        if sequence.num_inflight and known - sequence.num_prompt_tokens >= sequence.max_tokens:
            return False
        end = min(known, start + step.room)
        if sequence.status is PREFILLING:
            end = min(end, start + self.chunk_limit(sequence, start))
        if end <= start:
            return False
        if step.reads is not None and step.items and self.read_cost(end) > step.reads:
            self._stand_back(step, sequence)
            return False
        if end > sequence.num_slots:
            reach = self._state.kv.reach(sequence)
            if start < reach < end:
                end = reach
            if not self._make_room(step, sequence, end, may_preempt):
                return False
        samples = end == known
        drafts = self._drafts(step, sequence, num_after) if samples and end - start == 1 else ()
        step.add(sequence, end, samples, drafts)
        if step.reads is not None:
            step.reads -= self.read_cost(end)
        if samples and sequence.status is PREFILLING:
            self._state.begin_decoding(sequence)
        return True

    def _drafts(self, step: Step, sequence: Sequence, num_after: int) -> tuple[int, ...]:
        """Return proposed tokens, limited by budget, answer length and free blocks."""
        if (
            self._proposer is None
            or not sequence.params.speculate
            or sequence.status is not DECODING
        ):
            return ()
        known = sequence.num_tokens
        room = min(step.room - 1 - num_after, sequence.max_tokens - sequence.num_output_tokens - 1)
        if step.reads is not None:
            room = min(room, step.reads - self.read_cost(known))
        if room <= 0:
            return ()
        drafts = self._proposer(sequence)[:room]
        if drafts and known + len(drafts) > sequence.num_slots:
            self._state.kv.grow(sequence, known + len(drafts))
            drafts = drafts[: max(0, sequence.num_slots - known)]
        return drafts

    # ── blocks ──

    def _make_room(self, step: Step, sequence: Sequence, end: int, may_preempt: bool) -> bool:
        """Allocate blocks up to `end`, preempting sequences if necessary.

        Return False if the sequence cannot run in this step.
        """
        kv = self._state.kv
        while not kv.grow(sequence, end):
            if kv.has_deferred or not may_preempt:
                return False  # deferred blocks are released when the step in flight ends; preempt no more
            victims = self.victims(step)
            if not victims or victims == [sequence]:
                return False
            self.preempt(step, victims[0])
            if victims[0] is sequence:
                return False
        return True

    def victims(self, step: Step) -> list[Sequence]:
        """Return running sequences not admitted in this step; the first to be preempted comes first."""
        state = self._state
        running = [s for s in (*state.decoding, *state.prefilling) if s not in step.admitted]
        return victims_first(running, state.places, self._config.preempt)

    def preempt(self, step: Step, victim: Sequence) -> None:
        step.remove(victim)
        step.has_preempted = True
        self._state.preempt(victim)
