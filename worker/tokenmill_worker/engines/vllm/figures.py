"""Sums vLLM's figures of each step, as a frame carries them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tokenmill_worker.contract.events import Capacity, EngineStats


@dataclass(slots=True)
class Figures:
    """Counters since the start, and the last gauges; vLLM omits them on some steps."""

    max_num_seqs: int
    max_model_len: int
    block_size: int
    blocks_total: int
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    finished: int = 0
    busy_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    _usage: dict[int, float] = field(default_factory=dict)  # share of blocks, by engine core
    _stepped_s: float = 0.0

    @property
    def blocks_free(self) -> int:
        usage = sum(self._usage.values()) / max(1, len(self._usage))
        return round(self.blocks_total * (1.0 - usage))

    def add_step(self, scheduler: Any, iteration: Any, core: int, *, is_busy: bool) -> None:
        """Add one step of an engine core, from vLLM's SchedulerStats and IterationStats."""
        now = time.monotonic()
        self.steps += iteration is not None and iteration.num_generation_tokens > 0
        self.busy_s += now - self._stepped_s if is_busy and self._stepped_s else 0.0
        self._stepped_s = now
        if scheduler is not None:
            self.num_running = scheduler.num_running_reqs
            self.num_waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            self._usage[core] = scheduler.kv_cache_usage
            self.prefix_queries += scheduler.prefix_cache_stats.queries
            self.cached_tokens += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            prompts, drawn = iteration.prompt_token_stats, iteration.num_generation_tokens
            self.generated_tokens += drawn
            self.prompt_tokens += prompts.total
            self.computed_tokens += prompts.computed + drawn
            self.preemptions += iteration.num_preempted_reqs

    def rest(self) -> None:
        """Note that nothing runs: vLLM reports no step then."""
        self.num_running = self.num_waiting = 0
        self._stepped_s = 0.0

    def capacity(self, num_active: int, num_urgent: int) -> Capacity:
        """Return the free places, when `num_active` choices are in vLLM, `num_urgent` of them
        interactive. vLLM's own gauges are those of its last step.
        """
        return Capacity(
            free_sequences=max(0, self.max_num_seqs - num_active),
            free_blocks=self.blocks_free,
            waiting=max(self.num_waiting, num_active - self.max_num_seqs),
            running=min(num_active, self.max_num_seqs),
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            free_urgent=max(0, self.max_num_seqs - num_urgent),
        )

    def stats(self) -> EngineStats:
        names = EngineStats.__struct_fields__
        return EngineStats(**{name: getattr(self, name) for name in names if hasattr(self, name)})
