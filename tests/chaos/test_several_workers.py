"""Workers on one queue share its load, and one that is asked twice to end goes at once."""

import asyncio
import collections
import contextlib
import signal
from functools import partial

import pytest
import redis.asyncio

from tests.chaos.checker import Received, Wanted, violations
from tests.chaos.clients import listen
from tests.chaos.processes import WorkerProcess
from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobStatus
from tokenmill_worker import app
from tokenmill_worker.queue.consumer import Consumer

pytestmark = [pytest.mark.redis, pytest.mark.chaos]

NUM_JOBS = 96
LONG = {"prompt": "a long answer", "max_tokens": 400, "ignore_eos": True, "seed": 5}


async def test_workers_share_jobs_by_their_free_places(redis_url, tmp_path):
    """Each of three workers with eight places gets its part of equal jobs."""
    database = database_url(tmp_path)
    common = {"model": "synthetic?step_ms=5", "max_num_seqs": 8}
    async with client_of(redis_url, database) as client:
        requests = [
            {"prompt": f"job {i}", "max_tokens": 40, "ignore_eos": True} for i in range(NUM_JOBS)
        ]
        async with (
            running_worker(redis_url, database, worker_id="a", **common),
            running_worker(redis_url, database, worker_id="b", **common),
            running_worker(redis_url, database, worker_id="c", **common),
        ):
            await until_idle(redis_url, "abc")
            jobs = await client.submit_many(requests)
            results = [await client.result(job, timeout=60) for job in jobs]
    assert {result.status for result in results} == {JobStatus.SUCCEEDED}
    done = collections.Counter(result.worker_id for result in results)
    assert min(done[name] for name in "abc") >= NUM_JOBS // 6, done


@pytest.mark.timeout(120)
@pytest.mark.parametrize("names", ["ab", "abc"])
async def test_idle_workers_share_bursts_of_every_size(redis_url, tmp_path, monkeypatch, names):
    """Each job runs until all have been claimed, and no worker polls."""
    database = database_url(tmp_path)
    monkeypatch.setattr(app, "Consumer", partial(Consumer, poll_s=60.0))
    common = {"model": "synthetic?step_ms=5", "max_num_seqs": 64}
    async with client_of(redis_url, database) as client, contextlib.AsyncExitStack() as stack:
        for name in names:
            await stack.enter_async_context(
                running_worker(redis_url, database, worker_id=name, **common)
            )
        for size in (*range(1, 17), 31, 48, 60):
            await until_idle(redis_url, names)
            jobs = await client.submit_many([LONG | {"prompt": f"{size} {i}"} for i in range(size)])
            done = collections.Counter([await worker_of(client, job) for job in jobs])
            for job in jobs:
                await client.cancel(job)
                await client.result(job, timeout=60)
            # A worker that looks again before a slow one has claimed takes half of the rest.
            assert min(done[name] for name in names) >= size // len(names) // 2, (size, done)


async def test_idle_workers_share_jobs_that_come_one_by_one(redis_url, tmp_path, monkeypatch):
    database = database_url(tmp_path)
    monkeypatch.setattr(app, "Consumer", partial(Consumer, poll_s=60.0))
    common = {"model": "synthetic?step_ms=5", "max_num_seqs": 64}
    async with (
        client_of(redis_url, database) as client,
        running_worker(redis_url, database, worker_id="a", **common),
        running_worker(redis_url, database, worker_id="b", **common),
    ):
        await until_idle(redis_url, "ab")
        done: collections.Counter[str] = collections.Counter()
        jobs = []
        for i in range(32):
            jobs.append(await client.submit(**LONG | {"prompt": str(i)}))
            done[await worker_of(client, jobs[-1])] += 1
        for job in jobs:
            await client.cancel(job)
            await client.result(job, timeout=60)
    assert min(done["a"], done["b"]) >= 4, done


async def worker_of(client, job):
    """Wait until a worker has claimed the job; return its name."""
    info = None

    async def is_claimed():
        nonlocal info
        info = await client.status(job)
        return bool(info.worker_id)

    await until(is_claimed)
    return info.worker_id


async def until_idle(redis_url, names):
    """Wait until each worker waits for a wake-up."""
    async with redis.asyncio.Redis.from_url(redis_url) as probe:

        async def all_are_listed():
            return await probe.zcount(Keys("q").idle_workers(), 1, "inf") == len(names)

        await until(all_are_listed)


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
async def test_a_second_sigterm_or_a_sigint_returns_the_jobs_and_ends_the_worker_at_once(
    redis_url, tmp_path, signals
):
    """The grace period outlasts the test's waits; the answer continues elsewhere without a gap."""
    database = database_url(tmp_path)
    leaving = WorkerProcess(
        "leaving",
        redis_url,
        database,
        tmp_path / "log",
        model="synthetic?step_ms=20",
        drain_seconds=3600.0,
    )
    try:
        async with client_of(redis_url, database) as client:
            job, received = await client.submit(**LONG), Received()
            listening = asyncio.create_task(listen(client, job, received))
            async with asyncio.timeout(90):
                while received.num_tokens < 20:  # noqa: ASYNC110 - the listener knows no event
                    await asyncio.sleep(0.02)
            for number in signals:
                leaving.send(number)
                await asyncio.sleep(0.2)
            assert await leaving.wait() == 0
            assert not received.ended, "it waited for its job instead of handing it over"
            async with running_worker(redis_url, database, worker_id="next"):
                result = await client.result(job, timeout=60)
                await asyncio.wait_for(listening, 90)
                again = await client.submit(**LONG)
                undisturbed = await client.result(again, timeout=60)
    finally:
        leaving.end()
    assert result.worker_id == "next"
    wanted = Wanted.of(undisturbed)
    assert violations(database, {job: wanted, again: wanted}, {job: [received]}) == []
