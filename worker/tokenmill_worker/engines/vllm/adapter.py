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

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.capabilities import Capabilities
from tokenmill_worker.contract.events import Capacity, TokenEvent
from tokenmill_worker.contract.messages import CancelRequest
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engines.choices import URGENT, RunningChoices
from tokenmill_worker.engines.frames import FrameSender
from tokenmill_worker.engines.limits import ModelLimits
from tokenmill_worker.engines.own.errors import why
from tokenmill_worker.engines.own.model.generation_config import GenerationDefaults
from tokenmill_worker.engines.vllm.choices import VllmChoice
from tokenmill_worker.engines.vllm.figures import Figures

log = logging.getLogger(__name__)


class Adapter(StatLoggerBase):
    """The requests of a worker in one AsyncLLM, of whose engine cores it is the stat logger.

    `config` is vLLM's own, `adapters` has the folder of each one. Every call is made in vLLM's
    event loop. `wake` is called when `tick` has something to do.
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
        self._figures = Figures(config)
        self.engine = AsyncLLM.from_vllm_config(
            config, stat_loggers=[self._logger_of], disable_log_stats=True
        )
        model, can_structure = config.model_config, bool(capabilities.structured)
        size, length = model.get_vocab_size(), model.max_model_len
        self.limits = ModelLimits(size, length, can_structure, defaults.params, adapters)
        self.eos = tuple(sorted(defaults.end_ids(model.hf_text_config)))
        self._capabilities, self._frames, self._wake = capabilities, frames, wake
        self._loras = {
            name: LoRARequest(name, number, folder)
            for number, (name, folder) in enumerate(adapters.items(), 1)
        }
        self._running = RunningChoices(self.limits, VllmChoice)
        self._awaits_step = False  # since a request has been added

    async def submit(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            for item in self._running.of_request(request):
                place = self._place_for(request)
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
        self._report()
        if not self._running:
            self._figures.rest()
            if self._frames.is_due:
                self._report(is_due=True)

    def record(self, scheduler: Any, iteration: Any, *, engine_idx: int, **_others: Any) -> None:
        """Report a step that vLLM has ended. Steps without tokens, as those of a core that waits
        for a grammar, are reported twice a second.
        """
        self._figures.add_step(scheduler, iteration, engine_idx)
        self._awaits_step = False
        self._report(is_step=True, is_due=self._frames.is_due)

    def log_engine_initialized(self) -> None:
        pass

    def _logger_of(self, _config: Any, core: int) -> Adapter:
        self._figures.usage[core] = 0.0
        return self

    def capacity(self) -> Capacity:
        return self._figures.capacity(len(self._running), self._running.num_urgent)

    async def _start(self, item: VllmChoice) -> None:
        request = item.request
        try:
            params = item.params(self.eos, self._capabilities)
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
            self._running.refuse(item, str(error))
        except Exception as error:  # one that no check has foreseen ends this request alone
            log.exception("Request %s is refused: it cannot be read", item.key)
            self._running.refuse(item, f"the request cannot be read: {why(error)}")
        else:
            if params.presence_penalty:
                item.biased = frozenset(params.logit_bias or ()).intersection(item.resumed)
            self._running.add(item)
            self._awaits_step |= item.collector.output is None

    async def _begin_again(self, item: VllmChoice) -> None:
        """Begin another attempt behind the tokens of a choice; their prefix is cached."""
        del self._running[item.key]
        await self.engine.abort(item.key)
        item.next_attempt()
        await self._start(item)

    def _place_for(self, request: GenerationRequest) -> VllmChoice | None:
        """Return the choice whose place an interactive request takes, if it would wait.

        vLLM takes no place from a running request while it has blocks for it.
        """
        if request.priority != URGENT:
            return None
        self._report()  # one that has just ended leaves its place
        return self._running.to_displace(request, self.capacity())

    async def _end(self, items: list[VllmChoice], reason: FinishReason) -> None:
        self._running.end(items, reason)
        if items:
            await self.engine.abort([item.key for item in items])

    def _collected(self) -> tuple[TokenEvent, ...]:
        """Return the events since the last call, and forget the choices that have ended."""
        events = self._running.taken_events()
        for item in tuple(self._running.values()):
            if event := item.event():
                events.append(event)
                if event.finish_reason is not None:
                    del self._running[item.key]
                elif item.collector is None:
                    self._wake()
        return tuple(events)

    def _report(self, *, is_step: bool = False, is_due: bool = False) -> None:
        """Send a frame, if there are events, also of requests that ended alone, or if one is due.

        Beside requests that run, or while vLLM owes the first step behind one that has expired,
        only a step is a sign of life.
        """
        events = self._collected()
        if events or is_due:
            capacity = self.capacity()
            self._frames.send(
                events,
                capacity,
                functools.partial(self._figures.stats, capacity),
                has_work=bool(self._running),
                has_stepped=is_step or not (self._running or self._awaits_step),
            )
