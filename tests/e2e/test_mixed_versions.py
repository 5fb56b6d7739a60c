"""Producers and workers of the next version share a queue with this one during an upgrade."""

import asyncio
import contextlib
import signal
import sys

import pytest
from redis.asyncio import Redis

from tests.e2e.other_version import rewritten
from tests.support.worker import client_of, database_url
from tokenmill_schemas.result import JobStatus

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(300)]

TOKENS = 90


@contextlib.asynccontextmanager
async def other_worker(name, redis_url, database):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.e2e.other_version", name, redis_url, database
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def chunks_of(client, job):
    """Return (index, token ids) of every chunk, and the text."""
    chunks = [chunk async for chunk in client.stream(job, timeout=90)]
    places = [place for chunk in chunks for place in range(chunk.index, chunk.end)]
    return (
        places,
        tuple(token for chunk in chunks for token in chunk.token_ids),
        "".join(c.text for c in chunks),
    )


async def at_work(client, name, least=1):
    """Wait until this worker owns at least `least` jobs."""
    async with asyncio.timeout(60):
        while sum(info.worker_id == name for info in await client.list("running")) < least:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_rolling_upgrade_loses_and_repeats_no_token(redis_url, tmp_path):
    database = database_url(tmp_path)
    asked = [
        {
            "prompt": f"story {i}",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "seed": i,
            "metadata": {"i": str(i)},
        }
        for i in range(6)
    ]
    async with client_of(redis_url, database) as client, Redis.from_url(redis_url) as redis:
        jobs = [await client.submit(**fields) for fields in asked]
        for job in jobs[::2]:
            key = client.keys.job(job)
            payload = await redis.hget(key, "request")
            await redis.hset(key, mapping={"request": rewritten(payload), "future": "x"})
        listening = [asyncio.create_task(chunks_of(client, job)) for job in jobs]
        async with other_worker("same", redis_url, database) as first:
            await at_work(client, "same", 6)
            await asyncio.sleep(0.3)
            async with other_worker("next", redis_url, database):
                first.send_signal(signal.SIGTERM)  # mid-answer: the next continues its log
                await at_work(client, "next")
                assert "next" in {status.worker_id for status in await client.workers()}
                more = [await client.submit(**fields) for fields in asked]
                results = [await client.result(job, timeout=90) for job in (*jobs, *more)]
                streams = [await task for task in listening]
    assert {result.status for result in results} == {JobStatus.SUCCEEDED}
    assert {result.usage.completion_tokens for result in results} == {TOKENS}
    for (places, tokens, text), result, undisturbed in zip(
        streams, results[:6], results[6:], strict=True
    ):
        assert places == list(range(TOKENS))
        assert (tokens, text) == (result.token_ids, result.text)
        assert result.text == undisturbed.text
    with_sql = [result.job_id for result in results]
    async with client_of("redis://127.0.0.1:1/0", database) as offline:
        recorded = [await offline.result(job, timeout=30) for job in with_sql]
    assert [result.text for result in recorded] == [result.text for result in results]
