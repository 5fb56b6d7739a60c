"""The engine: a continuous batch that the caller steps.

It accepts requests, runs steps (`stepping.py`) and returns their events. `process/host.py` runs an
engine in a process or thread of its own. `requests/direct.py` adds the calls that collect results.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import msgspec

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.engine.config import EngineConfig, EngineConfigError
from tokenmill_worker.engine.errors import refusal_event
from tokenmill_worker.engine.execution.interface import Runner, load_runner
from tokenmill_worker.engine.requests.direct import DirectCalls
from tokenmill_worker.engine.requests.pending import Prerequisites
from tokenmill_worker.engine.requests.validation import RequestValidator
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.sequence import Sequence
from tokenmill_worker.engine.stepping import StepExecutor
from tokenmill_worker.engine.types import (
    Capacity,
    EngineStats,
    GenerationRequest,
    RequestError,
    TokenEvent,
)

log = logging.getLogger(__name__)


class Engine(DirectCalls):
    """One model and its batch.

    Not thread-safe: the same thread adds, steps and cancels.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        super().__init__()
        self.runner = runner
        self.scheduler = scheduler
        self._validator = RequestValidator(
            runner.info.vocab_size,
            scheduler.max_model_len,
            runner.info.can_structure,
            runner.info.sampling_defaults,
        )
        self._early: list[TokenEvent] = []  # events that arose outside a step (refusals, cancels)
        self._steps = StepExecutor(runner, scheduler)
        self._busy_s = 0.0

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        cache_dir: str | None = None,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> Engine:
        """Load the model and size the cache; `cache_dir` keeps converted models.

        Raises:
            EngineConfigError: the settings cannot work.
            OSError: the model is not found.
        """
        return cls.around(load_runner(config, cache_dir, on_progress))

    @classmethod
    def around(cls, runner: Runner) -> Engine:
        """Build an engine, with a scheduler of its own, around a runner.

        Raises:
            EngineConfigError: the settings do not fit the model.
        """
        scheduler = Scheduler(
            runner.info.config,
            runner.info.cache_config,
            max_model_len=runner.info.max_model_len,
            eos_token_ids=runner.info.eos_token_ids,
            proposer=runner.info.proposer,
            async_depth=1 if runner.info.is_asynchronous else 0,
        )
        longest = scheduler.max_model_len
        config = runner.info.config
        if longest < runner.info.max_model_len:
            log.info(
                "the longest sequence has %d tokens, not %d: "
                "the %d blocks of num_blocks hold no longer one",
                longest, runner.info.max_model_len, min(runner.info.cache_config.num_blocks),
            )  # fmt: skip
        found = config.prefill_limits.length_problems(longest, config.max_num_batched_tokens)
        if found:
            raise EngineConfigError(found)
        return cls(runner, scheduler)

    # ── adding and cancelling ──

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Add requests together, so that shared prefixes hit the cache.

        The next step returns an event for each refused request.
        """
        batch: dict[str, list[Sequence]] = {}
        for request in requests:
            try:
                self._enqueue(request, batch)
            except RequestError as error:
                # not delivered to outputs: a request with the same id may be running
                self._early.append(refusal_event(request.request_id, error))
        self._schedule(batch)

    def cancel(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        choice: int | None = None,
    ) -> bool:
        """End a request (or one choice) in any state and free its blocks.

        Return False if it is unknown or has ended.
        """
        events = self._pending.cancel(request_id, reason, choice)
        events += self.scheduler.cancel(request_id, reason, choice)
        self._deliver_early(events)
        return bool(events)

    def _deliver_early(self, events: list[TokenEvent]) -> None:
        """Deliver events to the outputs now; the next step only returns them."""
        self._outputs.deliver(events)
        self._early += events

    def _enqueue(self, request: GenerationRequest, batch: dict[str, list[Sequence]]) -> None:
        sequences = self._validator.validate(request)
        request_id = request.request_id
        if (
            request_id in batch
            or self.scheduler.knows(request_id)
            or self._pending.knows(request_id)
        ):
            raise RequestError(f"request id {request.request_id!r} is already in use")
        params = request.params
        prerequisites = Prerequisites(
            self.runner.prepare(params) if params.response_format is not None else None,
            self.runner.prepare_adapter(params.lora) if params.lora else None,
        )
        if prerequisites.are_met:
            prerequisites.assign(sequences)
            batch[request_id] = sequences
        else:
            self._pending.add(prerequisites, sequences)

    def _schedule(self, batch: dict[str, list[Sequence]], strict: bool = False) -> None:
        if not batch:
            return
        try:
            self.scheduler.add([sequence for sequences in batch.values() for sequence in sequences])
        except RequestError:
            if strict:
                raise
            for sequences in batch.values():
                self._schedule_one(sequences)

    def _schedule_one(self, sequences: list[Sequence]) -> None:
        try:
            self.scheduler.add(sequences)
        except RequestError as error:
            self._deliver_early([refusal_event(s.request_id, error, s.choice) for s in sequences])

    # ── stepping ──

    @property
    def has_work(self) -> bool:
        return bool(self._pending or self._can_step)

    @property
    def waits_only(self) -> bool:
        """Return whether all requests wait for a grammar or adapter: a step would do nothing."""
        return bool(self._pending) and not self._can_step

    @property
    def _can_step(self) -> bool:
        return bool(self._early or self._steps.has_in_flight or self.scheduler.has_work)

    def step(self) -> list[TokenEvent]:
        """Run one step and return its events; with nothing to do, return at once.

        Raises EngineError when the engine is broken.
        """
        started = time.perf_counter()
        self._take_prepared()
        early, self._early = self._early, []
        events = self.scheduler.expire()
        events += self._steps.next()
        self._outputs.deliver(events)
        self._busy_s += time.perf_counter() - started
        return early + events

    def settle(self) -> list[TokenEvent]:
        """Commit the step in flight and return its events; launch none, so that weights may change.

        Raises EngineError when the engine is broken.
        """
        events = self._steps.settle()
        self._outputs.deliver(events)
        return events

    def _take_prepared(self) -> None:
        """Schedule requests whose grammar is compiled and whose adapter is loaded."""
        if self._pending:
            ready, ends = self._pending.take()
            for sequences in ready:
                self._schedule_one(sequences)
            self._deliver_early(ends)

    # ── state ──

    def capacity(self) -> Capacity:
        return self.scheduler.capacity()

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            self.scheduler.snapshot(),
            steps=self._steps.num_begun,
            failed_steps=self._steps.num_failed,
            busy_s=self._busy_s,
        )

    def stop(self, drain: bool = True) -> None:
        """Run all requests to their end, or (drain=False) cancel them; then close the runner."""
        if not drain:
            for request_id in self.request_ids():
                self.cancel(request_id)
        while self.has_work:
            self._step_or_wait()
        self.runner.close()

    def request_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended."""
        return [*self.scheduler.request_ids(), *self._pending.request_ids()]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(drain=kind is None)
