"""Deadlines, delays and recorded times are the server's, whatever the wall clocks of workers and
clients show.

The worker is a process whose wall clock is wrong from the start, or is changed while a job runs.
Its engine is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.processes import WorkerProcess
from tests.support.waiting import until
from tests.support.wall_clock import WallClock
from tests.support.worker import client_of, database_url
from tokenmill import AsyncClient
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.result import JobStatus

pytestmark = [pytest.mark.redis, pytest.mark.timeout(300)]

SHORT: dict[str, Any] = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 3_000, "ignore_eos": True}
WAIT_S = 120.0


class Wrong:
    """A worker process whose clock is moved by `shift` seconds at `move`."""

    def __init__(self, redis_url: str, folder: Path, shift: int) -> None:
        self._clock, self._shift = WallClock(folder / "clock"), shift
        environment = self._clock.environment(os.environ)  # noqa: TID251 - handed on, not read
        self.database = database_url(folder)
        self._start = lambda: WorkerProcess(
            "w1", redis_url, self.database, folder / "log", env=environment,
            model="synthetic?step_ms=20", in_process=True,
        )  # fmt: skip

    def move(self) -> None:
        self._clock.jump(self._shift)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[WorkerProcess]:
        worker = self._start()
        try:
            await until(lambda: worker.is_ready or not worker.is_alive, timeout_s=WAIT_S)
            assert worker.is_alive, worker.words
            yield worker
        finally:
            worker.end()


async def check_times(client: AsyncClient) -> None:
    """Run jobs with deadlines and a delay, and compare what is recorded with this clock."""
    began_ms = time.time() * 1000
    in_time = await client.submit(**SHORT, deadline=600)
    late = await client.submit(**LONG, deadline=2)
    delayed = await client.submit(**SHORT, not_before=timedelta(seconds=1.5))
    for job in (in_time, late, delayed):
        result = await client.result(job, timeout=WAIT_S)
        now_ms = time.time() * 1000
        wanted = JobStatus.EXPIRED if job == late else JobStatus.SUCCEEDED
        assert result.status is wanted, result.error
        assert result.created_ms <= result.started_ms <= result.finished_ms + 100
        assert began_ms - 1_000 < result.created_ms < result.finished_ms < now_ms + 1_000
        usage = result.usage
        assert 0 < usage.ttft_ms <= usage.total_ms <= now_ms - began_ms + 1_000
        if job == late:
            assert result.finished_ms - result.created_ms + 500 >= 2_000
            assert 0 < usage.completion_tokens < LONG["max_tokens"]
        if job == delayed:
            assert usage.queue_ms >= 1_400


@pytest.mark.parametrize("shift", [3_600, -3_600, 90, -90])
async def test_a_worker_and_a_client_with_wrong_clocks_keep_the_server_s_times(
    redis_url: str, tmp_path: Path, shift: int
) -> None:
    wrong = Wrong(redis_url, tmp_path, shift)
    wrong.move()
    async with wrong.run() as worker, client_of(redis_url, wrong.database) as client:
        client.clock = ServerClock(wall=lambda: time.time_ns() - shift * 1_000_000_000)
        await check_times(client)
        direction = "ahead of" if shift > 0 else "behind"
        assert worker.words.count(f"s {direction} the Redis server's") == 1


@pytest.mark.parametrize("shift", [3_600, -3_600])
async def test_a_jump_of_the_worker_s_clock_ends_no_job_early_or_late(
    redis_url: str, tmp_path: Path, shift: int
) -> None:
    wrong = Wrong(redis_url, tmp_path, shift)
    async with wrong.run(), client_of(redis_url, wrong.database) as client:
        lasting = await client.submit(prompt="x", max_tokens=200, ignore_eos=True, deadline=600)
        short = await client.submit(**LONG, deadline=5)
        stream = client.stream(short, timeout=WAIT_S)
        await anext(stream)
        await stream.aclose()
        wrong.move()
        async with asyncio.TaskGroup() as checking:
            checking.create_task(check_times(client))
            results = [await client.result(job, timeout=WAIT_S) for job in (lasting, short)]
        assert [result.status for result in results] == [JobStatus.SUCCEEDED, JobStatus.EXPIRED]
        for result in results:
            assert 0 < result.usage.total_ms < 60_000
