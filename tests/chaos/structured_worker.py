"""A doomed worker that serves structured output.

The worker dies by SIGKILL at the `count`-th call of `point` (see `doomed_worker`). Its engine takes
no step before `num_jobs` jobs have their grammar and their adapter, so that each step before the
death gives each job a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.chaos.doomed_worker import DoomedStore, DoomedStream, calls_left, die_at
from tests.support.engine_thread import EngineThread
from tests.support.worker import settings
from tokenmill_worker.app import Worker
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.serve import serve_loaded

PUBLISHED_S = 1.0  # a step waits at most so long for the publication of the one before it
SETTLED_S = 3.0  # the engine also starts when no further job becomes ready for so long


class GatheringEngine(Engine):
    """An engine whose first step waits until `expected` requests are schedulable, and each other
    one until the worker has come to its point again, so that no two steps share a chunk.
    """

    expected = 0
    point = ""
    _num_ready = 0
    _since = float("inf")
    _is_open = False
    _calls_left = 0
    _until = 0.0

    def step(self) -> list[TokenEvent]:
        if not self._is_open:
            self._requests.schedule_prepared()
            num_ready, now = len(self.scheduler.request_ids()), time.monotonic()
            if num_ready > self._num_ready:
                self._num_ready, self._since = num_ready, now
            if num_ready < self.expected and (
                self._requests.num_pending or now < self._since + SETTLED_S
            ):
                time.sleep(0.005)
                return []
            self._is_open = True
        if calls_left(self.point) == self._calls_left and time.monotonic() < self._until:
            time.sleep(0.002)
            return []
        if events := super().step():
            self._calls_left, self._until = calls_left(self.point), time.monotonic() + PUBLISHED_S
        return events


def gathering_host(config: EngineConfig) -> Callable[[], EngineThread]:
    return lambda: EngineThread(partial(serve_loaded, lambda: GatheringEngine.load(config)))


def main(
    point: str,
    count: int,
    num_jobs: int,
    redis_url: str,
    database: str,
    changes: dict[str, Any],
) -> None:
    die_at(point, count)
    GatheringEngine.expected, GatheringEngine.point = num_jobs, point
    chosen = settings(redis_url, database, worker_id="doomed", lease_seconds=5.0, **changes)
    worker = Worker(
        chosen,
        gathering_host(chosen.engine_config()),
        stream_type=DoomedStream,
        store_type=DoomedStore,
    )
    asyncio.run(worker.serve())
