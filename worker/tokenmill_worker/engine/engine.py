"""The engine: a continuous batch that the caller steps.

It accepts requests, runs steps (`stepping.py`) and returns their events. `host.py` runs an engine
in a process or thread of its own. The calls for direct use have the names of Transformers'
continuous-batching manager where the meaning is the same.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_worker.engine.config import EngineConfig, EngineConfigError, threshold_problem
from tokenmill_worker.engine.errors import EngineError, refusal_event
from tokenmill_worker.engine.execution.interface import Runner, load_runner
from tokenmill_worker.engine.requests.outputs import Outputs
from tokenmill_worker.engine.requests.pending import Needs, Preparing
from tokenmill_worker.engine.requests.validation import Intake
from tokenmill_worker.engine.scheduler import Scheduler
from tokenmill_worker.engine.sequence import Sequence
from tokenmill_worker.engine.stepping import Steps
from tokenmill_worker.engine.types import (
    Capacity,
    EngineStats,
    GenerationOutput,
    GenerationRequest,
    RequestError,
    TokenEvent,
)

log = logging.getLogger(__name__)


class Engine:
    """One model and its batch.

    Not thread-safe: the same thread adds, steps and cancels.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._intake = Intake(runner.vocab_size, scheduler.max_model_len, runner.can_structure)
        self._outputs = Outputs()
        self._early: list[TokenEvent] = []  # events that arose outside a step (refusals, cancels)
        self._preparing = Preparing()  # requests that are not schedulable yet
        self._steps = Steps(runner, scheduler)
        self._ids = itertools.count()
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
            runner.config,
            runner.cache_config,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            proposer=runner.proposer,
            async_depth=1 if runner.is_asynchronous else 0,
        )
        longest, threshold = scheduler.max_model_len, runner.config.long_prefill_token_threshold
        if longest < runner.max_model_len:
            log.info(
                "the longest sequence has %d tokens, not %d: the %d blocks of num_blocks hold no longer one",
                longest, runner.max_model_len, min(runner.cache_config.num_blocks),
            )  # fmt: skip
        if threshold > longest:
            raise EngineConfigError([threshold_problem(threshold, longest)])
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
            except (
                RequestError
            ) as error:  # not delivered to outputs: a request with the same id may be running
                self._early.append(refusal_event(request.request_id, error))
        self._schedule(batch)

    def add_request(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        **fields: Any,
    ) -> str:
        """Add one request whose result `stream` or `get_result` returns.

        `fields` are other fields of GenerationRequest. Raises RequestError if the request is
        refused.
        """
        return self.add_requests(
            [prompt_ids], [params or SamplingParams()], [request_id], **fields
        )[0]

    def add_requests(
        self,
        prompts: Seq[Seq[int]],
        params: Seq[SamplingParams] | SamplingParams | None = None,
        request_ids: Seq[str | None] | None = None,
        **fields: Any,
    ) -> list[str]:
        """Add requests together, ordered for prefix hits; return their ids in the given order.

        Raises RequestError, and adds none, if one of them is refused.
        """
        shared = params if isinstance(params, SamplingParams) else SamplingParams()
        each = (
            [shared] * len(prompts)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        ids = list(request_ids) if request_ids is not None else [None] * len(prompts)
        if not len(prompts) == len(each) == len(ids):
            raise ValueError(
                f"{len(prompts)} prompts, {len(each)} sampling parameters and {len(ids)} ids do not match"
            )
        requests = [
            GenerationRequest(
                request_id=name or self._new_id(),
                prompt_ids=tuple(prompt),
                params=sampling,
                **fields,
            )
            for prompt, sampling, name in zip(prompts, each, ids, strict=True)
        ]
        names = {request.request_id for request in requests}
        known = names.intersection(self._preparing.request_ids())
        batch: dict[str, list[Sequence]] = {}
        try:
            for request in requests:
                self._enqueue(request, batch)
                if request.request_id in self._outputs:
                    raise RequestError(
                        f"the result of request id {request.request_id!r} has not been taken yet"
                    )
            self._schedule(batch, strict=True)
        except RequestError:
            self._preparing.drop(names - known)
            raise
        for request in requests:
            choices = request.params.n
            self._outputs.open(
                request.request_id, len(request.prompt_ids), choices, request.params.wants_logprobs
            )
        return [request.request_id for request in requests]

    def cancel(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        choice: int | None = None,
    ) -> bool:
        """End a request (or one choice) in any state and free its blocks.

        Return False if it is unknown or has ended.
        """
        events = self._preparing.cancel(request_id, reason, choice)
        events += self.scheduler.cancel(request_id, reason, choice)
        self._tell_early(events)
        return bool(events)

    def _tell_early(self, events: list[TokenEvent]) -> None:
        """Deliver events to the outputs now; the next step returns them without delivering them again."""
        self._outputs.deliver(events)
        self._early += events

    def _enqueue(self, request: GenerationRequest, batch: dict[str, list[Sequence]]) -> None:
        sequences = self._intake.admit(request)
        request_id = request.request_id
        if (
            request_id in batch
            or self.scheduler.knows(request_id)
            or self._preparing.knows(request_id)
        ):
            raise RequestError(f"request id {request.request_id!r} is already in use")
        params = request.params
        needs = Needs(
            self.runner.prepare(params) if params.response_format is not None else None,
            self.runner.prepare_adapter(params.lora) if params.lora else None,
        )
        if needs.are_met:
            needs.settle(sequences)
            batch[request_id] = sequences
        else:
            self._preparing.add(needs, sequences)

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
            self._tell_early([refusal_event(s.request_id, error, s.choice) for s in sequences])

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    # ── stepping ──

    @property
    def has_work(self) -> bool:
        return bool(self._preparing or self._can_step)

    @property
    def only_prepares(self) -> bool:
        """Return whether all requests wait for a grammar or an adapter, so that a step would do nothing."""
        return bool(self._preparing) and not self._can_step

    @property
    def _can_step(self) -> bool:
        return bool(self._early or self._steps.are_under_way or self.scheduler.has_work)

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

    def _take_prepared(self) -> None:
        """Schedule requests whose grammar is compiled and whose adapter is loaded."""
        if self._preparing:
            ready, ends = self._preparing.take()
            for sequences in ready:
                self._schedule_one(sequences)
            self._tell_early(ends)

    # ── reading ──

    def stream(self, request_id: str) -> Iterator[TokenEvent]:
        """Yield the request's events, stepping the engine meanwhile, until its last choice ends.

        Tokens that came before the call are one event per choice.
        """
        cursors: dict[int, int] = {}
        while True:
            yield from self._outputs.read(request_id, cursors)
            if self._outputs.is_finished(request_id):
                self._outputs.discard(request_id)
                return
            self._step_or_wait()

    def get_result(
        self, request_id: str | None = None, timeout: float | None = None
    ) -> GenerationOutput | None:
        """Step until this request (None: any request) is finished and return it.

        Return None after `timeout` seconds, or when no work is left.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (found := self._outputs.take(request_id)) is None:
            if (deadline is not None and time.monotonic() >= deadline) or not self.has_work:
                return None
            self._step_or_wait()
        return found

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Yield finished requests in the order of their ends, until no work is left."""
        while (found := self.get_result()) is not None:
            yield found

    def generate_batch(
        self, prompts: Seq[Seq[int]], params: Seq[SamplingParams] | SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """Continue every prompt; return outputs in prompt order. Raises RequestError if one is refused."""
        request_ids = self.add_requests(prompts, params)
        outputs = []
        for request_id in request_ids:
            output = self.get_result(request_id)
            if output is None:
                raise EngineError(f"request {request_id} came to no end")
            outputs.append(output)
        return outputs

    def _step_or_wait(self) -> None:
        if not self.step() and self.only_prepares:
            time.sleep(0.001)

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
        return [*self.scheduler.request_ids(), *self._preparing.request_ids()]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(drain=kind is None)
