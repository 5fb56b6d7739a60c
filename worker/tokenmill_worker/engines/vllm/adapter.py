"""Runs requests in vLLM, and makes one frame of each of its steps.

vLLM puts the new tokens of each request into its collector, then calls the stat logger, once a
step. That call empties all collectors into one frame, so that no task per request has to wake.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from tokenmill_schemas.generation import LOGPROBS_MODES, FinishReason
from tokenmill_worker.contract.events import Capacity, TokenEvent
from tokenmill_worker.contract.messages import CancelRequest, Frame, Report, Submit
from tokenmill_worker.contract.requests import GenerationRequest, RequestError
from tokenmill_worker.engines.limits import ModelLimits
from tokenmill_worker.engines.vllm.choices import RunningChoice
from tokenmill_worker.engines.vllm.figures import Figures
from tokenmill_worker.engines.vllm.parameters import sampling_params

log = logging.getLogger(__name__)

IDLE_REPORT_S: Final = 0.5
STATS_EVERY_S: Final = 0.1
URGENT: Final = 0  # priority of interactive requests


class StepHook(StatLoggerBase):
    """Passes each step of vLLM on, after the step's outputs are in their collectors."""

    adapter: Adapter | None = None  # set before the first request

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        pass

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if self.adapter is not None:
            self.adapter.stepped(scheduler_stats, iteration_stats, engine_idx)

    def log_engine_initialized(self) -> None:
        pass


