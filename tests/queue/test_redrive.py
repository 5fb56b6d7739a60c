"""Redrive on a real server: a new life without the old deadline, and a dead-letter stream that is
read page by page.
"""

from __future__ import annotations

import pytest

from tests.support.queue import Queue, end_of
from tokenmill.transport.scripts import REDRIVE, call_async
from tokenmill_schemas.codec import decode_request
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.redis

PAGE = 500  # of redrive.lua


async def dead(queue: Queue, count: int = 1, **fields: object) -> list[str]:
    jobs = [await queue.submit(**fields) for _ in range(count)]
    worker = queue.worker("gravedigger")
    for delivery in await worker.claim(count):
        await worker.finish([end_of(delivery, status=JobStatus.DEAD)])
    return jobs


async def test_a_redriven_job_has_no_deadline(queue: Queue) -> None:
    (job,) = await dead(queue, deadline=3_600.0)
    await queue.pass_deadline(job)
    assert await queue.redis.ttl(queue.keys.job(job)) > 0
    assert await queue.client.redrive([job]) == [job]
    assert await queue.redis.ttl(queue.keys.job(job)) == -1, "it lives as long as it waits"
    (delivery,) = await queue.worker().claim(1)
    assert (delivery.outcome, delivery.is_redriven) == ("run", True)
    assert decode_request(delivery.payload).deadline_ms is not None, (
        "the request stays as it was submitted"
    )
    assert await queue.redis.zscore(queue.keys.deadlines, job) is None


async def test_a_job_that_was_not_redriven_keeps_its_deadline(queue: Queue) -> None:
    await queue.submit(deadline=3_600.0)
    (delivery,) = await queue.worker().claim(1)
    assert not delivery.is_redriven


async def test_dead_letters_older_than_their_ttl_are_dropped_when_another_is_added(
    queue: Queue,
) -> None:
    await queue.redis.xadd(queue.keys.dead, {"job": "old"}, id="1-0")
    (job,) = await dead(queue)
    assert [letter[b"job"] for _, letter in await queue.redis.xrange(queue.keys.dead)] == [
        job.encode()
    ]


async def bury_strangers(queue: Queue, count: int) -> None:
    """Entries of jobs whose hashes are gone."""
    async with queue.redis.pipeline(transaction=False) as pipeline:
        for number in range(count):
            pipeline.xadd(queue.keys.dead, {"job": f"gone-{number}"})
        await pipeline.execute()


async def test_a_redrive_call_reads_one_page(queue: Queue) -> None:
    await bury_strangers(queue, PAGE + 10)
    (job,) = await dead(queue)
    head = (queue.keys.meta, queue.keys.base, "PUBLISH")
    after, *revived = await call_async(queue.redis, REDRIVE, *head, 10, "-", job)
    assert after.startswith(b"(")
    assert revived == [], "the job is behind the first page"
    assert await queue.redis.xlen(queue.keys.dead) == PAGE + 11, (
        "entries that nobody asked for stay"
    )
    end, *revived = await call_async(queue.redis, REDRIVE, *head, 10, after, job)
    assert (end, revived) == (b"", [job.encode()])


async def test_a_redrive_call_at_its_limit_returns_the_position_for_the_next(queue: Queue) -> None:
    jobs = [name.encode() for name in await dead(queue, 2)]
    head = (queue.keys.meta, queue.keys.base, "PUBLISH", 1)
    after, *first = await call_async(queue.redis, REDRIVE, *head, "-")
    end, *second = await call_async(queue.redis, REDRIVE, *head, after)
    assert (first, second, end) == (jobs[:1], jobs[1:], b"")


@pytest.mark.parametrize("names_them", [True, False])
async def test_jobs_on_a_later_page_are_found(queue: Queue, names_them: bool) -> None:
    await bury_strangers(queue, PAGE + 10)
    jobs = await dead(queue, 3)
    assert await queue.client.redrive(jobs if names_them else None) == jobs
    assert sorted(delivery.job_id for delivery in await queue.worker().claim(10)) == sorted(jobs)


async def test_more_than_a_page_is_redriven_in_order_up_to_the_limit(queue: Queue) -> None:
    jobs = await dead(queue, PAGE + 20)
    assert await queue.client.redrive(limit=PAGE + 5) == jobs[: PAGE + 5]
    assert await queue.client.redrive() == jobs[PAGE + 5 :]
    assert await queue.client.redrive() == []
