"""Workers on one queue share its load, and one that is asked twice to end goes at once."""

import asyncio
import collections
import signal

import pytest

from tests.chaos.checker import Received, Wanted, violations
from tests.chaos.clients import listen
from tests.chaos.processes import WorkerProcess
from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.result import JobStatus

pytestmark = [pytest.mark.redis, pytest.mark.chaos]

NUM_JOBS = 96
LONG = {"prompt": "a long answer", "max_tokens": 400, "ignore_eos": True, "seed": 5}


async def test_workers_share_the_load_by_their_free_places(redis_url, tmp_path):
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
            jobs = await client.submit_many(requests)
            results = [await client.result(job, timeout=60) for job in jobs]
    assert {result.status for result in results} == {JobStatus.SUCCEEDED}
    done = collections.Counter(result.worker_id for result in results)
    assert min(done[name] for name in "abc") >= NUM_JOBS // 6, done


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
async def test_a_worker_in_a_hurry_returns_its_jobs_and_exits(redis_url, tmp_path, signals):
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
