"""Admits waiting sequences in the queue's order; a bounded number may bypass a head without room.

At most `max_bypass` sequences may start before a head that does not fit; then all wait until it
fits. A sequence that only waits for a block that a running step fills is skipped, and skipping it
is not counted. Under the priority policy an urgent sequence may preempt bulk work. `queues` holds
the order.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from tokenmill_worker.engines.own.kv.prefix_cache import CachedPrefix
from tokenmill_worker.engines.own.scheduler.missing_blocks import MissingBlocks
from tokenmill_worker.engines.own.scheduler.preemption import PREEMPTING_GAP, is_protected
from tokenmill_worker.engines.own.scheduler.queues import QueueEntry
from tokenmill_worker.engines.own.scheduler.state import OFFLOADED, WAITING, SchedulerState
from tokenmill_worker.engines.own.scheduler.step_builder import StepBuilder, StepDraft
from tokenmill_worker.engines.own.sequence import Sequence
from tokenmill_worker.engines.own.types import SchedulingPolicy

_SHORT_AT_ONCE = 8  # short prompts that are counted at the head of the queue


def num_for_urgent(state: SchedulerState) -> int:
    """Return how many more sequences of the most urgent class could start.

    Free rows and rows of bulk work count, whatever less urgent sequences wait for them. Urgent
    sequences that wait already are subtracted. 0 unless the policy is priority.
    """
    if state.config.policy is not SchedulingPolicy.PRIORITY:
        return 0
    free = max(0, state.config.max_num_seqs - state.num_running)
    return max(0, free + state.num_preemptible - state.queue.num_below(1))


class AdmissionResult(Enum):
    """Result of trying to admit a sequence.

    Except for ADMITTED, it names what is missing: AWAITS, a block that it can share is still being
    filled; LIMITED, a limit on concurrent prefills, or on the log-probabilities of a step;
    NO_ADAPTER, room for its adapter; NO_BLOCKS, free blocks; NO_READS, read budget; NO_ROW, a free
    row; NO_TOKENS, room in the step for all of it, where prompts are not cut into chunks.
    """

    ADMITTED = auto()
    AWAITS = auto()
    LIMITED = auto()
    NO_ADAPTER = auto()
    NO_BLOCKS = auto()
    NO_READS = auto()
    NO_ROW = auto()
    NO_TOKENS = auto()


# refusals that hold until something changes
_LASTING = (AdmissionResult.NO_BLOCKS, AdmissionResult.NO_ROW, AdmissionResult.NO_ADAPTER)
# refusals that make a sequence the head, which others may bypass
_BLOCKING = (
    AdmissionResult.NO_BLOCKS,
    AdmissionResult.NO_READS,
    AdmissionResult.NO_ADAPTER,
    AdmissionResult.NO_TOKENS,
)


class SequenceAdmission:
    """Admits waiting sequences to the step being planned."""

    def __init__(self, state: SchedulerState, builder: StepBuilder) -> None:
        self._state = state
        self._builder = builder
        self._config = state.config
        self._may_preempt = self._config.policy is SchedulingPolicy.PRIORITY
        # max_rank → situation at the last refusal; candidates are tried again when it has changed
        self._refused_at: dict[int | None, tuple[int, ...]] = {}

    def admit(self, step: StepDraft, max_rank: int | None = None) -> None:
        """Start waiting sequences (of rank ≤ max_rank) while budgets, rows and blocks last."""
        state = self._state
        rows = self._config.max_num_seqs - state.num_running
        if not len(state.queue) or step.room <= 0 or (step.has_preempted and step.items):
            return
        if rows <= 0 and not self._may_preempt:
            return
        if self._refused_at.get(max_rank) == self._situation():
            return
        skipped: list[QueueEntry] = []
        is_final = self._scan(step, max_rank, max(rows, 0) + self._config.max_bypass + 1, skipped)
        for entry in skipped:
            state.queue.put_back(entry)
        if skipped and is_final:
            self._refused_at[max_rank] = self._situation()
        else:
            self._refused_at.pop(max_rank, None)

    def _scan(
        self, step: StepDraft, max_rank: int | None, looks: int, skipped: list[QueueEntry]
    ) -> bool:
        """Try up to `looks` candidates and add the refused ones to `skipped`.

        Return True if trying them again is useless until something changes.
        """
        head: QueueEntry | None = None
        is_final = True
        while (
            step.room > 0 and looks > 0 and (entry := self._state.queue.pop(max_rank)) is not None
        ):
            looks -= 1
            result = self._try_harder(step, entry)
            if result is AdmissionResult.ADMITTED:
                if head is not None:
                    head.bypassed += 1
            else:
                skipped.append(entry)
                is_final = is_final and result in _LASTING
                if head is None and result in _BLOCKING:
                    head = entry
            if result is AdmissionResult.NO_ROW or (
                head is not None and head.bypassed >= self._config.max_bypass
            ):
                break
            if entry.has_victims and (
                result is not AdmissionResult.NO_BLOCKS or self._state.kv.has_deferred
            ):
                break  # its victims' blocks must not go to others, nor back to the victims
        return is_final and step.room > 0

    def short_waiting(self, step: StepDraft, max_rank: int | None = None) -> int:
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
        looked_at: list[QueueEntry] = []
        while len(looked_at) < _SHORT_AT_ONCE and (entry := state.queue.pop(max_rank)) is not None:
            looked_at.append(entry)
            tokens = entry.sequence.num_tokens
            if tokens > self._config.max_num_batched_tokens // 4 or held + tokens > step.room // 2:
                break
            held += tokens
        for entry in looked_at:
            state.queue.put_back(entry)
        return held

    def admit_one(self, step: StepDraft, sequence: Sequence) -> None:
        """Start this sequence if it fits, regardless of the queue's order."""
        entry = self._state.entries[sequence]
        self._state.queue.discard(entry)
        if step.room <= 0 or self._try(step, entry) is not AdmissionResult.ADMITTED:
            self._state.queue.put_back(entry)

    def _situation(self) -> tuple[int, ...]:
        state = self._state
        return (
            state.kv.pool.frees,
            state.next_ticket,
            state.num_running,
            len(state.queue),
        )

    # ── one candidate ──

    def _try_harder(self, step: StepDraft, entry: QueueEntry) -> AdmissionResult:
        result = self._try(step, entry)
        if result in (AdmissionResult.NO_BLOCKS, AdmissionResult.NO_ROW) and self._may_preempt:
            for victim in self._worth_preempting(step, entry):
                self._builder.preempt(step, victim)
                entry.has_victims = True
                result = self._try(step, entry)
                if result is AdmissionResult.ADMITTED:
                    break
        return result

    def _worth_preempting(self, step: StepDraft, entry: QueueEntry) -> list[Sequence]:
        """Return the bulk sequences to preempt so that this urgent one can start.

        Return an empty list if it could not start even then. The read budget is not considered: a
        sequence without reads in this step has them in a later one.
        """
        state, sequence = self._state, entry.sequence
        if step.only is not None or state.kv.has_deferred:
            return []
        victims = [
            victim
            for victim in self._builder.victims(step)
            if victim.priority - sequence.priority >= PREEMPTING_GAP
            and state.entries[victim].rank > entry.rank
            and not is_protected(victim)
        ]
        hit = self._look_up(entry) if victims else None
        if hit is None:
            return []
        chunk = self._chunk(step, sequence, hit.num_tokens)
        if chunk <= 0 or not self._fits_whole(sequence, hit.num_tokens, chunk):
            return []
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
        # a preempted sequence returns only if each running one can also grow by a block of every
        # group; otherwise it would be the next victim
        return num_others * len(self._state.kv.windows) if sequence.preemptions else 0

    def _try(self, step: StepDraft, entry: QueueEntry) -> AdmissionResult:
        state, sequence = self._state, entry.sequence
        if state.num_running >= self._config.max_num_seqs:
            return AdmissionResult.NO_ROW
        if not state.has_adapter_room(sequence):
            return AdmissionResult.NO_ADAPTER
        hit = self._look_up(entry)
        if hit is None:
            return AdmissionResult.AWAITS
        chunk = self._chunk(step, sequence, hit.num_tokens)
        if (
            step.reads is not None
            and step.items
            and self._builder.read_cost(hit.num_tokens + chunk) > step.reads
        ):
            return AdmissionResult.NO_READS
        if not self._fits_whole(sequence, hit.num_tokens, chunk):
            return AdmissionResult.NO_TOKENS
        if chunk <= 0 or self._is_limited(sequence, hit.num_tokens, chunk):
            return AdmissionResult.LIMITED
        if not self._take(step, sequence, hit):
            return AdmissionResult.NO_BLOCKS
        self._start(step, entry, hit.num_tokens)
        return AdmissionResult.ADMITTED

    def _look_up(self, entry: QueueEntry) -> CachedPrefix | None:
        """Find the computed tokens, in the prefix cache or on the host.

        Return None while a step fills a block that the sequence can share.
        """
        kv, sequence = self._state.kv, entry.sequence
        if entry.awaited is not None and kv.is_pending(entry.awaited):
            return None
        entry.awaited = None
        if sequence.status is not WAITING:
            return CachedPrefix(sequence.num_committed_tokens)
        hit = kv.find(sequence)
        entry.awaited = hit.pending
        return hit if hit.pending is None else None

    def _chunk(self, step: StepDraft, sequence: Sequence, start: int) -> int:
        return min(
            sequence.num_tokens - start,
            step.room,
            self._builder.chunk_limit(step, sequence, start),
        )

    def _fits_whole(self, sequence: Sequence, start: int, chunk: int) -> bool:
        """Return whether the step takes all that is to be computed, or may take a part of it.

        A prompt whose log-probabilities are wanted is always cut, to limit the memory of its
        logits.
        """
        is_cut = self._builder.limits.is_chunked or sequence.is_scoring
        return is_cut or chunk == sequence.num_tokens - start

    def _is_limited(
        self, sequence: Sequence, start: int, chunk: int, without: Collection[Sequence] = ()
    ) -> bool:
        """Return whether a limit on concurrent prefills forbids starting.

        Sequences in `without` do not count. A prefill that ends within this step is never limited.
        """
        limits = self._builder.limits
        remaining = sequence.num_tokens - start
        if chunk == remaining:
            return False  # ends within this step
        prefilling = [other for other in self._state.prefilling if other not in without]
        if limits.partial and len(prefilling) >= limits.partial:
            return True
        if not (limits.long and limits.threshold) or remaining <= limits.threshold:
            return False
        long = sum(1 for s in prefilling if self._state.entries[s].is_long)
        return long >= limits.long

    def _take(self, step: StepDraft, sequence: Sequence, hit: CachedPrefix) -> bool:
        """Take the blocks; return False if they do not fit."""
        state, kv = self._state, self._state.kv
        headroom = None if step.only is not None else self._headroom(sequence, state.num_running)
        if sequence.status is OFFLOADED:
            return kv.restore(sequence, headroom)
        return kv.allocate(sequence, hit, headroom)

    def _start(self, step: StepDraft, entry: QueueEntry, num_computed: int) -> None:
        state, sequence = self._state, entry.sequence
        counters = state.counters
        if sequence.status is WAITING and not entry.is_counted:
            entry.is_counted = True
            sequence.num_cached_tokens = min(num_computed, sequence.num_prompt_tokens)
            if state.kv.prefix_cache:
                counters.prefix_queries += sequence.num_tokens
                counters.cached_tokens += num_computed
            state.queue.charge(sequence.tenant, sequence.num_tokens - num_computed)
        counters.recomputed_tokens += max(0, entry.num_lost_tokens - num_computed)
        entry.num_lost_tokens = entry.bypassed = 0
        entry.has_victims = False
        entry.is_long = sequence.num_tokens - num_computed > self._builder.limits.threshold > 0
        entry.since = state.clock()
        sequence.num_computed_tokens = sequence.num_committed_tokens = num_computed
        state.start(sequence)
        step.admitted.add(sequence)
        if not self._builder.schedule(step, sequence, is_new=True):
            raise RuntimeError(f"{sequence.request_id} was admitted and cannot run")
