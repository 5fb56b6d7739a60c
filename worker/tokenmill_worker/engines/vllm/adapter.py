"""Runs requests in vLLM, and makes one frame of each of its steps.

vLLM puts the new tokens of each request into its collector, then calls the stat logger, once a
step. That call empties all collectors into one frame, so that no task per request has to wake.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import Capacity, EngineStats
from tokenmill_worker.contract.messages import CancelRequest, Mailbox, Submit
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engines.choices import URGENT, RunningChoices
from tokenmill_worker.engines.frames import FrameSender
from tokenmill_worker.engines.limits import ModelLimits
from tokenmill_worker.engines.own.errors import why
from tokenmill_worker.engines.own.model.generation_config import read_defaults
from tokenmill_worker.engines.own.model.vocabulary import has_tokenizer
from tokenmill_worker.engines.vllm.choices import VllmChoice
from tokenmill_worker.engines.vllm.config import VllmConfig, capabilities_of

log = logging.getLogger(__name__)


class Adapter(StatLoggerBase):
    """The requests of a worker in one AsyncLLM, of whose engine cores it is the stat logger.

    `config` is vLLM's own, for the model in `folder`. Every call is made in vLLM's event loop. An
    empty command in the mailbox wakes it when `tick` has something to do.
    """

    def __init__(
        self, config: Any, settings: VllmConfig, folder: Path, frames: FrameSender, mailbox: Mailbox
    ) -> None:
        self.capabilities = capabilities_of(
            has_grammars=has_tokenizer(folder), has_adapters=bool(settings.adapters),
            has_position_seeds=bool(getattr(config, "use_v2_model_runner", False)),
            has_drafts=config.speculative_config is not None,
        )  # fmt: skip
        self._figures = Figures(config)
        self.engine = AsyncLLM.from_vllm_config(
            config, stat_loggers=[self._logger_of], disable_log_stats=True
        )
        model, defaults = config.model_config, read_defaults("model", folder)
        self.eos = tuple(sorted(defaults.end_ids(model.hf_text_config)))
        self.limits = ModelLimits(
            model.get_vocab_size(), model.max_model_len, bool(self.capabilities.structured),
            defaults.params, settings.adapter_folders,
        )  # fmt: skip
        self._frames, self._wake = frames, functools.partial(mailbox.put, Submit(()))
        numbered = enumerate(settings.adapter_folders.items(), 1)
        self._loras = {name: LoRARequest(name, id_, folder) for id_, (name, folder) in numbered}
        self._running = RunningChoices(self.limits, VllmChoice)
        self._awaits_step = False  # since a request has been added

    async def submit(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            for item in self._running.of_request(request):
                place = None
                if request.priority == URGENT:
                    self._report()  # a choice that has just ended leaves its place
                    # vLLM takes none from a running request while it has blocks for it
                    place = self._running.to_displace(request, self.capacity())
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
        if not self._running:
            self._figures.rest()
        self._report(is_due=not self._running and self._frames.is_due)

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
            params = item.params(self.eos, self.capabilities)
            prompt = tokens_input(item.prompt_ids, cache_salt=request.cache_salt or None)
            item.collector = await self.engine.add_request(
                item.key, prompt, params, arrival_time=item.since, priority=request.priority,
                lora_request=self._loras.get(request.params.lora),
            )  # fmt: skip
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

    async def _end(self, items: list[VllmChoice], reason: FinishReason) -> None:
        self._running.end(items, reason)
        if items:
            await self.engine.abort([item.key for item in items])

    def _report(self, *, is_step: bool = False, is_due: bool = False) -> None:
        """Send a frame, if there are events or one is due; forget the choices that have ended.

        Beside requests that run, or while vLLM owes the first step behind one that has expired,
        only a step is a sign of life.
        """
        events = self._running.taken_events()
        for item in tuple(self._running.values()):
            if event := item.event():
                events.append(event)
                if event.finish_reason is not None:
                    del self._running[item.key]
                elif item.collector is None:
                    self._wake()
        if events or is_due:
            capacity, work = self.capacity(), bool(self._running)
            stats = functools.partial(self._figures.stats, capacity)
            lives = is_step or not (work or self._awaits_step)
            self._frames.send(tuple(events), capacity, stats, has_work=work, has_stepped=lives)


class Figures:
    """Counters since the start, and vLLM's last gauges, which it omits on some steps. The number of
    blocks in vLLM's `config` is there once it is loaded.
    """

    def __init__(self, config: Any) -> None:
        self.usage: dict[int, float] = {}  # share of blocks in use, by engine core
        self._config = config
        self._waiting = 0
        self._counters: Any = Counter()  # by names of EngineStats
        self._busy_s = 0.0
        self.rest()

    def rest(self) -> None:
        """Note that nothing runs: the time until the next step is not busy."""
        self._stepped_s = time.monotonic()

    def add_step(self, scheduler: Any, iteration: Any, core: int) -> None:
        """Add one step of an engine core, from vLLM's SchedulerStats and IterationStats."""
        before, now = self._stepped_s, time.monotonic()
        self._busy_s, self._stepped_s = self._busy_s + now - before, now
        if scheduler is not None:
            self._waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self.usage[core] = scheduler.kv_cache_usage
            prefixes = scheduler.prefix_cache_stats
            self._counters.update(prefix_queries=prefixes.queries, cached_tokens=prefixes.hits)
        if iteration is not None:
            prompts, drawn = iteration.prompt_token_stats, iteration.num_generation_tokens
            self._counters.update(
                steps=int(drawn > 0), generated_tokens=drawn, prompt_tokens=prompts.total,
                computed_tokens=prompts.computed + drawn, preemptions=iteration.num_preempted_reqs,
                finished=len(iteration.finished_requests),
            )  # fmt: skip

    def capacity(self, num_active: int, num_urgent: int) -> Capacity:
        """Return the free places, when `num_active` choices are in vLLM, `num_urgent` of them
        interactive. vLLM's own gauges are those of its last step.
        """
        config, cache, cores = self._config, self._config.cache_config, len(self.usage)
        most = config.scheduler_config.max_num_seqs * cores  # of each core
        free = 1.0 - sum(self.usage.values()) / cores
        return Capacity(
            free_sequences=max(0, most - num_active), free_urgent=max(0, most - num_urgent),
            free_blocks=round((cache.num_gpu_blocks or 0) * free), block_size=cache.block_size,
            waiting=max(num_active - most, min(num_active, self._waiting)),
            running=min(num_active, most), max_model_len=config.model_config.max_model_len,
        )  # fmt: skip

    def stats(self, capacity: Capacity) -> EngineStats:
        return EngineStats(
            num_running=capacity.running, num_waiting=capacity.waiting, busy_s=self._busy_s,
            blocks_total=self._config.cache_config.num_gpu_blocks or 0,  # of all cores
            blocks_free=capacity.free_blocks, **self._counters,
        )  # fmt: skip
