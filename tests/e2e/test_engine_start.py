"""A worker whose first engine does not survive its start."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.waiting import until
from tests.support.worker import client_of, database_url, settings
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.app import Worker
from tokenmill_worker.builders import start_of
from tokenmill_worker.contract.messages import Ready
from tokenmill_worker.engines.process.host import EngineProcess

pytestmark = pytest.mark.redis


class KilledWhileLoading(EngineProcess):
    """Dies as by the system's out-of-memory killer."""

    async def start(self, on_progress: Callable[[str, float], None] | None = None) -> Ready:
        starting = asyncio.create_task(super().start(on_progress))
        await until(lambda: self.pid is not None)
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        return await starting


async def test_a_worker_serves_after_its_first_engine_was_killed_while_loading(
    redis_url: str, tmp_path: Path
) -> None:
    chosen = settings(redis_url, database_url(tmp_path))
    kinds = iter([KilledWhileLoading, EngineProcess])
    worker = Worker(chosen, lambda: next(kinds)(start_of(chosen.engine_config())))
    serving = asyncio.create_task(worker.serve())
    async with client_of(redis_url) as client:
        job = await client.submit(prompt="after it", max_tokens=3)
        result = await client.result(job, timeout=60)
    worker.drain()
    assert await serving == 0
    assert result.status is JobStatus.SUCCEEDED
    assert worker.service.health.engine_restarts == 1
