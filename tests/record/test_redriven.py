"""A dead job is redriven and succeeds: its `dead` row is replaced once, and it is billed once."""

import asyncio
import signal

import pytest
import sqlalchemy

from tests.chaos import doomed_worker
from tests.support.worker import client_of, running_worker
from tokenmill import AsyncClient
from tokenmill.sql.engine import open_engine
from tokenmill.transport.connect import connect_async
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = pytest.mark.redis

TOKENS = 24


def rows(url: str) -> list[tuple[object, ...]]:
    """Return (state in jobs, state in usage, completion tokens) of every row."""
    engine = open_engine(url)
    with engine.connect() as connection:
        found = connection.execute(
            sqlalchemy.text(
                "SELECT j.state, u.state, u.completion_tokens, length(j.text) > 0 FROM jobs j "
                "FULL OUTER JOIN usage u ON u.job_id = j.id"
            )
        ).all()
    engine.dispose()
    return [tuple(row) for row in found]


async def set_aside(client: AsyncClient, redis_url: str, database: str) -> str:
    """Make a job that is dead by every trace: hash, dead-letter stream, SQL."""
    job = await client.submit(
        prompt="once more", max_tokens=TOKENS, ignore_eos=True, seed=5, tenant="acme"
    )
    redis = connect_async(redis_url)
    unlucky = JobStream(redis, client.keys, "unlucky")
    (delivery,) = await unlucky.claim(1)
    assert await unlucky.release([(delivery.job_id, delivery.token, True)], alone=True) == [True]
    await unlucky.resign()
    await redis.aclose()
    async with running_worker(redis_url, database, worker_id="clerk", max_crashes=1):
        assert (await client.result(job, timeout=60)).status is JobStatus.DEAD
    assert rows(database) == [("dead", "dead", 0, None)]
    return str(job)


async def test_the_row_of_a_redriven_job_is_replaced_once(url, redis_url):
    async with client_of(redis_url, url) as client:
        job = await set_aside(client, redis_url, url)
        assert list(await client.redrive([job])) == [job]
        assert list(await client.redrive([job])) == [], "once is enough"
        async with running_worker(redis_url, url, worker_id="second"):
            result = await client.result(job, timeout=60)
        assert (result.status, result.usage.completion_tokens) == (JobStatus.SUCCEEDED, TOKENS)
        assert rows(url) == [("succeeded", "succeeded", TOKENS, True)]
        assert list(await client.redrive([job])) == []
        assert list(await client.dead()) == []


async def test_a_redriven_job_may_die_again_and_succeed_later(url, redis_url):
    async with client_of(redis_url, url) as client:
        job = await set_aside(client, redis_url, url)
        began = (await client.result(job)).started_ms
        for _ in range(2):
            await client.redrive([job])
            redis = connect_async(redis_url)
            unlucky = JobStream(redis, client.keys, "unlucky")
            (delivery,) = await unlucky.claim(1)
            assert delivery.log == (), "it starts anew"
            assert delivery.started_ms > began, "in time too"
            began = delivery.started_ms
            await unlucky.release([(delivery.job_id, delivery.token, True)], alone=True)
            await unlucky.resign()
            await redis.aclose()
            async with running_worker(redis_url, url, worker_id="clerk", max_crashes=1):
                assert (await client.result(job, timeout=60)).status is JobStatus.DEAD
            assert rows(url) == [("dead", "dead", 0, None)]
        assert [dead.job_id for dead in await client.dead()] == [job]
        await client.redrive()
        async with running_worker(redis_url, url, worker_id="second"):
            assert (await client.result(job, timeout=60)).status is JobStatus.SUCCEEDED
        assert rows(url) == [("succeeded", "succeeded", TOKENS, True)]


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("point", ["inside commit", "after commit"])
async def test_a_redriven_job_whose_worker_is_killed_is_recorded_once(url, redis_url, point):
    async with client_of(redis_url, url) as client:
        job = await set_aside(client, redis_url, url)
        await client.redrive([job])
        process = doomed_worker.start(doomed_worker.main, point, 1, redis_url, url)
        await asyncio.to_thread(process.join, 90)
        assert process.exitcode == -signal.SIGKILL
        async with running_worker(redis_url, url, worker_id="second"):
            result = await client.result(job, timeout=60)
        assert (result.status, result.usage.completion_tokens) == (JobStatus.SUCCEEDED, TOKENS)
        assert rows(url) == [("succeeded", "succeeded", TOKENS, True)]
