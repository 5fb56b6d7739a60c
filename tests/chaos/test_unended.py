"""The description of jobs without an end names what holds them."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from redis import Redis

from tests.chaos.processes import WorkerProcess
from tests.chaos.unended import describe
from tests.support.worker import QUEUE, client_of, database_url

pytestmark = [pytest.mark.redis, pytest.mark.chaos]


async def test_a_job_in_a_frozen_engine_is_described_with_its_worker(
    redis_url: str, tmp_path: Path, allowed_keys: list[str]
) -> None:
    allowed_keys.append("*")  # the job is left as it is
    worker = WorkerProcess(
        "w", redis_url, database_url(tmp_path), tmp_path / "log", queue=QUEUE, in_process=True
    )
    engine = None
    try:
        async with asyncio.timeout(120), client_of(redis_url) as client:
            while not worker.is_ready:  # noqa: ASYNC110 - it is a process
                await asyncio.sleep(0.05)
            engine = worker.engine()
            assert engine is not None
            os.kill(engine.pid, signal.SIGSTOP)
            job = await client.submit(prompt="a", max_tokens=5)
            while (await client.status(job)).status != "running":  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.05)
        with Redis.from_url(redis_url) as redis:
            words = await describe([worker], redis, {QUEUE: [job]})
    finally:
        worker.end()
        if engine is not None:
            engine.kill()  # a stopped process does not see that its worker is gone
    assert "worker w: runs, was ready; its engine's process is stopped, threads: " in words
    assert "owns 1: 1 in the engine, 0 in preparation, 0 held; Credits(free=" in words
    assert f"worker w owns [{job}]; its status: {{worker_id: w, " in words
    assert f"job {job}: {{" in words
    assert "state: running" in words
    assert f"queue {QUEUE}: 1 jobs without an end; " in words
