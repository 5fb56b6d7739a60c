"""The sequences that wait or run, the steps in flight, and the transitions between states.

    WAITING ──▶ PREFILLING ──▶ DECODING ──▶ FINISHED
       ▲            │              │            ▲
       ├─ soft reset ┴─────────────┤            │  from every state: finish
       └──────── OFFLOADED ◀───────┘

Planner and committer decide; they call these transitions, which keep lists and counts consistent.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.kv.manager import KVManager
from tokenmill_worker.engine.kv.moves import StepMoves
from tokenmill_worker.engine.plan import StepPlan
from tokenmill_worker.engine.scheduler.counters import Counters
from tokenmill_worker.engine.scheduler.preemption import yields_to_urgent
from tokenmill_worker.engine.scheduler.queues import Place, WaitingQueue
from tokenmill_worker.engine.sequence import Sequence, SequenceStatus
from tokenmill_worker.engine.types import TokenEvent

WAITING, PREFILLING, DECODING = (
    SequenceStatus.WAITING,
    SequenceStatus.PREFILLING,
    SequenceStatus.DECODING,
)
OFFLOADED, FINISHED = SequenceStatus.OFFLOADED, SequenceStatus.FINISHED


@dataclass(slots=True)
class State:
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
    decoding: list[Sequence]
    prefilling: list[Sequence]
    places: dict[Sequence, Place]
    requests: dict[str, list[Sequence]]
    in_flight: dict[int, StepMoves]  # step id → its block moves; in the order of planning
    released: list[Sequence]
    deadlines: list[tuple[float, int, Sequence]]
    counters: Counters
    newest_plan: StepPlan | None = None
    next_step: int = 0
    next_ticket: int = 0
    num_offloaded: int = 0
    num_yielding: int = 0  # running sequences that the most urgent class may preempt
    num_over: int = 0  # entries of `deadlines` whose sequences have ended
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
        place = Place(sequence, self.next_ticket, now, rank, since=now)
        self.next_ticket += 1
        self.places[sequence] = place
        self.requests.setdefault(sequence.request_id, []).append(sequence)
        if sequence.deadline is not None:
            heapq.heappush(self.deadlines, (sequence.deadline, place.ticket, sequence))
        self.counters.prompt_tokens += sequence.num_prompt_tokens
        sequence.status = WAITING
        self.queue.push(place)

    def start(self, sequence: Sequence) -> None:
        """Move a sequence from WAITING or OFFLOADED to PREFILLING; its blocks have been taken."""
        if sequence.status is OFFLOADED:
            self.num_offloaded -= 1
        sequence.status = PREFILLING
        self.prefilling.append(sequence)
        self.num_yielding += yields_to_urgent(sequence)
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
        self.num_yielding -= yields_to_urgent(sequence)
        if sequence.adapter:
            self.adapters[sequence.adapter] -= 1
            if not self.adapters[sequence.adapter]:
                del self.adapters[sequence.adapter]

    def launch(self, plan: StepPlan, moves: StepMoves) -> None:
        """Register the plan as in flight, until it is committed or abandoned."""
        self.in_flight[plan.step_id] = moves
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
        """Return whether a step under way may still write the sequence's blocks."""
        return bool(self.in_flight) and sequence.last_step >= next(iter(self.in_flight))

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and put it back at its old place in the queue.

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
            self.queue.discard(self.places[sequence])
        self.stop_running(sequence)
        self._soft_reset(sequence, self.is_in_flight(sequence))

    def _soft_reset(self, sequence: Sequence, in_flight: bool) -> None:
        self.places[sequence].num_lost_tokens = sequence.num_committed_tokens
        self.counters.soft_resets += 1
        self.kv.tier.free(sequence)
        self.kv.free(sequence, in_flight)
        sequence.status = WAITING
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.epoch += 1
        sequence.num_inflight = 0
        place = self.places[sequence]
        place.since = self.clock()
        self.released.append(sequence)
        self.queue.push(place)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence, from any state.

        Its blocks are free at once, except those that a step in flight may write.
        """
        status = sequence.status
        if status is OFFLOADED:
            self.num_offloaded -= 1
        self.stop_running(sequence)
        in_flight = self.is_in_flight(sequence)
        place = self.places.pop(sequence)
        self.queue.discard(place)
        self.kv.tier.free(sequence)
        self.kv.free(sequence, in_flight)
        sequence.epoch += 1
        sequence.num_inflight = 0
        sequence.status = FINISHED
        sequence.finish_reason = reason
        self.released.append(sequence)
        self.counters.finished += 1
        if sequence.deadline is not None:
            self._forget_deadline()
        siblings = self.requests[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self.requests[sequence.request_id]

    def _forget_deadline(self) -> None:
        """Count a deadline as over; sweep the heap when most of its entries are.

        A deadline may be a day away, so entries of ended sequences would pile up.
        """
        self.num_over += 1
        if self.num_over > 64 + len(self.deadlines) // 2:
            self.deadlines[:] = [
                entry for entry in self.deadlines if entry[2].status is not FINISHED
            ]
            heapq.heapify(self.deadlines)
            self.num_over = 0

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
