"""The sequences that wait or run, the steps in flight, and the transitions between states.

    WAITING ──▶ PREFILLING ──▶ DECODING ──▶ FINISHED
       ▲            │              │            ▲
       ├─ soft reset ┴─────────────┤            │  from every state: finish
       └──────── OFFLOADED ◀───────┘

Planner and committer decide; they call these transitions, which keep lists and counts consistent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.kv.host_tier import StepCopies
from tokenmill_worker.engines.own.kv.manager import KVManager
from tokenmill_worker.engines.own.plan import StepPlan
from tokenmill_worker.engines.own.scheduler.preemption import is_preemptible
from tokenmill_worker.engines.own.scheduler.queues import Deadlines, QueueEntry, WaitingQueue
from tokenmill_worker.engines.own.sequence import Sequence, SequenceStatus

WAITING, PREFILLING, DECODING = (
    SequenceStatus.WAITING,
    SequenceStatus.PREFILLING,
    SequenceStatus.DECODING,
)
OFFLOADED, FINISHED = SequenceStatus.OFFLOADED, SequenceStatus.FINISHED


@dataclass(slots=True)
class SchedulerCounters:
    """Counters since the start, with the names that they have in EngineStats."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finished: int = 0

    def as_dict(self) -> dict[str, Any]:
        # asdict copies deeply: too slow for every step
        return {name: getattr(self, name) for name in _COUNTER_NAMES}


_COUNTER_NAMES = tuple(field.name for field in fields(SchedulerCounters))


