"""Runs requests in vLLM, and makes one frame of each of its steps.

vLLM puts the new tokens of each request into its collector, then calls the stat logger, once a
step. That call empties all collectors into one frame, so that no task per request has to wake.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from tokenmill_schemas.generation import LOGPROBS_MODES, FinishReason
from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.contract.events import Capacity, TokenEvent
from tokenmill_worker.contract.messages import CancelRequest
from tokenmill_worker.contract.requests import GenerationRequest, RequestError
from tokenmill_worker.engines.choices import URGENT, RunningChoices
from tokenmill_worker.engines.frames import FrameSender
from tokenmill_worker.engines.limits import ModelLimits
from tokenmill_worker.engines.own.model.generation_config import GenerationDefaults
from tokenmill_worker.engines.vllm.choices import VllmChoice
from tokenmill_worker.engines.vllm.figures import Figures
from tokenmill_worker.engines.vllm.parameters import sampling_params

log = logging.getLogger(__name__)


class Adapter(StatLoggerBase):
    """The requests of a worker in one AsyncLLM, of whose engine cores it is the stat logger.

    `config` is vLLM's own. Every call is made in vLLM's event loop. `wake` is called when `tick`
    has something to do.
    """

    def __init__(
        self,
        config: Any,
        defaults: GenerationDefaults,
        capabilities: Capabilities,
        adapters: dict[str, str],
        frames: FrameSender,
        wake: Callable[[], None],
    ) -> None:
        usage: dict[int, float] = {}

        def logger_of(_config: Any, core: int) -> Adapter:
            usage[core] = 0.0
            return self

        self.engine = AsyncLLM.from_vllm_config(
            config, stat_loggers=[logger_of], disable_log_stats=True
        )
        model = config.model_config
        self.eos = tuple(sorted(defaults.end_ids(model.hf_text_config)))
        self.limits = ModelLimits(
            model.get_vocab_size(),
            model.max_model_len,
            bool(capabilities.structured),
            defaults.params,
        )
        self._figures = Figures(config, usage)
        self._params_of = functools.partial(
            sampling_params,
            eos=self.eos,
            has_position_seeds=capabilities.exact_resume,
            has_biases=config.speculative_config is None,
        )
        self._loras = {
            name: LoRARequest(name, number, folder)
            for number, (name, folder) in enumerate(adapters.items(), 1)
        }
        self._frames, self._wake = frames, wake
        self._running: RunningChoices[VllmChoice] = RunningChoices()
        self._events: list[TokenEvent] = []  # that no step made
        self._awaits_step = False  # since a request has been added

    async def submit(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            for item in self._choices(request):
                place = self._place_for(request) if request.priority == URGENT else None
                await self._start(item)  # before the other waits again: vLLM orders by priority
                if place is not None and place.key in self._running:
                    place.preemptions += 1
                    await self._begin_again(place)

    async def cancel(self, command: CancelRequest) -> None:
        await self._end(self._running.of(command), command.reason)

    async def tick(self) -> None:
        """Begin attempts that are due, end requests whose deadline has passed, and report what no
        step reports. Report twice a second while nothing runs.
        """
        for item in [item for item in self._running.values() if item.collector is None]:
            await self._begin_again(item)
        await self._end(self._running.late(time.monotonic()), FinishReason.EXPIRED)
        self._report_events()
        if not self._running:
            self._figures.rest()
            if self._frames.is_due:
                self._report(())

    def record(self, scheduler: Any, iteration: Any, *, engine_idx: int, **_others: Any) -> None:
        """Report a step that vLLM has ended. Steps without tokens, as those of a core that waits
        for a grammar, are reported twice a second.
        """
        self._figures.add_step(scheduler, iteration, engine_idx)
        self._awaits_step = False
        events = self._collected()
        if events or self._frames.is_due:
            self._report(events, is_step=True)

    def log_engine_initialized(self) -> None:
        pass

    def capacity(self) -> Capacity:
        return self._figures.capacity(len(self._running), self._running.num_urgent)

    def _choices(self, request: GenerationRequest) -> list[VllmChoice]:
        """Return the choices to start; none of a request that is refused, which ends at once."""
        params = request.params
        try:
            limit = self.limits.check(request)
            if params.lora and params.lora not in self._loras:
                known = ", ".join(self._loras) or "-"
                raise RequestError(f"lora {params.lora!r} is not one of {known}")
            mode = params.logprobs_mode
            if params.wants_logprobs and mode not in (None, LOGPROBS_MODES[0]):
                raise RequestError(f"logprobs_mode {mode} is not available with vLLM")
        except RequestError as error:
            self._events.append(error.event(request.request_id))  # for all of its choices
            return []
        return [
            VllmChoice(request=request, index=index, resumed=resumed, limit=limit)
            for index, resumed in request.open_choices()
        ]

    async def _start(self, item: VllmChoice) -> None:
        request = item.request
        try:
            params = self._params_of(item)
            item.collector = await self.engine.add_request(
                item.key,
                tokens_input(item.prompt_ids, cache_salt=request.cache_salt or None),
                params,
                arrival_time=item.since,
                lora_request=self._loras.get(request.params.lora),
                priority=request.priority,
            )
        except EngineDeadError:
            raise
        except (VLLMClientError, ValueError) as error:
            self._events.append(item.failed(str(error)))
        except Exception as error:  # one that no check has foreseen ends this request alone
            log.exception("Request %s is refused: it cannot be read", item.key)
            words = f"the request cannot be read: {type(error).__name__}: {error}"
            self._events.append(item.failed(words))
        else:
            if params.presence_penalty:
                item.biased = frozenset(params.logit_bias or ()).intersection(item.resumed)
            self._running[item.key] = item
            self._awaits_step |= item.collector.output is None

    async def _begin_again(self, item: VllmChoice) -> None:
        """Begin another attempt behind the tokens of a choice; their prefix is cached."""
        del self._running[item.key]
        await self.engine.abort(item.key)
        item.next_attempt()
        await self._start(item)

    def _place_for(self, request: GenerationRequest) -> VllmChoice | None:
        """Return the youngest choice of a lower priority, if this request would wait.

        vLLM takes no place from a running request while it has blocks for it.
        """
        self._report_events()  # one that has just ended leaves its place
        free, length = self.capacity(), len(request.prompt)
        if free.free_sequences and free.free_blocks > -(-length // free.block_size):
            return None
        return self._running.to_displace(request.priority)

    async def _end(self, items: list[VllmChoice], reason: FinishReason) -> None:
        for item in items:
            del self._running[item.key]
            self._events.append(item.ended(reason))
        if items:
            await self.engine.abort([item.key for item in items])

    def _collected(self) -> tuple[TokenEvent, ...]:
        """Return the events since the last call, and forget the choices that have ended."""
        events, self._events = self._events, []
        for item in tuple(self._running.values()):
            if event := item.event():
                events.append(event)
                if event.finish_reason is not None:
                    del self._running[item.key]
                elif item.collector is None:
                    self._wake()
        return tuple(events)

    def _report_events(self) -> None:
        """Report events without a step: of requests that were refused or cancelled, or that ended
        before they were entered here.
        """
        if events := self._collected():
            self._report(events)

    def _report(self, events: tuple[TokenEvent, ...], *, is_step: bool = False) -> None:
        """Send a frame. Beside requests that run, or while vLLM owes the first step behind one that
        has expired, only a step is a sign of life.
        """
        self._frames.send(
            events,
            capacity := self.capacity(),
            functools.partial(self._figures.stats, capacity),
            has_work=bool(self._running),
            has_stepped=is_step or not (self._running or self._awaits_step),
        )
