"""A worker that was frozen past its lease owns no job when it continues, and writes nothing."""

import asyncio
import signal

import pytest
from redis import Redis

from tests.chaos.checker import Received, Wanted, violations
from tests.chaos.clients import listen
from tests.chaos.processes import WorkerProcess
from tests.support.worker import client_of, database_url, running_worker

pytestmark = [pytest.mark.redis, pytest.mark.chaos]

LEASE = {"lease_seconds": 1.0}
LONG = {"prompt": "freeze me", "max_tokens": 250, "ignore_eos": True, "seed": 3}


async def wait_for_tokens(received, number):
    async with asyncio.timeout(90):
        while received.num_tokens < number:  # noqa: ASYNC110 - the listener knows no event
            await asyncio.sleep(0.02)


async def test_a_worker_that_resumes_after_its_lease_writes_nothing(redis_url, tmp_path):
    database = database_url(tmp_path)
    frozen = WorkerProcess(
        "frozen",
        redis_url,
        database,
        tmp_path / "log",
        model="synthetic?step_ms=10",
        drain_seconds=1.0,
        **LEASE,
    )
    try:
        async with client_of(redis_url, database) as client:
            job, received = await client.submit(**LONG), Received()
            listening = asyncio.create_task(listen(client, job, received))
            await wait_for_tokens(received, 30)
            frozen.send(signal.SIGSTOP)
            known = received.num_tokens
            async with running_worker(
                redis_url, database, model="synthetic?step_ms=10", worker_id="survivor", **LEASE
            ):
                await wait_for_tokens(received, known + 30)  # the survivor goes on
                frozen.send(signal.SIGCONT)
                result = await client.result(job, timeout=90)
                await asyncio.wait_for(listening, 90)
                again = await client.submit(**LONG)
                undisturbed = await client.result(again, timeout=90)
        frozen.send(signal.SIGTERM)
        assert await frozen.wait() == 0
    finally:
        frozen.end()
    assert "frozen for longer than its lease" in frozen.words
    assert result.worker_id == "survivor"
    wanted = Wanted.of(undisturbed)
    problems = violations(database, {job: wanted, again: wanted}, {job: [received]})
    assert problems == []
    with Redis.from_url(redis_url) as redis:
        assert not [key for key in redis.scan_iter() if b":log:" in key or b":owned:" in key]


async def test_a_lone_worker_that_resumes_claims_its_job_again_and_ignores_late_events(
    redis_url, tmp_path
):
    """The engine is not frozen: it continues the first delivery while the second is claimed."""
    database = database_url(tmp_path)
    worker = WorkerProcess(
        "lone", redis_url, database, tmp_path / "log", model="synthetic?step_ms=500",
        drain_seconds=1.0,
        in_process=True, **LEASE,
    )  # fmt: skip
    asked = LONG | {"max_tokens": 8}
    try:
        async with client_of(redis_url, database) as client:
            job, received = await client.submit(**asked), Received()
            listening = asyncio.create_task(listen(client, job, received))
            await wait_for_tokens(received, 2)
            worker.send(signal.SIGSTOP)
            await asyncio.sleep(2 * LEASE["lease_seconds"])
            worker.send(signal.SIGCONT)
            await client.result(job, timeout=90)
            await asyncio.wait_for(listening, 90)
            again = await client.submit(**asked)
            undisturbed = await client.result(again, timeout=90)
        worker.send(signal.SIGTERM)
        assert await worker.wait() == 0
    finally:
        worker.end()
    wanted = Wanted.of(undisturbed)
    assert violations(database, {job: wanted, again: wanted}, {job: [received]}) == []
