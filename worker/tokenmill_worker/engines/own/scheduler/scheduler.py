"""The scheduler's interface: add, cancel, plan, commit, abandon, fail, expire, and queries.

Plain Python over sequences and block ids, so that policies are tested in milliseconds, without a
model. Not thread-safe: only the engine's thread calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, Final

from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.contract.events import Capacity, EngineStats, TokenEvent
from tokenmill_worker.contract.requests import RequestError
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.config.cache import CacheConfig
from tokenmill_worker.engines.own.kv.disk_tier import DiskTier
from tokenmill_worker.engines.own.kv.manager import KVManager
from tokenmill_worker.engines.own.plan import ScheduledSequence, StepOutput, StepPlan
from tokenmill_worker.engines.own.scheduler.admission import num_for_urgent
from tokenmill_worker.engines.own.scheduler.committer import Committer
from tokenmill_worker.engines.own.scheduler.lookahead import Lookahead
from tokenmill_worker.engines.own.scheduler.planner import Planner
from tokenmill_worker.engines.own.scheduler.queues import (
    Deadlines,
    FifoQueue,
    PriorityQueue,
    WaitingQueue,
    order_for_prefix_hits,
)
from tokenmill_worker.engines.own.scheduler.state import (
    OFFLOADED,
    WAITING,
    SchedulerCounters,
    SchedulerState,
)
from tokenmill_worker.engines.own.scheduler.step_builder import Proposer
from tokenmill_worker.engines.own.scheduler.step_time import StepTimeModel
from tokenmill_worker.engines.own.sequence import NULL_BLOCK, Sequence
from tokenmill_worker.engines.own.types import SchedulingPolicy

MAX_WAITING: Final = 100_000


class Scheduler:
    """Decides what each step computes.

    With `async_depth` 1, a step may be planned before the last one is committed.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache: CacheConfig,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        clock: Callable[[], float] = time.monotonic,
        proposer: Proposer | None = None,
        has_state: Callable[[bytes], bool] | None = None,
        disk: DiskTier | None = None,
        async_depth: int = 0,
        ageing_s: float = 30.0,
    ) -> None:
        self.config = config
        self.kv = KVManager(
            cache,
            model_key=f"{config.model}/{config.dtype}" if disk is None else disk.model_key,
            max_chunk=config.max_num_batched_tokens,
            safety_margin=config.safety_margin,
            has_state=has_state,
            disk=disk,
        )
        # A sequence's last token needs no slot: it is never computed.
        self.max_model_len = max_model_len = min(
            max_model_len, self.kv.max_tokens_alone(max_model_len) + 1
        )
        queue: WaitingQueue = (
            PriorityQueue(ageing_s) if config.policy is SchedulingPolicy.PRIORITY else FifoQueue()
        )
        self._state = SchedulerState(
            config=config,
            kv=self.kv,
            queue=queue,
            clock=clock,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            async_depth=async_depth,
            deadlines=Deadlines(clock),
        )
        self._step_times = StepTimeModel(
            config.bulk_slowdown if config.policy is SchedulingPolicy.PRIORITY else None
        )
        self._planner = Planner(self._state, proposer, ageing_s, self._step_times)
        self._planned_at: dict[int, float] = {}
        self._committed_at = 0.0
        self._committer = Committer(self._state)
        self.lookahead = Lookahead(self._state)

    # ── requests ──

    def add(self, sequences: list[Sequence]) -> None:
        """Add requests, each with all its choices: all of them or, if one is refused, none.

        Raises:
            RequestError: a sequence can never fit, a request id is in use, or the queue is full.
        """
        state = self._state
        for sequence in sequences:
            self._check(sequence)
            if sequence.request_id in state.requests:
                raise RequestError(f"request id {sequence.request_id!r} is already in use")
        if len(state.queue) + len(sequences) > MAX_WAITING:
            raise RequestError(
                f"the engine has {len(state.queue)} waiting requests already", code="engine_error"
            )
        now = state.clock()
        for sequence in order_for_prefix_hits(sequences, self.kv.block_size):
            state.enter(sequence, now)

    def _check(self, sequence: Sequence) -> None:
        """Refuse a sequence that can never run; set the limit on its output tokens."""
        longest = self.max_model_len
        if not sequence.token_ids or sequence.num_prompt_tokens < 1:
            raise RequestError("the prompt is empty; it needs at least one token")
        if sequence.num_tokens >= longest:
            raise RequestError(
                f"{sequence.num_tokens} tokens can never fit: "
                f"the engine's longest sequence has {longest}",
                code="context_length_exceeded",
            )
        room = longest - sequence.num_prompt_tokens
        wanted = sequence.max_tokens or sequence.params.max_tokens or room
        if wanted > room and sequence.params.max_tokens is not None:
            raise RequestError(
                f"{sequence.num_prompt_tokens} prompt tokens and max_tokens={wanted} can never "
                f"fit: the engine's longest sequence has {longest}",
                code="context_length_exceeded",
            )
        sequence.max_tokens = min(wanted, room)

    def cancel(
        self, request_id: str, reason: FinishReason, choice: int | None = None
    ) -> list[TokenEvent]:
        """End a request, or one choice of it, in any state.

        Return no events if it is unknown or has ended.
        """
        found = [
            s
            for s in self._state.requests.get(request_id, ())
            if choice is None or s.choice == choice
        ]
        return [self._state.end(sequence, reason) for sequence in found]

    def fail(self, sequence: Sequence, message: str) -> list[TokenEvent]:
        """End one sequence with an error message for its user."""
        if sequence not in self._state.entries:
            return []
        return [self._state.end(sequence, FinishReason.ERROR, message, "engine_error")]

    def expire(self) -> list[TokenEvent]:
        """End every sequence whose deadline has passed, waiting or running."""
        state = self._state
        passed = state.deadlines.take_passed()
        return [state.end(sequence, FinishReason.EXPIRED) for sequence in passed]

    # ── steps ──

    def plan(self, only: Collection[Sequence] | None = None) -> StepPlan:
        """Plan the next step; with async_depth > 0 also before the previous plan is committed."""
        plan = self._planner.plan(only)
        if self._step_times.limits_bulk and not plan.is_empty:
            self._planned_at[plan.step_id] = self._state.clock()
        return plan

    def commit(self, plan: StepPlan, output: StepOutput) -> list[TokenEvent]:
        """Apply a step's result and return its events."""
        self._record_step_time(plan)
        return self._committer.commit(plan, output)

    def _record_step_time(self, plan: StepPlan) -> None:
        """Record how long the step took.

        A step that was planned while another ran counts from the end of that one.
        """
        planned_at = self._planned_at.pop(plan.step_id, None)
        if planned_at is not None:
            now = self._state.clock()
            self._step_times.note(plan.num_tokens, now - max(planned_at, self._committed_at))
            self._committed_at = now

    def probe(self, num_tokens: int) -> StepPlan:
        """Plan a prefill of `num_tokens` dummy tokens.

        It is cut to what one step and the model's length allow. Like padding, it writes to the
        reserved block, which no sequence reads.
        """
        length = max(1, min(num_tokens, self.config.max_num_batched_tokens, self.max_model_len - 1))
        tables = [[NULL_BLOCK] * (length // size + 1) for size in self.kv.block_sizes]
        params = SamplingParams(temperature=0.0)
        sequence = Sequence(
            "probe", [0] * length, length, params, max_tokens=1, block_tables=tables
        )
        return StepPlan(0, (ScheduledSequence(sequence, 0, length, True),))

    def is_in_flight(self, plan: StepPlan) -> bool:
        """Return whether the plan is neither committed nor abandoned."""
        return plan.step_id in self._state.in_flight

    def abandon(self, plan: StepPlan) -> None:
        """Undo a step that failed; sequences that it preempted stay preempted."""
        self._planned_at.pop(plan.step_id, None)
        self._committer.abandon(plan)

    # ── queries ──

    @property
    def has_work(self) -> bool:
        """Return whether a request has not ended, or blocks are to be copied for the disk."""
        return bool(self._state.requests) or self.kv.tier.has_saves

    @property
    def stats(self) -> SchedulerCounters:
        return self._state.counters

    def knows(self, request_id: str) -> bool:
        return request_id in self._state.requests

    def request_ids(self) -> list[str]:
        return list(self._state.requests)

    def sequences(self, request_id: str) -> list[Sequence]:
        """Return the choices of a request that have not ended."""
        return list(self._state.requests.get(request_id, ()))

    def take_released(self) -> list[Sequence]:
        """Return the sequences that ended or were preempted since the last call."""
        released, self._state.released = self._state.released, []
        return released

    def capacity(self) -> Capacity:
        state = self._state
        return Capacity(
            free_sequences=max(0, self.config.max_num_seqs - state.num_running),
            free_blocks=self.kv.pool.num_free,
            waiting=len(state.queue),
            running=state.num_running,
            block_size=self.kv.block_size,
            max_model_len=state.max_model_len,
            free_urgent=num_for_urgent(state),
        )

    def snapshot(self) -> EngineStats:
        """Return counters and current gauges; the engine adds the figures that it counts itself."""
        state, kv = self._state, self.kv
        disk: dict[str, Any] = {} if kv.tier.disk is None else kv.tier.disk.stats()
        return EngineStats(
            **disk,
            **state.counters.as_dict(),
            num_running=state.num_running,
            num_waiting=len(state.queue),
            num_offloaded=state.num_offloaded,
            blocks_total=kv.pool.num_usable,
            blocks_free=kv.pool.num_free,
            blocks_cached=kv.pool.num_free_cached,
            evicted_blocks=kv.pool.evicted,
            blocks_swapped_out=kv.tier.swapped_out,
            blocks_swapped_in=kv.tier.swapped_in,
        )

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes, for example because the weights have changed."""
        self.kv.reset_prefix_cache()
        for sequence in self._state.entries:
            if sequence.status is WAITING:
                sequence.block_hashes.clear()
            elif sequence.status is OFFLOADED:
                self._state.reset(sequence)
                sequence.block_hashes.clear()
