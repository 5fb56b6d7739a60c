"""Sums vLLM's figures of each step, as a frame carries them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from tokenmill_worker.contract.events import Capacity, EngineStats


class Figures:
    """Counters since the start, and vLLM's last gauges, which it omits on some steps.

    `config` is vLLM's own; its number of blocks, of all cores, is there once vLLM is loaded.
    """

    def __init__(self, config: Any) -> None:
        self.usage: dict[int, float] = {}  # share of blocks in use, by engine core
        self._config = config
        self._waiting = 0
        self._counters: Counter[str] = Counter()
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
        config, cores = self._config, len(self.usage)
        most = config.scheduler_config.max_num_seqs * cores  # of each core
        free = 1.0 - sum(self.usage.values()) / cores
        return Capacity(
            free_sequences=max(0, most - num_active), free_urgent=max(0, most - num_urgent),
            free_blocks=round(self._num_blocks * free), block_size=config.cache_config.block_size,
            waiting=max(num_active - most, min(num_active, self._waiting)),
            running=min(num_active, most), max_model_len=config.model_config.max_model_len,
        )  # fmt: skip

    def stats(self, capacity: Capacity) -> EngineStats:
        return EngineStats(
            num_running=capacity.running, num_waiting=capacity.waiting, busy_s=self._busy_s,
            blocks_total=self._num_blocks, blocks_free=capacity.free_blocks, **self._counters,
        )  # fmt: skip

    @property
    def _num_blocks(self) -> int:
        return self._config.cache_config.num_gpu_blocks or 0  # of all cores
