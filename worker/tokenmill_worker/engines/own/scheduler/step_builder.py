"""Builds a step: its remaining budgets, and the methods that schedule running sequences in it.

One counter per sequence, `num_computed_tokens`, follows the tokens it holds, so a decode, a prefill
chunk and a resumed answer are handled alike. Counters advance when a step is planned; commit or
abandon corrects them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from tokenmill_worker.engines.own.plan import MAX_DRAFTS, MAX_SCORED, Draft, ScheduledSequence
from tokenmill_worker.engines.own.scheduler.preemption import victims_first
from tokenmill_worker.engines.own.scheduler.state import DECODING, PREFILLING, SchedulerState
from tokenmill_worker.engines.own.scheduler.step_time import StepTimeModel
from tokenmill_worker.engines.own.sequence import BULK, Sequence

# Returns tokens that may follow those of the sequence that the host has.
Proposer = Callable[[Sequence], Draft]
# Fewest drafts of a sequence where steps are planned ahead. The length that they give it is unknown
# while the next step is planned, so it misses that step.
MIN_DRAFTS_AHEAD = 2

Proposed = tuple[tuple[int, ...], tuple[int, ...]]  # a scheduled sequence's forced_ids, draft_ids
_NOTHING: Final[Proposed] = ((), ())


@dataclass(slots=True)
class StepDraft:
    """A step being planned.

    `tokens` and `reads` are the remaining budgets; `reads` is None without a read budget. A
    planning phase may spend `room`: it sets `reserve` to the tokens that it leaves for later
    phases. `scores` are the given tokens whose log-probabilities it may still compute, `drafts` the
    draft tokens.
    """

    step_id: int
    tokens: int
    reads: int | None = None
    reserve: int = 0
    scores: int = MAX_SCORED
    drafts: int = MAX_DRAFTS
    items: list[ScheduledSequence] = field(default_factory=list)
    admitted: set[Sequence] = field(default_factory=set)
    has_preempted: bool = False
    starved: Sequence | None = None  # scheduled first: the previous step had no reads left for it
    only: frozenset[Sequence] | None = None

    @property
    def room(self) -> int:
        return self.tokens - self.reserve

    def add(
        self, sequence: Sequence, end: int, samples: bool, proposed: Proposed = _NOTHING
    ) -> None:
        """Schedule the sequence up to position `end`, then its drafts; advance its counter."""
        forced_ids, draft_ids = proposed
        start = sequence.num_computed_tokens
        num_tokens = end - start + len(forced_ids) + len(draft_ids)
        scored_from = max(start + 1, sequence.next_scored)
        num_scored = max(0, min(end + 1, sequence.scored_end) - scored_from)
        self.items.append(
            ScheduledSequence(
                sequence,
                start,
                num_tokens,
                samples,
                draft_ids=draft_ids,
                epoch=sequence.epoch,
                scored_from=scored_from,
                num_scored=num_scored,
                forced_ids=forced_ids,
            )
        )
        self.scores -= num_scored
        self.drafts -= len(draft_ids)
        sequence.num_computed_tokens = start + num_tokens
        sequence.last_step = self.step_id
        self.tokens -= num_tokens

    def scorable(self, sequence: Sequence, start: int) -> int:
        """Return how many tokens of the sequence from `start` on the step may compute for the
        log-probabilities that are wanted of them; 0: none.
        """
        first = max(start + 1, sequence.next_scored)
        if sequence.scored_end - first <= self.scores:
            return sequence.num_tokens - start
        return first + self.scores - 1 - start

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the step, because it is preempted after all.

        `SchedulerState.preempt` resets its counters.
        """
        for index, item in enumerate(self.items):
            if item.sequence is sequence:
                del self.items[index]
                self.tokens += item.num_tokens
                self.scores += item.num_scored
                self.drafts += len(item.draft_ids)
                return


