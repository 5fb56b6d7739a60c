"""The engine: a continuous batch that the caller steps.

It accepts requests (`requests.py`), runs steps (`stepping.py`) and returns their events.
`serve/loop.py` steps it for a worker, `direct/manager.py` for a caller in the same process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, Self

import msgspec

from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import Capacity, EngineStats, TokenEvent
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.execution.interface import Runner
from tokenmill_worker.engines.own.execution.load import build_scheduler, load_runner
from tokenmill_worker.engines.own.kv.disk_tier import DiskTier
from tokenmill_worker.engines.own.requests import RequestTracker, RequestValidator
from tokenmill_worker.engines.own.scheduler import Scheduler
from tokenmill_worker.engines.own.stepping import StepExecutor

FLUSH_S: Final = 3.0  # a worker waits five seconds for the end of its engine


class Engine:
    """One model and its batch.

    Not thread-safe: the same thread adds, steps and cancels.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        info = runner.info
        validator = RequestValidator(
            info.vocab_size,
            scheduler.max_model_len,
            info.can_structure,
            info.sampling_defaults,
            info.config.adapter_folders,
        )
        self.runner = runner
        self.scheduler = scheduler
        self._requests = RequestTracker(validator, runner, scheduler)
        self._steps = StepExecutor(runner, scheduler)
        self._busy_s = 0.0

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        cache_dir: str | None = None,
        on_progress: Callable[[str, float], None] | None = None,
    ) -> Self:
        """Load the model and size the cache; `cache_dir` keeps converted models.

        Raises:
            EngineConfigError: the settings cannot work.
            OSError: the model is not found.
        """
        return cls.around(load_runner(config, cache_dir, on_progress))

    @classmethod
    def around(cls, runner: Runner) -> Self:
        """Build an engine, with a scheduler of its own, around a runner.

        Raises:
            EngineConfigError: the settings do not fit the model.
        """
        return cls(runner, build_scheduler(runner.info, runner.hooks))

    # ── adding and cancelling ──

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Add requests together, so that shared prefixes hit the cache.

        The next step returns an event for each refused request.
        """
        self._requests.submit(requests)

    def cancel(
        self,
        request_id: str,
        reason: FinishReason = FinishReason.CANCELLED,
        choice: int | None = None,
    ) -> bool:
        """End a request (or one choice) in any state and free its blocks.

        Return False if it is unknown or has ended.
        """
        return self._requests.cancel(request_id, reason, choice)

    # ── stepping ──

    @property
    def has_work(self) -> bool:
        return bool(self._requests.num_pending or self._can_step)

    @property
    def waits_only(self) -> bool:
        """Return whether all requests wait for a grammar, adapter or blocks: a step would do
        nothing.
        """
        return bool(self._requests.num_pending) and not self._can_step

    @property
    def _can_step(self) -> bool:
        return bool(
            self._requests.has_early or self._steps.has_in_flight or self.scheduler.has_work
        )

    def step(self) -> list[TokenEvent]:
        """Run one step and return its events; with nothing to do, return at once.

        Raises EngineError when the engine is broken.
        """
        started = time.perf_counter()
        self._requests.schedule_prepared()
        early = self._requests.take_early()
        events = self.scheduler.expire()
        events += self._steps.next()
        self._busy_s += time.perf_counter() - started
        return early + events

    def settle(self) -> list[TokenEvent]:
        """Commit the step in flight and return its events; launch none, so that weights may change.

        Raises EngineError when the engine is broken.
        """
        return self._steps.settle()

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
            if not self.step() and self.waits_only:
                time.sleep(0.001)
        self.close()

    def close(self) -> None:
        """Leave the blocks of unfinished requests on disk, where there is a cache, and close the
        runner.
        """
        disk = self.scheduler.kv.tier.disk
        try:
            if disk is not None:
                self._flush(disk)
        finally:
            self.runner.close()

    def _flush(self, disk: DiskTier) -> None:
        give_up_at = disk.clock() + FLUSH_S
        tier = self.scheduler.kv.tier
        while (tier.has_unsaved or disk.num_unwritten) and disk.clock() < give_up_at:
            self._steps.copy_blocks()
            disk.poll()
            time.sleep(0.001)

    def request_ids(self) -> list[str]:
        """Return the ids of all requests that have not ended."""
        return self._requests.request_ids()
