"""Sums vLLM's figures of each step, as a frame carries them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from tokenmill_worker.contract.events import Capacity, EngineStats


class Figures:
    """Counters since the start, and vLLM's last gauges, which it omits on some steps.

    `config` is vLLM's own, `usage` the share of blocks in use by engine core.
    """

    def __init__(self, config: Any, usage: dict[int, float]) -> None:
        self._max_num_seqs = config.scheduler_config.max_num_seqs * len(usage)  # of each core
        self._max_model_len = config.model_config.max_model_len
        self._block_size = config.cache_config.block_size
        self._blocks_total = config.cache_config.num_gpu_blocks or 0  # of all cores
        self._usage = usage
        self._waiting = 0
        self._counters: Counter[str] = Counter()
        self._busy_s = 0.0
        self.rest()

    def rest(self) -> None:
        """Note that nothing runs: the time until the next step is not busy."""
        self._stepped_s = time.monotonic()

    def add_step(self, scheduler: Any, iteration: Any, core: int) -> None:
        """Add one step of an engine core, from vLLM's SchedulerStats and IterationStats."""
        now = time.monotonic()
        self._busy_s += now - self._stepped_s
        self._stepped_s = now
        if scheduler is not None:
            self._waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._usage[core] = scheduler.kv_cache_usage
            prefixes = scheduler.prefix_cache_stats
            self._counters.update(prefix_queries=prefixes.queries, cached_tokens=prefixes.hits)
        if iteration is not None:
            prompts, drawn = iteration.prompt_token_stats, iteration.num_generation_tokens
            self._counters.update(
                steps=int(drawn > 0),
                generated_tokens=drawn,
                prompt_tokens=prompts.total,
                computed_tokens=prompts.computed + drawn,
                preemptions=iteration.num_preempted_reqs,
                finished=len(iteration.finished_requests),
            )

    def capacity(self, num_active: int, num_urgent: int) -> Capacity:
        """Return the free places, when `num_active` choices are in vLLM, `num_urgent` of them
        interactive. vLLM's own gauges are those of its last step.
        """
        waiting = max(num_active - self._max_num_seqs, min(num_active, self._waiting))
        free = 1.0 - sum(self._usage.values()) / len(self._usage)
        return Capacity(
            free_sequences=max(0, self._max_num_seqs - num_active),
            free_blocks=round(self._blocks_total * free),
            waiting=waiting,
            running=min(num_active, self._max_num_seqs),
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            free_urgent=max(0, self._max_num_seqs - num_urgent),
        )

    def stats(self, capacity: Capacity) -> EngineStats:
        counters: dict[str, Any] = dict(self._counters)
        return EngineStats(
            num_running=capacity.running,
            num_waiting=capacity.waiting,
            blocks_total=self._blocks_total,
            blocks_free=capacity.free_blocks,
            busy_s=self._busy_s,
            **counters,
        )