class StepBuilder:
    """Schedules running sequences in a step, and preempts some of them where blocks run out.

    `proposer` returns draft tokens; with None there are none.
    """

    def __init__(
        self, state: SchedulerState, proposer: Proposer | None, step_times: StepTimeModel
    ) -> None:
        self._state = state
        self._config = state.config
        self._proposer = proposer
        self._step_times = step_times
        self._starved: Sequence | None = None
        windows = state.kv.windows
        self._widest = (
            None
            if None in windows
            else max(window.size for window in windows if window is not None)
        )
        self.limits = self._config.prefill_limits.for_length(state.max_model_len)

    def is_limited_bulk(self, sequence: Sequence) -> bool:
        """Return whether the sequence is bulk work whose tokens per step are limited."""
        return self._step_times.limits_bulk and sequence.priority >= BULK

    def take_starved(self) -> Sequence | None:
        """Return and forget the sequence that the read budget rejected in the previous step."""
        starved, self._starved = self._starved, None
        return starved

    def schedule_decodes(self, step: StepDraft, decodes: list[Sequence]) -> None:
        """Schedule one token per sequence, and its drafts.

        The first sequence that finds no budget left is scheduled first in the next step.
        """
        fast, proposes = step.reads is None, self._proposer is not None
        left, step_id, append = step.room, step.step_id, step.items.append
        unserved: Sequence | None = None
        for index, sequence in enumerate(decodes):
            if left <= 0:
                unserved = unserved or sequence
                break
            start = sequence.num_computed_tokens
            known = len(sequence.token_ids)
            if sequence.num_inflight:
                known += sequence.num_inflight
                if known <= start or known - sequence.num_prompt_tokens >= sequence.max_tokens:
                    continue  # a step in flight verifies its drafts, or samples its last token
            if (
                fast
                and known - start == 1
                and known <= sequence.num_slots
                and not step.has_preempted
            ):
                forced, drafts = (
                    self._drafts(step, sequence, left + index - len(decodes))
                    if proposes
                    else _NOTHING
                )
                count = 1 + len(forced) + len(drafts)
                append(
                    ScheduledSequence(
                        sequence, start, count, True, drafts, sequence.epoch, forced_ids=forced
                    )
                )
                sequence.num_computed_tokens = start + count
                sequence.last_step = step_id
                step.drafts -= len(drafts)
                left -= count
            elif sequence.status is DECODING and sequence is not step.starved:
                step.tokens = left + step.reserve
                if (
                    not self.schedule(step, sequence, num_after=len(decodes) - index - 1)
                    and step.reads is not None
                ):
                    unserved = unserved or sequence
                left = step.room
        step.tokens = left + step.reserve
        if unserved is not None:
            self._rotate(unserved)

    def _rotate(self, first: Sequence) -> None:
        decoding = self._state.decoding
        if first in decoding:
            index = decoding.index(first)
            decoding[:] = decoding[index:] + decoding[:index]

    def schedule_prefills(self, step: StepDraft, prefills: list[Sequence]) -> None:
        """Schedule a chunk of each running prefill while the step has room."""
        for sequence in prefills:
            if step.room <= 0:
                return
            if sequence.status is PREFILLING and sequence is not step.starved:
                self.schedule(step, sequence)

    def chunk_limit(self, step: StepDraft, sequence: Sequence, start: int) -> int:
        """Return how many tokens of the sequence the step may prefill, whatever room it has."""
        limit = self.limits.threshold or sequence.num_tokens + sequence.num_inflight - start
        if sequence.checkpoints and self.limits.is_chunked:
            limit = min([limit, *(end - start for end in sequence.checkpoints if end > start)])
        return min(limit, step.scorable(sequence, start)) if sequence.is_scoring else limit

    def read_cost(self, end: int) -> int:
        return end if self._widest is None else min(end, self._widest)

    def schedule(
        self, step: StepDraft, sequence: Sequence, num_after: int = 0, is_new: bool = False
    ) -> bool:
        """Schedule as many tokens of a running sequence as the budgets allow.

        Drafts leave one token for each of `num_after` other sequences. A new sequence uses the
        blocks that its admission took: others may be kept free for sequences that run already.
        Return False if the sequence cannot run in this step.
        """
        start = sequence.num_computed_tokens
        known = len(sequence.token_ids) + sequence.num_inflight
        if sequence.num_inflight and known - sequence.num_prompt_tokens >= sequence.max_tokens:
            return False
        end = self._end(step, sequence, known, is_new)
        if end <= start:
            return False
        if step.reads is not None and step.items and self.read_cost(end) > step.reads:
            self._note_starved(step, sequence)
            return False
        if end > sequence.num_slots:
            reach = self._state.kv.reach(sequence, end)
            if reach > start:
                end = reach
            if not self._make_room(step, sequence, end):
                return False
        samples = end == known and sequence.num_output_tokens < sequence.max_tokens
        drafts = _NOTHING
        if samples and (sequence.status is DECODING or not self.limits.threshold):
            drafts = self._drafts(step, sequence, step.room - (end - start) - num_after, is_new)
        step.add(sequence, end, samples, drafts)
        if step.reads is not None:
            step.reads -= self.read_cost(end)
        if samples and sequence.status is PREFILLING:
            self._state.begin_decoding(sequence)
        return True

    def _end(self, step: StepDraft, sequence: Sequence, known: int, is_new: bool) -> int:
        """Return the position up to which the step's room and the limits let the sequence run."""
        start = sequence.num_computed_tokens
        end = min(known, start + step.room)
        if sequence.status is PREFILLING:
            end = min(end, start + self.chunk_limit(step, sequence, start))
        return min(end, sequence.num_slots) if is_new else end

    def _note_starved(self, step: StepDraft, sequence: Sequence) -> None:
        """Remember a sequence that the read budget rejected; it runs first in the next step.

        Among several it is the one that ran longest ago. A step that began with such a sequence
        remembers none. Decodes take turns anyway; only bulk decodes, which are scheduled after all
        others, are remembered.
        """
        if step.starved is not None or not (
            sequence.status is PREFILLING or self.is_limited_bulk(sequence)
        ):
            return
        earlier = self._starved
        if earlier is None or sequence.last_step < earlier.last_step:
            self._starved = sequence

    def _drafts(
        self, step: StepDraft, sequence: Sequence, room: int, is_new: bool = False
    ) -> Proposed:
        """Return the certain and the other proposed tokens after those that the sequence holds.

        They are limited by `room` (in tokens), answer length and free blocks; a new sequence uses
        those that it has. While the sequence's last token is in flight, the first proposed one
        stands for it: if another comes, the drafts are rejected.
        """
        if self._proposer is None or not sequence.params.speculate:
            return _NOTHING
        drafts, num_certain = self._proposer(sequence)
        if not drafts:
            return _NOTHING
        ahead = sequence.num_inflight
        least = MIN_DRAFTS_AHEAD if self._state.async_depth else 1
        known = sequence.num_tokens + ahead
        to_come = sequence.max_tokens - (known - sequence.num_prompt_tokens)
        room = min(room, to_come - 1)
        if step.reads is not None:
            room = min(room, step.reads - self.read_cost(known))
        num_certain = max(0, num_certain - ahead)
        drafts = drafts[ahead : ahead + max(0, min(room, num_certain + step.drafts))]
        if len(drafts) >= least and known + len(drafts) > sequence.num_slots:
            if not is_new:
                self._state.kv.grow(sequence, known + len(drafts))
            drafts = drafts[: max(0, sequence.num_slots - known)]
        return (drafts[:num_certain], drafts[num_certain:]) if len(drafts) >= least else _NOTHING

    # ── blocks ──

    def _make_room(self, step: StepDraft, sequence: Sequence, end: int) -> bool:
        """Allocate blocks up to `end`, preempting sequences if necessary.

        Return False if the sequence cannot run in this step.
        """
        kv = self._state.kv
        while not kv.grow(sequence, end):
            # deferred blocks are released when the step in flight ends: preempt no more for them
            if kv.has_deferred:
                return False
            victims = self.victims(step)
            if not victims or victims == [sequence]:
                return False
            self.preempt(step, victims[0])
            if victims[0] is sequence:
                return False
        return True

    def victims(self, step: StepDraft) -> list[Sequence]:
        """Return running sequences not admitted in this step, the first to be preempted first."""
        state = self._state
        running = [s for s in (*state.decoding, *state.prefilling) if s not in step.admitted]
        return victims_first(running, state.entries, self._config.preempt)

    def preempt(self, step: StepDraft, victim: Sequence) -> None:
        step.remove(victim)
        step.has_preempted = True
        self._state.preempt(victim)
