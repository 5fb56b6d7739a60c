"""Every moment at which a worker can die, by enumeration: before and after each external effect."""

import asyncio
import signal
from pathlib import Path

import pytest
from redis import Redis

from tests.chaos import doomed_worker
from tests.chaos.checker import Received, Wanted, left_in_redis, states_of, violations
from tests.chaos.doomed_worker import (
    EFFECTS,
    NEEDS_DRAIN,
    NEEDS_ENGINE_PROCESS,
    POINTS,
    REASONS,
    effect_of,
)
from tests.chaos.workload import CRASH, NOTHING
from tests.support.worker import QUEUE, client_of, database_url, running_worker
from tokenmill.transport.connect import connect_async
from tokenmill_schemas.keys import Keys
from tokenmill_worker.queue import scripts
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = [pytest.mark.redis, pytest.mark.chaos, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
JOBS = [
    {
        "prompt": f"job {i}",
        "max_tokens": 25 + 3 * i,
        "ignore_eos": True,
        "seed": i,
        "session": f"s{i % 2}",
    }
    for i in range(4)
]
FAIL = {
    "prompt": "poison [[fail]]",
    "max_tokens": 5,
    "retry": {"max_attempts": 2, "backoff_ms": 50},
}
DEAD, FAILED = (Wanted(NOTHING, 0, frozenset({state})) for state in ("dead", "failed"))
# (point, at which of its calls)
MOMENTS = [
    *((point, 1) for point in POINTS),
    *((point, 7) for point in POINTS if point.endswith("append")),
    # by then there are jobs in hand
    *((point, 4) for point in POINTS if point.endswith("heartbeat")),
]


@pytest.fixture(scope="module")
def undisturbed():
    """The answers of an undisturbed run, by prompt; filled by the first test."""
    return {}


async def answers(redis_url, folder, undisturbed):
    if not undisturbed:
        database = database_url(folder)
        async with running_worker(redis_url, database), client_of(redis_url, database) as client:
            ids = [await client.submit(**job) for job in JOBS]
            results = [await client.result(job, timeout=60) for job in ids]
        undisturbed.update(
            {job["prompt"]: result for job, result in zip(JOBS, results, strict=True)}
        )
        with Redis.from_url(redis_url) as redis:
            redis.flushall()
    return undisturbed


async def listen(client, job, received):
    async for chunk in client.stream(job):
        received.receive(chunk)


@pytest.mark.parametrize(("point", "count"), MOMENTS)
async def test_no_token_or_job_is_lost_or_doubled_by_a_kill_at_any_point(
    redis_url, tmp_path, undisturbed, point, count
):
    (tmp_path / "calm").mkdir()
    calm = await answers(redis_url, tmp_path / "calm", undisturbed)
    database = database_url(tmp_path)
    in_process = point.endswith(NEEDS_ENGINE_PROCESS)
    expected, received = {}, {}
    async with client_of(redis_url, database) as client:
        for job in JOBS:
            expected[await client.submit(**job)] = Wanted.of(calm[job["prompt"]])
        if in_process:
            expected[await client.submit(**CRASH)] = DEAD
        if point.endswith("retry"):
            expected[await client.submit(**FAIL)] = FAILED
        received = {job: [Received(), Received()] for job in expected}
        early = [asyncio.create_task(listen(client, job, received[job][0])) for job in expected]
        await run_doomed(point, count, redis_url, database)
        # The doomed worker may die with one suspect alone in its hands: that is one crash which it
        # did not cause.
        limits = {"lease_seconds": 1.0, "max_num_seqs": 4, "max_crashes": 2 if in_process else 3}
        async with running_worker(
            redis_url, database, in_process=in_process, worker_id="survivor", **limits
        ):
            for job in expected:
                await client.result(job, timeout=60)
            await asyncio.wait_for(asyncio.gather(*early), 90)
            for job in expected:
                await listen(client, job, received[job][1])
    assert violations(database, expected, received) == []
    await sweep_doomed(redis_url)
    with Redis.from_url(redis_url) as redis:
        assert left_in_redis(redis, QUEUE, states_of(database, QUEUE)) == []


async def run_doomed(point, count, redis_url, database):
    """Run a worker until it kills itself. Points that need a drain get a SIGTERM first."""
    process = doomed_worker.start(doomed_worker.main, point, count, redis_url, database)
    if point.endswith(NEEDS_DRAIN):
        await wait_for_tokens(redis_url)
        process.terminate()
    await asyncio.to_thread(process.join, 90)
    status = process.exitcode
    assert status == -signal.SIGKILL, (
        f"the worker ended with {status} and never came to the point {point!r}"
    )


async def wait_for_tokens(redis_url):
    from redis.asyncio import Redis

    async with Redis.from_url(redis_url) as redis:
        for _ in range(600):
            if [key async for key in redis.scan_iter("*:log:*")]:
                return
            await asyncio.sleep(0.05)
    raise AssertionError("no job ever started")


async def sweep_doomed(redis_url):
    """Sweep the doomed worker's name, which stays until a sweep after its lease.

    No worker is left to sweep once the survivor has ended.
    """
    keys = Keys(QUEUE)
    async with connect_async(redis_url) as redis:
        await redis.delete(keys.worker("doomed"))
        await redis.hdel(keys.meta, "swept_ms", "sweep_from_ms")  # long ago
        sweeper = JobStream(redis, keys, "sweeper")
        assert await sweeper.claim(0) == []
        await sweeper.resign()


def test_the_kill_points_cover_every_script_and_the_architecture_table():
    """Every script that a worker may run is one of the effects, and every effect has a row in the
    table.
    """
    assert {
        effect_of(script, ("",) * 3) for script in scripts.ALL if script is not scripts.RELEASE
    } <= set(EFFECTS)
    assert {
        effect_of(scripts.RELEASE, ("", "", 0, how))
        for how in ("handover", "crash", "solo_crash", "retry")
    } == set(REASONS)
    table = (
        (ROOT / "ops" / "architecture.md").read_text("utf-8").split("## 7.")[1].split("\n## ")[0]
    )
    assert [point for point in POINTS if f"`{point}`" not in table] == []
