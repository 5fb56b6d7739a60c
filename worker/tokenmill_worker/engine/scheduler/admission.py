"""Admits waiting sequences in the queue's order; a bounded number may bypass a head that does not fit.

At most `max_bypass` sequences may start before a head that does not fit; then all wait until it
fits. A sequence that only waits for a block that a running step fills is skipped, and skipping it
is not counted. Under the priority policy an urgent sequence may preempt bulk work. `queues` makes
the queue's order.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto
from typing import TYPE_CHECKING

from tokenmill_worker.engine.kv.manager import Hit
from tokenmill_worker.engine.scheduler.missing_blocks import MissingBlocks
from tokenmill_worker.engine.scheduler.preemption import PREEMPTING_GAP, is_protected
from tokenmill_worker.engine.scheduler.queues import Place
from tokenmill_worker.engine.scheduler.state import OFFLOADED, WAITING, State
from tokenmill_worker.engine.scheduler.step_builder import Step
from tokenmill_worker.engine.sequence import Sequence
from tokenmill_worker.engine.types import SchedulingPolicy

if TYPE_CHECKING:
    from tokenmill_worker.engine.scheduler.planner import Planner


_SHORT_AT_ONCE = 8


def num_for_urgent(state: State) -> int:
    """Return how many more sequences of the most urgent class could start.

    Free rows and rows of bulk work count, whatever less urgent sequences wait for them. Urgent
    sequences that wait already are subtracted. 0 unless the policy is priority.
    """
    if state.config.policy is not SchedulingPolicy.PRIORITY:
        return 0
    free = max(0, state.config.max_num_seqs - state.num_running)
    return max(0, free + state.num_yielding - state.queue.num_below(1))


class Verdict(Enum):
    """Result of trying to admit a sequence.

    Except for ADMITTED, it names what is missing: AWAITS, a block that it can share is still being
    filled; LIMITED, a limit on concurrent prefills; NO_ADAPTER, room for its adapter; NO_BLOCKS,
    free blocks; NO_READS, read budget; NO_ROW, a free row.
    """

    ADMITTED = auto()
    AWAITS = auto()
    LIMITED = auto()
    NO_ADAPTER = auto()
    NO_BLOCKS = auto()
    NO_READS = auto()
    NO_ROW = auto()


class Admission:
    """Admits waiting sequences to the step being planned."""

    def __init__(self, state: State, planner: Planner) -> None:
        self._state = state
        self._planner = planner
        self._config = state.config
        self._may_preempt = self._config.policy is SchedulingPolicy.PRIORITY
        # max_rank → situation at the last refusal; while it is unchanged, candidates are not tried again
        self._refused_at: dict[int | None, tuple[int, ...]] = {}

    def admit(self, step: Step, max_rank: int | None = None) -> None:
        """Start waiting sequences (of rank ≤ max_rank) while budgets, rows and blocks last."""
        state = self._state
        rows = self._config.max_num_seqs - state.num_running
        if not len(state.queue) or step.room <= 0 or (step.has_preempted and step.items):
            return
        if (rows <= 0 and not self._may_preempt) or self._refused_at.get(
            max_rank
        ) == self._situation():
            return
        skipped: list[Place] = []
        is_final = self._scan(step, max_rank, max(rows, 0) + self._config.max_bypass + 1, skipped)
        for place in skipped:
            state.queue.put_back(place)
        if skipped and is_final:
            self._refused_at[max_rank] = self._situation()
        else:
            self._refused_at.pop(max_rank, None)

    def _scan(self, step: Step, max_rank: int | None, looks: int, skipped: list[Place]) -> bool:
        """Try up to `looks` candidates and add the refused ones to `skipped`.

        Return True if trying them again is useless until something changes.
        """
        head: Place | None = None
        is_final = True
        while (
            step.room > 0 and looks > 0 and (place := self._state.queue.pop(max_rank)) is not None
        ):
            looks -= 1
            verdict = self._try_harder(step, place)
            if verdict is Verdict.ADMITTED:
                if head is not None:
                    head.bypassed += 1
            else:
                skipped.append(place)
                is_final = is_final and verdict in (
                    Verdict.NO_BLOCKS,
                    Verdict.NO_ROW,
                    Verdict.NO_ADAPTER,
                )
                if (
                    verdict in (Verdict.NO_BLOCKS, Verdict.NO_READS, Verdict.NO_ADAPTER)
                    and head is None
                ):
                    head = place
            if verdict is Verdict.NO_ROW or (
                head is not None and head.bypassed >= self._config.max_bypass
            ):
                break
            if place.has_taken and (
                verdict is not Verdict.NO_BLOCKS or self._state.kv.has_deferred
            ):
                break  # blocks freed for this sequence must not go to others, nor back to its victims
        return is_final and step.room > 0

    def short_waiting(self, step: Step, max_rank: int | None = None) -> int:
        """Return the number of tokens of the short prompts at the head of the queue.

        At most half of the step's remaining room. Counting stops at the first long prompt, so that
        no sequence is bypassed. The result is 0 if none of them could start.
        """
        state = self._state
        if not len(state.queue) or state.num_running >= self._config.max_num_seqs:
            return 0
        if self._situation() in (self._refused_at.get(max_rank), self._refused_at.get(None)):
            return 0
        held = 0
        looked_at: list[Place] = []
        while len(looked_at) < _SHORT_AT_ONCE and (place := state.queue.pop(max_rank)) is not None:
            looked_at.append(place)
            tokens = place.sequence.num_tokens
            if tokens > self._config.max_num_batched_tokens // 4 or held + tokens > step.room // 2:
                break
            held += tokens
        for place in looked_at:
            state.queue.put_back(place)
        return held

    def admit_one(self, step: Step, sequence: Sequence) -> None:
        """Start this sequence if it fits, regardless of the queue's order."""
        place = self._state.places[sequence]
        self._state.queue.discard(place)
        place.awaited = None
        if step.room <= 0 or self._try(step, place) is not Verdict.ADMITTED:
            self._state.queue.put_back(place)

    def _situation(self) -> tuple[int, ...]:
        state = self._state
        return (
            state.kv.num_frees,
            state.next_ticket,
            state.num_running,
            len(state.queue),
        )

    # ── one candidate ──

    def _try_harder(self, step: Step, place: Place) -> Verdict:
        verdict = self._try(step, place)
        if verdict in (Verdict.NO_BLOCKS, Verdict.NO_ROW) and self._may_preempt:
            for victim in self._worth_preempting(step, place):
                self._planner.preempt(step, victim)
                place.has_taken = True
                verdict = self._try(step, place)
                if verdict is Verdict.ADMITTED:
                    break
        return verdict

    def _worth_preempting(self, step: Step, place: Place) -> list[Sequence]:
        """Return the bulk sequences to preempt so that this urgent one can start.

        Return an empty list if it could not start even then. The read budget is not considered: a
        sequence without reads in this step has them in a later one.
        """
        state, sequence = self._state, place.sequence
        if step.only is not None or state.kv.has_deferred:
            return []
        victims = [
            victim
            for victim in self._planner.victims(step)
            if victim.priority - sequence.priority >= PREEMPTING_GAP
            and state.places[victim].rank > place.rank
            and not is_protected(victim)
        ]
        hit = self._look_up(place) if victims else None
        if hit is None:
            return []
        chunk = self._chunk(step, sequence, hit.num_tokens)
        missing = MissingBlocks(state.kv, sequence, hit.num_tokens)
        for count, victim in enumerate(victims, start=1):
            missing.without(victim)
            gone = victims[:count]
            if (
                missing.are_none(self._headroom(sequence, state.num_running - count))
                and state.has_adapter_room(sequence, gone)
                and not self._is_limited(sequence, hit.num_tokens, chunk, gone)
            ):
                return gone
        return []

    def _headroom(self, sequence: Sequence, num_others: int) -> int | None:
        """Return the blocks to keep free for running sequences, if more than the safety margin.

        None: the sequence may use all blocks, since no other one runs.
        """
        if not num_others:
            return None
        # a preempted sequence returns only if each running one can also grow: else it is the next victim
        return num_others if sequence.preemptions else 0

    def _try(self, step: Step, place: Place) -> Verdict:
        state, sequence = self._state, place.sequence
        if state.num_running >= self._config.max_num_seqs:
            return Verdict.NO_ROW
        if not state.has_adapter_room(sequence):
            return Verdict.NO_ADAPTER
        hit = self._look_up(place)
        if hit is None:
            return Verdict.AWAITS
        chunk = self._chunk(step, sequence, hit.num_tokens)
        if (
            step.reads is not None
            and step.items
            and self._planner.read_cost(hit.num_tokens + chunk) > step.reads
        ):
            return Verdict.NO_READS
        if self._is_limited(sequence, hit.num_tokens, chunk):
            return Verdict.LIMITED
        if not self._take(step, sequence, hit):
            return Verdict.NO_BLOCKS
        self._start(step, place, hit.num_tokens)
        return Verdict.ADMITTED

    def _look_up(self, place: Place) -> Hit | None:
        """Find the computed tokens, in the prefix cache or on the host.

        Return None while a step fills a block that the sequence can share.
        """
        kv, sequence = self._state.kv, place.sequence
        if place.awaited is not None and kv.is_pending(place.awaited):
            return None
        place.awaited = None
        if sequence.status is not WAITING:
            return Hit(sequence.num_committed_tokens)
        hit = kv.find(sequence)
        place.awaited = hit.pending
        return hit if hit.pending is None else None

    def _chunk(self, step: Step, sequence: Sequence, start: int) -> int:
        return min(
            sequence.num_tokens - start, step.room, self._planner.chunk_limit(sequence, start)
        )

    def _is_limited(
        self, sequence: Sequence, start: int, chunk: int, without: Collection[Sequence] = ()
    ) -> bool:
        """Return whether a limit on concurrent prefills forbids starting.

        Sequences in `without` do not count. A prefill that ends within this step is never limited.
        """
        config, planner = self._config, self._planner
        remaining = sequence.num_tokens - start
        if chunk == remaining:
            return False  # ends within this step
        prefilling = [other for other in self._state.prefilling if other not in without]
        if config.max_num_partial_prefills and len(prefilling) >= config.max_num_partial_prefills:
            return True
        if (
            not (config.max_long_partial_prefills and planner.threshold)
            or remaining <= planner.threshold
        ):
            return False
        long = sum(1 for s in prefilling if self._state.places[s].is_long)
        return long >= config.max_long_partial_prefills

    def _take(self, step: Step, sequence: Sequence, hit: Hit) -> bool:
        """Take the blocks; return False if they do not fit."""
        state, kv = self._state, self._state.kv
        headroom = None if step.only is not None else self._headroom(sequence, state.num_running)
        if sequence.status is OFFLOADED:
            return kv.restore(sequence, headroom)
        return kv.admit(sequence, hit, headroom)

    def _start(self, step: Step, place: Place, num_computed: int) -> None:
        state, sequence = self._state, place.sequence
        counters = state.counters
        if sequence.status is WAITING and not place.is_counted:
            place.is_counted = True
            sequence.num_cached_tokens = min(num_computed, sequence.num_prompt_tokens)
            if state.kv.prefix_cache:
                counters.prefix_queries += sequence.num_tokens
                counters.cached_tokens += num_computed
            state.queue.charge(sequence.tenant, sequence.num_tokens - num_computed)
        counters.recomputed_tokens += max(0, place.num_lost_tokens - num_computed)
        place.num_lost_tokens = place.bypassed = 0
        place.has_taken = False
        place.is_long = sequence.num_tokens - num_computed > self._planner.threshold > 0
        place.since = state.clock()
        sequence.num_computed_tokens = sequence.num_committed_tokens = num_computed
        state.start(sequence)
        step.admitted.add(sequence)
        if not self._planner.schedule(step, sequence, may_preempt=False):
            raise RuntimeError(f"{sequence.request_id} was admitted and cannot run")
