"""A worker that is asked to end does so while it loads, waits, works, or is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker import client_of, database_url, running_worker, settings, thread_host
from tokenmill_schemas.result import JobStatus
from tokenmill_worker import app
from tokenmill_worker.app import Worker
from tokenmill_worker.builders import engine_host
from tokenmill_worker.contract.host import EngineHost
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import AppendFailures, ChunkAppend
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = [pytest.mark.redis, pytest.mark.chaos]

ENDS_WITHIN_S = 60.0
SHORT: dict[str, Any] = {"drain_seconds": 0.2, "lease_seconds": 1.0}


async def ended(serving: asyncio.Task[int]) -> int:
    async with asyncio.timeout(ENDS_WITHIN_S):
        return await serving


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize(
    "moment", ["before it serves", "when its engine is made", "while its engine loads"]
)
async def test_sigterm_during_a_start_ends_the_worker_cleanly(
    redis_url: str, tmp_path: Path, engine: str, moment: str
) -> None:
    chosen = settings(redis_url, database_url(tmp_path), **SHORT)
    made = asyncio.Event()

    def factory() -> EngineHost:
        made.set()
        config = chosen.engine_config()
        return thread_host(config)() if engine == "thread" else engine_host(chosen, config)

    worker = Worker(chosen, factory)
    if moment == "before it serves":
        worker.drain()
    serving = asyncio.create_task(worker.serve())
    if moment != "before it serves":
        await asyncio.wait_for(made.wait(), ENDS_WITHIN_S)
        await asyncio.sleep(0.05 if moment == "while its engine loads" else 0)
        worker.drain()
    assert await ended(serving) == 0


async def test_sigterm_while_a_worker_waits_for_redis_ends_it_cleanly(tmp_path: Path) -> None:
    chosen = settings(f"redis://127.0.0.1:{free_port()}/0", database_url(tmp_path), **SHORT)
    worker = Worker(chosen, thread_host(chosen.engine_config()))
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(0.2)
    assert not serving.done(), "it waits: servers may start later than workers"
    worker.drain()
    assert await ended(serving) == 0


class SlowLog(JobStream):
    """A log whose appends take longer than an engine step."""

    async def append(self, items: list[ChunkAppend]) -> AppendFailures:
        await asyncio.sleep(0.1)
        return await super().append(items)


@pytest.mark.parametrize("gives_back", [True, False])
async def test_a_handed_over_job_is_not_cancelled(
    redis_url: str, tmp_path: Path, gives_back: bool
) -> None:
    """The engine stops its sequence and reports that; this is not the job's end."""
    database = database_url(tmp_path)

    class Leaving(SlowLog):
        async def release(
            self, jobs: Iterable[tuple[str, int, bool]], *, alone: bool = False
        ) -> list[bool]:
            if not gives_back:
                await asyncio.sleep(0.2)
                raise RedisUnavailable("cut off in the last moment")
            return await super().release(jobs, alone=alone)

    chosen = settings(
        redis_url, database, model="synthetic?step_ms=3", **(SHORT | {"drain_seconds": 0.0})
    )
    worker = Worker(chosen, thread_host(chosen.engine_config()), stream_type=Leaving)
    async with client_of(redis_url, database) as client:
        job = await client.submit(prompt="long", max_tokens=400, ignore_eos=True, seed=5)
        serving = asyncio.create_task(worker.serve())
        stream = client.stream(job)
        chunks = [await anext(stream) for _ in range(3)]
        worker.drain()
        assert await ended(serving) == 0
        assert (await client.status(job)).status is JobStatus.QUEUED
        async with running_worker(redis_url, database, worker_id="next"):
            chunks += [chunk async for chunk in stream]
            result = await client.result(job, timeout=60)
    assert result.status is JobStatus.SUCCEEDED
    assert [i for chunk in chunks for i in range(chunk.index, chunk.end)] == list(range(400))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while it starts", "while it works"])
async def test_sigterm_while_redis_is_paused_ends_the_worker_cleanly(
    redis_url: str, make_proxy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Connections stay open without replies; the job is free when the lease has run out."""
    proxy, database = (
        make_proxy(int(redis_url.rsplit(":", 1)[1].split("/")[0])),
        database_url(tmp_path),
    )
    monkeypatch.setattr(app, "RECORD_DRAIN_S", 1.0)
    chosen = settings(proxy.url, database, model="synthetic?step_ms=5", **SHORT)
    worker = Worker(chosen, thread_host(chosen.engine_config()))
    async with client_of(redis_url, database) as client:
        job = await client.submit(prompt="long", max_tokens=500, ignore_eos=True)
        if moment == "while it starts":
            proxy.freeze()
        serving = asyncio.create_task(worker.serve())
        if moment == "while it works":
            stream = client.stream(job)
            await anext(stream)
            await stream.aclose()
            proxy.freeze()
        await asyncio.sleep(0.2)
        worker.drain()
        assert await ended(serving) == 0
        proxy.heal()
        async with running_worker(redis_url, database, worker_id="next", **SHORT):
            assert (await client.result(job, timeout=60)).usage.completion_tokens == 500


@pytest.fixture
async def load(redis_url: str) -> AsyncIterator[list[str]]:
    """Submit jobs all the time; yields the list of those accepted."""
    jobs: list[str] = []

    async def submit() -> None:
        async with client_of(redis_url) as client:
            while True:
                fields: list[Any] = [
                    {"prompt": f"{n}", "max_tokens": 60, "ignore_eos": True} for n in range(8)
                ]
                jobs.extend(await client.submit_many(fields))
                await asyncio.sleep(0.1)

    task = asyncio.create_task(submit())
    yield jobs
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_workers_drained_repeatedly_under_load_lose_no_job(
    redis_url: str, make_proxy: Any, tmp_path: Path, load: list[str]
) -> None:
    """Connections break at every moment of a drain; what is left goes to the next worker, and
    nothing is lost.
    """
    proxy = make_proxy(int(redis_url.rsplit(":", 1)[1].split("/")[0]))
    database = database_url(tmp_path)

    async def cut() -> None:
        while True:
            proxy.cut()
            await asyncio.sleep(0.03)
            proxy.heal()
            await asyncio.sleep(0.1)

    for number in range(8):
        chosen = settings(
            proxy.url, database, worker_id=f"w{number}", model="synthetic?step_ms=4", **SHORT
        )
        worker = Worker(chosen, thread_host(chosen.engine_config()))
        serving = asyncio.create_task(worker.serve())
        await asyncio.wait_for(worker.ready.wait(), ENDS_WITHIN_S)
        await asyncio.sleep(0.2)
        cutting = asyncio.create_task(cut())
        worker.drain()
        assert await ended(serving) == 0
        cutting.cancel()
        await asyncio.gather(cutting, return_exceptions=True)
        proxy.heal()
    async with (
        running_worker(redis_url, database, worker_id="last"),
        client_of(redis_url, database) as client,
    ):
        results = [await client.result(job, timeout=60) for job in list(load)]
    assert {result.status for result in results} == {JobStatus.SUCCEEDED}
