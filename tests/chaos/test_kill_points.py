"""Every moment at which a worker can die, by enumeration: before and after each external effect."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from schemas.chunk import Chunk
from tests.chaos.checker import Told, Wanted, violations
from tests.chaos.doomed_worker import POINTS
from tests.support.worker import client_of, database_url, running_worker

pytestmark = [pytest.mark.redis, pytest.mark.chaos, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
JOBS = [{"prompt": f"job {i}", "max_tokens": 25 + 3 * i, "ignore_eos": True, "seed": i} for i in range(4)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The answers that no fault touched, by prompt; filled by the first test."""
    return {}


async def answers(redis_url, folder, undisturbed):
    if not undisturbed:
        database = database_url(folder)
        async with running_worker(redis_url, database), client_of(redis_url, database) as client:
            ids = [await client.submit(**job) for job in JOBS]
            results = [await client.result(job, timeout=60) for job in ids]
        undisturbed.update({job["prompt"]: result for job, result in zip(JOBS, results, strict=True)})
    return undisturbed


async def listen(client, job, told):
    async for chunk in client.stream(job):
        told.hear(chunk)


@pytest.mark.parametrize(
    ("point", "count"), [*((point, 1) for point in POINTS), *((point, 7) for point in POINTS if "append" in point)]
)
async def test_nothing_is_lost_or_told_twice(redis_url, tmp_path, undisturbed, point, count):
    (tmp_path / "calm").mkdir()
    expected_by_prompt = await answers(redis_url, tmp_path / "calm", undisturbed)
    database = database_url(tmp_path)
    async with client_of(redis_url, database) as client:
        ids = [await client.submit(**job) for job in JOBS]
        told = {job: [Told(), Told()] for job in ids}
        early = [asyncio.create_task(listen(client, job, told[job][0])) for job in ids]
        await run_doomed(point, count, redis_url, database)
        async with running_worker(redis_url, database, worker_id="survivor", lease_seconds=1.0):
            for job in ids:
                await client.result(job, timeout=60)
            await asyncio.wait_for(asyncio.gather(*early), 30)
            for job in ids:
                await listen(client, job, told[job][1])
    expected = {job: Wanted.of(expected_by_prompt[asked["prompt"]]) for job, asked in zip(ids, JOBS, strict=True)}
    assert violations(database, expected, told) == []
    assert_redis_is_clean(redis_url)


async def run_doomed(point, count, redis_url, database):
    """Until it has killed itself; giving jobs back takes a drain, so it is asked to end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.chaos.doomed_worker", point, str(count), redis_url, database, cwd=ROOT
    )
    if point.endswith("release"):
        await wait_for_tokens(redis_url)
        process.send_signal(signal.SIGTERM)
    status = await asyncio.wait_for(process.wait(), 90)
    assert status == -signal.SIGKILL, f"the worker ended with {status} and never came to the point {point!r}"


async def wait_for_tokens(redis_url):
    from redis.asyncio import Redis

    async with Redis.from_url(redis_url) as redis:
        for _ in range(600):
            if [key async for key in redis.scan_iter("*:log:*")]:
                return
            await asyncio.sleep(0.05)
    raise AssertionError("no job ever started")


def assert_redis_is_clean(redis_url):
    from redis import Redis

    with Redis.from_url(redis_url) as redis:
        left = [key for key in redis.scan_iter() if b":log:" in key or b":held:" in key]
        waiting = {key: redis.xlen(key) for key in redis.scan_iter("*:jobs:*")}
    assert not left
    assert not any(waiting.values())


def test_the_checker_sees_what_is_wrong(tmp_path):
    """A checker that cannot fail proves nothing."""
    database = database_url(tmp_path)

    told, late = Told(), Told()
    told.hear(Chunk(job_id="j", index=1, token_ids=(2,), text="b"))
    found = [str(item) for item in violations(database, {"j": Wanted((((1, 2), "ab"),), 3)}, {"j": [told, late]})]
    assert any("no result row" in line for line in found)
    assert any("no usage row" in line for line in found)
    assert any("a chunk at 1" in line for line in found)
    assert sum("no end" in line for line in found) == 2
