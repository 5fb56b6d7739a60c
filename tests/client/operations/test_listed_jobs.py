"""The list of jobs: which come first, and how much of the queue is read for it."""

import asyncio

import pytest

from tests.support.queue import Queue, close_queue, open_queue
from tokenmill_schemas.job import Priority

pytestmark = pytest.mark.redis


@pytest.fixture
async def queue(redis_url):
    opened = await open_queue(redis_url)
    yield opened
    await close_queue(opened)


async def num_commands(queue: Queue) -> int:
    stats = await queue.redis.info("commandstats")
    return sum(entry["calls"] for entry in stats.values())


async def listed(queue: Queue, *arguments, **options) -> list[str]:
    return [info.job_id for info in await queue.client.list(*arguments, **options)]


async def test_a_list_reads_in_proportion_to_its_limit(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x", "tenant": f"t{i}"} for i in range(600)])
    await queue.client.list(limit=20)  # connects
    before = await num_commands(queue)
    assert len(await listed(queue, limit=20)) == 20
    assert await num_commands(queue) - before < 250


async def test_entries_of_running_jobs_are_not_read_again(queue: Queue) -> None:
    """They lie before those of the waiting ones."""
    jobs = [str(job) for job in await queue.client.submit_many([{"prompt": "x"}] * 40)]
    worker = queue.worker()
    assert len(await worker.claim(30)) == 30
    assert await listed(queue, "queued", limit=5) == jobs[30:35]
    assert await listed(queue, "queued", limit=100) == jobs[30:]
    assert set(await listed(queue, "running", limit=100)) == set(jobs[:30])
    assert len(await listed(queue, limit=35)) == 35


async def test_waiting_jobs_are_listed_by_class_then_by_age(queue: Queue) -> None:
    jobs: dict[str, list[str]] = {}
    for priority in ["bulk", "standard", "interactive"] * 2:
        for tenant in ("a", "b", ""):
            job = await queue.submit(priority=priority, tenant=tenant)
            jobs.setdefault(priority, []).append(job)
            await asyncio.sleep(0.002)  # the server's clock has milliseconds
    in_order = jobs["interactive"] + jobs["standard"] + jobs["bulk"]
    for limit in (1, 6, 7, 12, 18, 100):
        assert len(await listed(queue, limit=limit)) == min(limit, 18)
    assert await listed(queue, limit=100) == in_order
    assert await listed(queue, limit=6) == jobs["interactive"]


async def test_jobs_of_one_tenant_fill_the_list_if_others_have_few(queue: Queue) -> None:
    for tenant, count in (("few", 1), ("many", 60), ("some", 4)):
        await queue.client.submit_many([{"prompt": "x", "tenant": tenant}] * count)
    assert len(await listed(queue, limit=50)) == 50
    assert len(await listed(queue, limit=1_000)) == 65


async def test_a_stream_without_a_group_is_listed_from_its_beginning(queue: Queue) -> None:
    job = await queue.submit()
    await queue.redis.xgroup_destroy(queue.keys.tenant_stream(Priority.STANDARD), "workers")
    assert await listed(queue) == [job]


async def test_no_job_is_listed_at_limit_zero(queue: Queue) -> None:
    await queue.submit()
    assert await listed(queue, limit=0) == []