class Adapter:
    """The requests of a worker in one AsyncLLM; every call is made in vLLM's event loop."""

    def __init__(
        self,
        engine: AsyncLLM,
        emit: Callable[[Report], None],
        figures: Figures,
        limits: ModelLimits,
        adapters: dict[str, str],
        *,
        eos: tuple[int, ...],
        has_position_seeds: bool,
    ) -> None:
        self.engine = engine
        self._emit = emit
        self._figures = figures
        self._limits = limits
        self._eos = eos
        self._loras = {
            name: LoRARequest(name, number, folder)
            for number, (name, folder) in enumerate(adapters.items(), 1)
        }
        self._has_position_seeds = has_position_seeds
        self._running: dict[str, RunningChoice] = {}  # by vLLM's request id
        self._events: list[TokenEvent] = []  # that no step made
        self._report_due_s = 0.0  # on the monotonic clock, as the next
        self._stats_due_s = 0.0

    async def submit(self, command: Submit) -> None:
        for request in command.requests:
            for item in self._choices(request):
                await self._start(item)
        self._report_events()

    async def cancel(self, command: CancelRequest) -> None:
        await self._end(
            [
                key
                for key, item in self._running.items()
                if item.request.request_id == command.request_id
                and command.choice in (None, item.choice)
            ],
            command.reason,
        )

    async def tick(self) -> None:
        """End requests whose deadline has passed. Report while nothing runs.

        While requests run, a step alone makes a report, so that a hang can be told.
        """
        now = time.monotonic()
        late = [
            key
            for key, item in self._running.items()
            if item.request.deadline is not None and item.request.deadline <= now
        ]
        await self._end(late, FinishReason.EXPIRED)
        self._report_events()
        if not self._running and now >= self._report_due_s:
            self._figures.rest()
            self._report(())

    def stepped(self, scheduler_stats: Any, iteration_stats: Any, core: int) -> None:
        """Report a step that vLLM has ended. Steps without tokens, as those of a core that waits
        for a grammar, are reported twice a second.
        """
        self._figures.add_step(scheduler_stats, iteration_stats, core, is_busy=bool(self._running))
        events = self._collected()
        if events or time.monotonic() >= self._report_due_s:
            self._report(events)

    def _choices(self, request: GenerationRequest) -> list[RunningChoice]:
        """Return the choices to start; none of a request that is refused, which ends at once."""
        resumed = dict(enumerate(request.resumed))
        open_ = [choice for choice in range(request.params.n) if choice not in request.done]
        items = [RunningChoice(request, choice, resumed.get(choice, ())) for choice in open_]
        try:
            limit = self._limits.check(request)
            if (name := request.params.lora) and name not in self._loras:
                raise RequestError(f"lora {name!r} is not one of {', '.join(self._loras) or '-'}")
            mode = request.params.logprobs_mode
            if request.params.wants_logprobs and mode not in (None, LOGPROBS_MODES[0]):
                raise RequestError(f"logprobs_mode {mode} is not available with vLLM")
        except RequestError as error:
            refused = RunningChoice(request, 0, ())  # one event for all of them
            self._events.append(refused.failed(str(error), error.code))
            return []
        for item in items:
            item.limit = limit
        return items

    async def _start(self, item: RunningChoice) -> None:
        request = item.request
        try:
            if request.priority == URGENT and not item.attempt:
                await self._make_place(request)
            params = sampling_params(
                request,
                item.choice,
                item.resumed,
                item.limit,
                item.key,
                eos=self._eos,
                has_position_seeds=self._has_position_seeds,
            )
            prompt = tokens_input(item.prompt_ids, cache_salt=request.cache_salt or None)
            item.collector = await self.engine.add_request(
                item.key,
                prompt,
                params,
                arrival_time=item.since,
                lora_request=self._loras.get(request.params.lora),
                priority=request.priority,
            )
        except EngineDeadError:
            raise
        except (VLLMClientError, ValueError) as error:
            self._events.append(item.failed(str(error), "invalid_request"))
        except Exception as error:  # one that no check has foreseen ends this request alone
            log.exception("Request %s is refused: it cannot be read", item.key)
            words = f"the request cannot be read: {type(error).__name__}: {error}"
            self._events.append(item.failed(words, "invalid_request"))
        else:
            self._running[item.key] = item

    async def _make_place(self, request: GenerationRequest) -> None:
        """Take the place of the youngest bulk choice, if an interactive one would wait.

        vLLM takes no place from a running request while it has blocks for it. The bulk choice
        begins again behind the tokens that it has; its prefix is cached.
        """
        figures = self._figures
        needed = -(-len(request.prompt) // figures.block_size) + 1
        if len(self._running) < figures.max_num_seqs and figures.blocks_free >= needed:
            return
        others = [
            item
            for item in self._running.values()
            if item.request.priority > request.priority and item.drawn and item.may_be_displaced
        ]
        if not others:
            return
        item = max(others, key=lambda one: (one.request.priority, one.since))
        self._report_events()
        if item.key not in self._running:  # it has just ended, and left its place
            return
        key = item.key
        del self._running[key]
        item.displace()
        await self.engine.abort(key)
        await self._start(item)

    async def _end(self, keys: list[str], reason: FinishReason) -> None:
        if not keys:
            return
        for key in keys:
            self._events.append(self._running.pop(key).ended(reason))
        await self.engine.abort(keys)
        self._report_events()

    def _taken(self, item: RunningChoice) -> TokenEvent | None:
        """Return what is new of a choice, and forget it if that is its end."""
        event = item.event()
        if event is not None and event.finish_reason is not None:
            del self._running[item.key]
            self._figures.finished += 1
        return event

    def _collected(self) -> tuple[TokenEvent, ...]:
        events, self._events = self._events, []
        events += [event for item in tuple(self._running.values()) if (event := self._taken(item))]
        return tuple(events)

    def _report_events(self) -> None:
        """Report events without a step: of requests that were refused, or ended before they were
        entered here.
        """
        if events := self._collected():
            self._report(events)

    def _report(self, events: tuple[TokenEvent, ...]) -> None:
        now, stats = time.monotonic(), None
        self._report_due_s = now + IDLE_REPORT_S
        if now >= self._stats_due_s or not self._running:
            stats, self._stats_due_s = self._figures.stats(), now + STATS_EVERY_S
        self._emit(Frame(events=events, capacity=self.capacity(), stats=stats, ended_s=now))

    def capacity(self) -> Capacity:
        urgent = sum(item.request.priority == URGENT for item in self._running.values())
        return self._figures.capacity(len(self._running), urgent)