@dataclass(slots=True)
class SchedulerState:
    """Everything that planning and committing share.

    `decoding` and `prefilling` together are the running sequences.
    """

    config: EngineConfig
    kv: KVManager
    queue: WaitingQueue
    clock: Callable[[], float]
    max_model_len: int
    eos_token_ids: frozenset[int]
    async_depth: int
    deadlines: Deadlines
    decoding: list[Sequence] = field(default_factory=list)
    prefilling: list[Sequence] = field(default_factory=list)
    entries: dict[Sequence, QueueEntry] = field(default_factory=dict)
    requests: dict[str, list[Sequence]] = field(default_factory=dict)
    # step id → its block copies; in the order of planning
    in_flight: dict[int, StepCopies] = field(default_factory=dict)
    released: list[Sequence] = field(default_factory=list)
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    newest_plan: StepPlan | None = None
    next_step: int = 0
    next_ticket: int = 0
    num_offloaded: int = 0
    num_preemptible: int = 0  # running sequences that the most urgent class may preempt
    adapters: Counter[str] = field(default_factory=Counter)  # adapter → running sequences

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def has_adapter_room(self, sequence: Sequence, without: Iterable[Sequence] = ()) -> bool:
        """Return whether the sequence can run without exceeding `max_loras` adapters in a step.

        Running sequences count, except those in `without`.
        """
        if not sequence.adapter:
            return True
        adapters = (
            self.adapters - Counter(other.adapter for other in without)
            if without
            else self.adapters
        )
        return sequence.adapter in adapters or len(adapters) < self.config.max_loras

    def enter(self, sequence: Sequence, now: float) -> None:
        """Put a new sequence into the queue."""
        rank = max(0, sequence.priority)
        entry = QueueEntry(sequence, self.next_ticket, now, rank, since=now)
        self.next_ticket += 1
        self.entries[sequence] = entry
        self.requests.setdefault(sequence.request_id, []).append(sequence)
        self.deadlines.add(sequence, entry.ticket)
        self.counters.prompt_tokens += sequence.num_prompt_tokens
        sequence.status = WAITING
        self.queue.push(entry)

    def start(self, sequence: Sequence) -> None:
        """Move a sequence from WAITING or OFFLOADED to PREFILLING; its blocks have been taken."""
        if sequence.status is OFFLOADED:
            self.num_offloaded -= 1
        sequence.status = PREFILLING
        self.prefilling.append(sequence)
        self.num_preemptible += is_preemptible(sequence)
        if sequence.adapter:
            self.adapters[sequence.adapter] += 1

    def begin_decoding(self, sequence: Sequence) -> None:
        """Move a sequence to DECODING: all tokens that it holds are scheduled."""
        self.prefilling.remove(sequence)
        sequence.status = DECODING
        self.decoding.append(sequence)

    def stop_running(self, sequence: Sequence) -> None:
        if sequence.status is DECODING:
            self.decoding.remove(sequence)
        elif sequence.status is PREFILLING:
            self.prefilling.remove(sequence)
        else:
            return
        self.num_preemptible -= is_preemptible(sequence)
        if sequence.adapter:
            self.adapters[sequence.adapter] -= 1
            if not self.adapters[sequence.adapter]:
                del self.adapters[sequence.adapter]

    def launch(self, plan: StepPlan, copies: StepCopies) -> None:
        """Register the plan as in flight, until it is committed or abandoned."""
        self.in_flight[plan.step_id] = copies
        self.newest_plan = plan
        self.next_step += 1

    def count_in_flight(self) -> None:
        """Count the tokens that the newest step in flight samples in its sequences' `num_inflight`.

        Called before another step is planned on top of it.
        """
        plan, self.newest_plan = self.newest_plan, None
        if plan is not None and plan.step_id in self.in_flight:
            self.in_flight[plan.step_id].is_counted = True
            for item in plan.scheduled:
                if item.samples and item.sequence.epoch == item.epoch:
                    item.sequence.num_inflight += 1

    def is_in_flight(self, sequence: Sequence) -> bool:
        """Return whether a step in flight may still write the sequence's blocks."""
        return bool(self.in_flight) and sequence.last_step >= next(iter(self.in_flight))

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and put it back at its old entry in the queue.

        Its tokens are kept. Its KV is copied to the host if that has room, and is otherwise
        computed again.
        """
        self.stop_running(sequence)
        sequence.preemptions += 1
        self.counters.preemptions += 1
        in_flight = self.is_in_flight(sequence)
        if self.kv.offload(sequence, in_flight):
            sequence.status = OFFLOADED
            self.num_offloaded += 1
            self._requeue(sequence)
        else:
            self._soft_reset(sequence, in_flight)

    def reset(self, sequence: Sequence) -> None:
        """Move a sequence to WAITING with nothing computed, from any state but FINISHED."""
        if sequence.status is OFFLOADED:
            self.num_offloaded -= 1
            self.queue.discard(self.entries[sequence])
        self.stop_running(sequence)
        self._soft_reset(sequence, self.is_in_flight(sequence))

    def _soft_reset(self, sequence: Sequence, in_flight: bool) -> None:
        self.entries[sequence].num_lost_tokens = sequence.num_committed_tokens
        self.kv.tier.free(sequence)
        self.kv.free(sequence, in_flight)
        sequence.status = WAITING
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.epoch += 1
        sequence.num_inflight = 0
        entry = self.entries[sequence]
        entry.since = self.clock()
        self.released.append(sequence)
        self.queue.push(entry)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, from any state.

        Its blocks are free at once, except those that a step in flight may write.
        """
        status = sequence.status
        if status is OFFLOADED:
            self.num_offloaded -= 1
        self.stop_running(sequence)
        in_flight = self.is_in_flight(sequence)
        entry = self.entries.pop(sequence)
        self.queue.discard(entry)
        self.kv.tier.free(sequence)
        self.kv.free(sequence, in_flight)
        sequence.epoch += 1
        sequence.num_inflight = 0
        sequence.status = FINISHED
        sequence.finish_reason = reason
        self.released.append(sequence)
        self.counters.finished += 1
        self.deadlines.forget(sequence)
        siblings = self.requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self.requests[sequence.request_id]

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None = None,
        code: str | None = None,
    ) -> TokenEvent:
        """Finish a sequence without a token and return the event."""
        self.finish(sequence, reason)
        return TokenEvent(
            request_id=sequence.request_id,
            choice=sequence.choice,
            finish_reason=reason,
            num_cached_tokens=sequence.num_cached_tokens,
            preemptions=sequence.preemptions,
            error=error,
            error_code=code,
        )
