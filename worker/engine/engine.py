"""The engine: a running continuous batch that anyone can step.

A step is three calls: the scheduler plans, the runner executes, the scheduler commits. On an
asynchronous device the next step is planned and launched before the last one's tokens reach the host.
A step that raises is bisected: the sequence that breaks it fails alone and the others go on. It knows
no text, no queue and no process: `host.py` runs it elsewhere.

The calls for direct use carry the names of Transformers' continuous-batching manager where they mean
the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import msgspec

from schemas.generation import FinishReason, SamplingParams
from worker.engine.config import EngineConfig
from worker.engine.faults import is_device_lost, refusal_event, sentence_of
from worker.engine.intake import Intake
from worker.engine.outputs import Outputs
from worker.engine.plan import StepOutput, StepPlan
from worker.engine.preparing import Needs, Preparing
from worker.engine.runners import Runner, load_runner
from worker.engine.scheduler import Scheduler
from worker.engine.sequence import Sequence
from worker.engine.types import Capacity, EngineStats, GenerationOutput, GenerationRequest, RequestError, TokenEvent


class EngineError(RuntimeError):
    """The engine itself is broken (its device is lost): it must be restarted; its requests are not to blame."""


class Engine:
    """One model, one batch. Not thread-safe: one thread adds, steps and cancels."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self._intake = Intake(runner.vocab_size, runner.max_model_len, runner.can_structure)
        self._outputs = Outputs()
        self._early: list[TokenEvent] = []  # events that arose outside a step (refusals, cancels)
        self._preparing = Preparing()  # not yet schedulable
        self._in_flight: tuple[StepPlan, Any] | None = None
        self._ids = itertools.count()
        self._steps = self._failed_steps = 0
        self._busy_s = 0.0

    @classmethod
    def load(
        cls, config: EngineConfig, cache_dir: str | None = None, on_progress: Callable[[str, float], None] | None = None
    ) -> Engine:
        """Load the model and size the cache; `cache_dir` keeps converted models.

        Raises EngineConfigError for settings that cannot work, OSError where the model is not found.
        """
        return cls.around(load_runner(config, cache_dir, on_progress))

    @classmethod
    def around(cls, runner: Runner) -> Engine:
        """An engine with a batch of its own."""
        scheduler = Scheduler(
            runner.config,
            runner.cache_config,
            max_model_len=runner.max_model_len,
            eos_token_ids=runner.eos_token_ids,
            proposer=runner.proposer,
            async_depth=1 if runner.is_asynchronous else 0,
        )
        return cls(runner, scheduler)

    # ── adding and cancelling ──

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Admit requests together, so that shared prefixes meet; the next step's events answer the refused ones."""
        batch: list[Sequence] = []
        for request in requests:
            try:
                self._enqueue(request, batch)
            except RequestError as error:
                self._early.append(refusal_event(request.request_id, error))
        self._schedule(batch)

    def add_request(
        self, prompt_ids: Seq[int], params: SamplingParams | None = None, request_id: str | None = None, **fields: Any
    ) -> str:
        """Add one request to be collected by `stream` or `get_result`; `fields` are GenerationRequest's others.

        Raises RequestError when it is refused.
        """
        return self.add_requests([prompt_ids], [params or SamplingParams()], [request_id], **fields)[0]

    def add_requests(
        self,
        prompts: Seq[Seq[int]],
        params: Seq[SamplingParams] | SamplingParams | None = None,
        request_ids: Seq[str | None] | None = None,
        **fields: Any,
    ) -> list[str]:
        """Add requests together, ordered for prefix hits; ids in the order given. All or none: RequestError."""
        shared = params if isinstance(params, SamplingParams) else SamplingParams()
        each = [shared] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        names = list(request_ids) if request_ids is not None else [None] * len(prompts)
        if not len(prompts) == len(each) == len(names):
            raise ValueError(
                f"{len(prompts)} prompts, {len(each)} sampling parameters and {len(names)} ids do not match"
            )
        requests = [
            GenerationRequest(request_id=name or self._new_id(), prompt_ids=tuple(prompt), params=sampling, **fields)
            for prompt, sampling, name in zip(prompts, each, names, strict=True)
        ]
        batch: list[Sequence] = []
        for request in requests:
            self._enqueue(request, batch)
        self._schedule(batch, strict=True)
        for request in requests:
            choices = request.params.n
            self._outputs.open(request.request_id, len(request.prompt_ids), choices, request.params.wants_logprobs)
        return [request.request_id for request in requests]

    def cancel(self, request_id: str, reason: FinishReason = FinishReason.CANCELLED, choice: int | None = None) -> bool:
        """End a request (or one choice) in any state; its blocks are free at once. False if it is unknown or over."""
        events = self._preparing.cancel(request_id, reason)
        events += self.scheduler.cancel(request_id, reason, choice)
        self._early += events
        self._outputs.deliver(events)
        return bool(events)

    cancel_request = cancel

    def _enqueue(self, request: GenerationRequest, batch: list[Sequence]) -> None:
        sequences = self._intake.admit(request)
        request_id = request.request_id
        is_known = self.scheduler.knows(request_id) or self._preparing.knows(request_id)
        if is_known or any(sequence.request_id == request_id for sequence in batch):
            raise RequestError(f"request id {request.request_id!r} is already in use")
        params = request.params
        needs = Needs(
            self.runner.prepare(params) if params.response_format is not None else None,
            self.runner.prepare_adapter(params.lora) if params.lora else None,
        )
        if needs.are_met:
            needs.settle(sequences)
            batch += sequences
        else:
            self._preparing.add(needs, sequences)

    def _schedule(self, batch: list[Sequence], strict: bool = False) -> None:
        if not batch:
            return
        try:
            self.scheduler.add(batch)
        except RequestError:
            if strict:
                raise
            for _, group in itertools.groupby(batch, key=lambda sequence: sequence.request_id):
                self._schedule_one(list(group))

    def _schedule_one(self, sequences: list[Sequence]) -> None:
        try:
            self.scheduler.add(sequences)
        except RequestError as error:
            self._early += [refusal_event(s.request_id, error, s.choice) for s in sequences]

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    # ── stepping ──

    @property
    def has_work(self) -> bool:
        return bool(self._early or self._preparing or self._in_flight or self.scheduler.has_work)

    def step(self) -> list[TokenEvent]:
        """Run one iteration and return its events; with nothing to do, return at once.

        Raises EngineError when the device is lost.
        """
        started = time.perf_counter()
        self._take_prepared()
        events, self._early = self._early, []
        events += self.scheduler.expire()
        events += self._step_asynchronous() if self.runner.is_asynchronous else self._step_synchronous()
        self._outputs.deliver(events)
        self._busy_s += time.perf_counter() - started
        return events

    def _step_synchronous(self) -> list[TokenEvent]:
        plan = self.scheduler.plan()
        if plan.is_empty:
            return []
        self._steps += 1
        try:
            output = self.runner.execute(plan)
        except Exception as error:
            return self._bisect(plan, error)
        return self._commit(plan, output)

    def _step_asynchronous(self) -> list[TokenEvent]:
        """Launch step N+1 from a plan with placeholders, then wait for step N and commit it."""
        previous = self._in_flight
        plan = self.scheduler.plan()
        self.runner.release(self.scheduler.take_released())  # who comes back in the same plan starts anew
        self._in_flight = None
        try:
            if not plan.is_empty:
                self._steps += 1
                self._in_flight = (plan, self.runner.launch(plan))
        except Exception as error:
            events = self._finish(previous) if previous else []
            return events + self._bisect(plan, error)
        return self._finish(previous) if previous else []

    def _finish(self, launched: tuple[StepPlan, Any]) -> list[TokenEvent]:
        plan, step = launched
        try:
            output = self.runner.finish(step)
        except Exception as error:
            if self._in_flight is not None:  # what was launched on top of a failed step is void too
                self.scheduler.abandon(self._in_flight[0])
                self._in_flight = None
            return self._bisect(plan, error)
        return self._commit(plan, output)

    def _commit(self, plan: StepPlan, output: StepOutput) -> list[TokenEvent]:
        events = self.scheduler.commit(plan, output)
        self.runner.release(self.scheduler.take_released())
        return events

    def _bisect(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        """A step raised: take it back, then run halves of it until the guilty sequence stands alone."""
        self._failed_steps += 1
        self.scheduler.abandon(plan)
        if is_device_lost(error):
            raise EngineError(f"the device is lost: {error}") from error
        sequences = [item.sequence for item in plan.scheduled]
        if len(sequences) == 1:
            return self.scheduler.fail(sequences[0], f"the model failed on this request: {sentence_of(error)}")
        if not sequences:
            raise EngineError(f"a step without sequences failed: {error}") from error
        middle = len(sequences) // 2
        return self._run_only(sequences[:middle]) + self._run_only(sequences[middle:])

    def _run_only(self, sequences: list[Sequence]) -> list[TokenEvent]:
        plan = self.scheduler.plan(only=sequences)
        if plan.is_empty:
            return []
        try:
            output = self.runner.execute(plan)
        except Exception as error:
            return self._bisect(plan, error)
        return self._commit(plan, output)

    def _take_prepared(self) -> None:
        """Grammars compile and adapters load off the step's path; their requests join when they are done."""
        if self._preparing:
            ready, refusals = self._preparing.take()
            for sequences in ready:
                self._schedule(sequences)
            self._early += refusals

    # ── reading ──

    def stream(self, request_id: str) -> Iterator[TokenEvent]:
        """The request's events as they come, stepping the engine meanwhile; ends after its last choice ended."""
        while True:
            event = self._outputs.next_event(request_id)
            if event is not None:
                yield event
            elif self._outputs.is_finished(request_id):
                self._outputs.discard(request_id)
                return
            else:
                self._step_or_wait()

    request_id_iter = stream

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Step until this request (None: any) is finished and return it; None after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (found := self._outputs.take(request_id)) is None:
            if (deadline is not None and time.monotonic() >= deadline) or not self.has_work:
                return None
            self._step_or_wait()
        return found

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Finished requests in the order in which they finish, until nothing is left."""
        while (found := self.get_result()) is not None:
            yield found

    def generate_batch(
        self, prompts: Seq[Seq[int]], params: Seq[SamplingParams] | SamplingParams | None = None
    ) -> list[GenerationOutput]:
        """Continue every prompt; outputs in the order of the prompts. Raises RequestError if one is refused."""
        request_ids = self.add_requests(prompts, params)
        outputs = []
        for request_id in request_ids:
            output = self.get_result(request_id)
            if output is None:
                raise EngineError(f"request {request_id} came to no end")
            outputs.append(output)
        return outputs

    def _step_or_wait(self) -> None:
        if not self.step() and self._preparing and not self.scheduler.has_work:
            time.sleep(0.001)

    # ── state ──

    def capacity(self) -> Capacity:
        return self.scheduler.capacity()

    def stats(self) -> EngineStats:
        captured, replayed = self.runner.graph_counts
        return msgspec.structs.replace(
            self.scheduler.snapshot(),
            steps=self._steps,
            failed_steps=self._failed_steps,
            busy_s=self._busy_s,
            graphs_captured=captured,
            graph_replays=replayed,
        )

    def stop(self, drain: bool = True) -> None:
        """End: run what is in the engine to its end, or (drain=False) cancel it; then let go of the model."""
        if not drain:
            for request_id in self.request_ids():
                self.cancel(request_id)
        while self.has_work:
            self._step_or_wait()
        self.runner.close()

    def request_ids(self) -> list[str]:
        """Of every request that has not ended."""
        return [*self.scheduler.request_ids(), *self._preparing.request_ids()]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop(drain=kind is None)
