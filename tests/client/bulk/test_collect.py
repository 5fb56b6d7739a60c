"""One call returns what has become of a page of jobs, on a real queue, also of unknown ones."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.support.queue import Queue, close_queue, end_of, open_queue
from tokenmill import Client
from tokenmill.bulk import job_queries
from tokenmill_schemas.job import JobRequest, Priority
from tokenmill_schemas.result import JobStatus

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


def line(number: int) -> JobRequest:
    return JobRequest(
        job_id=f"b-{number}", batch_id="b", prompt="x", priority=Priority.BULK, stream=False
    )


async def finish(redis_url: str, count: int) -> Queue:
    """Finish the first `count` of the waiting jobs; one more is running."""
    queue = await open_queue(redis_url)
    worker = queue.worker("w1")
    jobs = await worker.claim(credits=count + 1)
    assert await worker.finish([end_of(job, 3) for job in jobs[:count]]) == [True] * count
    return queue


async def collect(
    client: Client, names: Sequence[str], in_files: Sequence[str] = ()
) -> job_queries.Ends:
    return await asyncio.to_thread(job_queries.collect, client, names, in_files)


async def test_ended_jobs_come_with_results_and_unknown_jobs_are_listed(
    client: Client, redis_url: str
) -> None:
    await asyncio.to_thread(job_queries.submit_jobs, client, [line(number) for number in range(5)])
    queue = await finish(redis_url, 2)
    await asyncio.to_thread(job_queries.cancel, client, ["b-4"])
    ends = await collect(client, [f"b-{number}" for number in range(6)])
    assert [(end.job_id, end.status) for end in ends.results] == [
        ("b-0", JobStatus.SUCCEEDED),
        ("b-1", JobStatus.SUCCEEDED),
        ("b-4", JobStatus.CANCELLED),
    ]
    assert ends.unknown == ["b-5"]
    assert ends.results[0].usage.completion_tokens == 3
    await close_queue(queue)


async def test_collected_jobs_expire_in_the_queue_soon(client: Client, redis_url: str) -> None:
    await asyncio.to_thread(job_queries.submit_jobs, client, [line(number) for number in range(3)])
    queue = await finish(redis_url, 2)
    await collect(client, ["b-1", "b-2"], in_files=["b-0"])
    assert 0 < await queue.redis.ttl(client.keys.job("b-0")) <= job_queries.COLLECTED_TTL_S
    assert await queue.redis.ttl(client.keys.job("b-1")) > job_queries.COLLECTED_TTL_S
    assert await queue.redis.ttl(client.keys.job("b-2")) == -1
    await close_queue(queue)


async def test_results_beyond_a_full_reply_come_with_the_next_call(
    client: Client, redis_url: str
) -> None:
    await asyncio.to_thread(job_queries.submit_jobs, client, [line(number) for number in range(4)])
    queue = await finish(redis_url, 3)
    small = await asyncio.to_thread(job_queries.collect, client, ["b-0", "b-1", "b-2"], max_bytes=1)
    assert [end.job_id for end in small.results] == ["b-0"]  # one goes through, however large
    rest = await collect(client, ["b-1", "b-2"])
    assert [end.job_id for end in rest.results] == ["b-1", "b-2"]
    await close_queue(queue)
