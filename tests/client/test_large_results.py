"""Results above the limit of requests, read in every way; and one that cannot be read, beside
others.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.client.test_client import Threaded, collect
from tests.support.large import DAMAGED, NUM_TOKENS, large_result
from tests.support.queue import QUEUE, Queue, end_of
from tokenmill import AsyncClient, Client, UnreadableRecord
from tokenmill.bulk import job_queries
from tokenmill_schemas.result import JobStatus

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Any]:
    kind: Any = (
        Threaded(Client(redis_url, queue=QUEUE))
        if request.param == "sync"
        else AsyncClient(redis_url, queue=QUEUE)
    )
    yield kind
    await kind.close()


async def ended(queue: Queue, *, large: str, small: str) -> None:
    worker = queue.worker()
    for delivery in await worker.claim(2):
        end = end_of(delivery, 3)
        if delivery.job_id == large:
            end = dataclasses.replace(end, result=large_result(large))
        assert await worker.finish([end]) == [True]
    assert await queue.field(small, "state") == "succeeded"


async def test_a_large_result_is_read_as_any_other(client: Any, queue: Queue) -> None:
    job, small = await queue.submit(), await queue.submit()
    await ended(queue, large=job, small=small)
    assert await client.result(job, timeout=30) == large_result(job)
    assert (await client.status(job)).tokens == NUM_TOKENS
    chunks = await collect(client, job)
    assert [chunk.is_last for chunk in chunks] == [False] * NUM_TOKENS + [True]
    assert chunks[-2].logprobs == large_result(job).choices[0].logprobs[:1]  # type: ignore[index]


async def test_a_page_of_results_has_a_large_result_and_its_neighbours(
    queue: Queue, redis_url: str
) -> None:
    job, small = await queue.submit(), await queue.submit()
    await ended(queue, large=job, small=small)
    with Client(redis_url, queue=QUEUE) as client:
        ends = await asyncio.to_thread(job_queries.collect, client, [job, small])
        assert {end.job_id for end in ends.results} == {job, small}
        found = await asyncio.to_thread(lambda: list(job_queries.results(client, [job, small])))
        assert {end.job_id for end in found} == {job, small}


@pytest.mark.parametrize("is_hash", [True, False])
async def test_an_unreadable_record_does_not_fail_its_neighbours(
    queue: Queue, redis_url: str, is_hash: bool
) -> None:
    bad, good = await queue.submit(), await queue.submit()
    worker = queue.worker()
    for delivery in await worker.claim(2):
        await worker.finish([end_of(delivery, 3)])
    if is_hash:
        await queue.redis.hset(queue.keys.job(bad), "result", DAMAGED)
    else:
        await queue.redis.set(queue.keys.job(bad), "no hash")
    with Client(redis_url, queue=QUEUE) as client:
        ends = await asyncio.to_thread(job_queries.collect, client, [bad, good, "never"])
        assert ([end.job_id for end in ends.results], ends.unreadable, ends.unknown) == (
            [good],
            [bad],
            ["never"],
        )
        found = await asyncio.to_thread(lambda: list(job_queries.results(client, [bad, good])))
        assert [end.job_id for end in found] == [good]
        assert await asyncio.to_thread(job_queries.is_over, client, [bad, good]) == {
            bad: True,
            good: True,
        }
    await queue.redis.delete(queue.keys.job(bad))


@pytest.mark.parametrize("is_hash", [True, False])
async def test_an_unreadable_record_is_an_error_for_its_readers(
    client: Any, queue: Queue, is_hash: bool
) -> None:
    job = await queue.submit()
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    await worker.finish([end_of(delivery, 3, JobStatus.SUCCEEDED)])
    if is_hash:
        await queue.redis.hset(queue.keys.job(job), "result", DAMAGED)
    else:
        await queue.redis.set(queue.keys.job(job), "no hash")
    for call in (client.result(job, timeout=30), client.status(job), collect(client, job)):
        with pytest.raises(UnreadableRecord, match=f"the record of job {job} cannot be read"):
            await call
    await queue.redis.delete(queue.keys.job(job))
