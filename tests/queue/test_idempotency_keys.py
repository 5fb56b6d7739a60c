"""An idempotency key stands while its job waits or runs, however long, and for its time after the
job's end.
"""

import time
from collections.abc import AsyncIterator

import pytest

from tests.support.queue import QUEUE, Queue, end_of
from tokenmill import AsyncClient, ClientOptions
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.redis

HOUR_MS = 3_600_000
FOR_EVER = -1  # what the server answers for a key without a time to live


@pytest.fixture
async def hasty(redis_url: str) -> AsyncIterator[AsyncClient]:
    """Yield a client whose idempotency keys last for a minute after a job's end."""
    async with AsyncClient(
        redis_url, queue=QUEUE, options=ClientOptions(idempotency_ttl_s=60)
    ) as client:
        yield client


async def remembered_ms(queue: Queue, key: str = "k") -> int:
    return int(await queue.redis.pttl(queue.keys.idempotency("", key)))


async def test_a_key_is_kept_while_its_job_waits_or_runs(queue: Queue, hasty: AsyncClient) -> None:
    first = await hasty.submit(prompt="x", idempotency_key="k")
    assert await remembered_ms(queue) == FOR_EVER
    assert await hasty.submit(prompt="x", idempotency_key="k") == first, "it waits"
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    assert await hasty.submit(prompt="x", idempotency_key="k") == first, "it runs"
    assert await remembered_ms(queue) == FOR_EVER
    await worker.finish([end_of(delivery)])
    assert 0 < await remembered_ms(queue) <= 60_000
    assert await hasty.submit(prompt="x", idempotency_key="k") == first, "it is just over"


async def test_the_key_of_a_scheduled_job_is_kept_until_the_job_ends(
    queue: Queue, hasty: AsyncClient
) -> None:
    await hasty.submit(prompt="x", idempotency_key="k", not_before=time.time() + 3_600)
    assert await remembered_ms(queue) == FOR_EVER


async def test_the_key_of_a_retried_or_orphaned_job_is_kept(
    queue: Queue, hasty: AsyncClient
) -> None:
    job = await hasty.submit(prompt="x", idempotency_key="k")
    worker = queue.worker("w1")
    (delivery,) = await worker.claim(1)
    await worker.retry(job, delivery.token, 0)
    await queue.worker("w2").claim(1)
    await queue.redis.delete(queue.keys.worker("w2"))
    await queue.worker("w3").claim(1)
    assert await remembered_ms(queue) == FOR_EVER


async def test_the_key_of_a_job_cancelled_while_waiting_expires_after_its_record(
    queue: Queue, hasty: AsyncClient
) -> None:
    job = await hasty.submit(prompt="x", idempotency_key="k")
    assert await queue.client.cancel(job) == "cancelled"
    assert await remembered_ms(queue) == FOR_EVER, "its row is not written yet"
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    await worker.finish([end_of(delivery, status=JobStatus.CANCELLED)])
    assert 0 < await remembered_ms(queue) <= 60_000


async def test_the_key_of_a_dead_job_is_kept_while_the_job_may_be_redriven(
    queue: Queue, hasty: AsyncClient
) -> None:
    job = await hasty.submit(prompt="x", idempotency_key="k")
    worker = queue.worker(dead_ttl_s=7_200)
    (delivery,) = await worker.claim(1)
    await worker.finish([end_of(delivery, status=JobStatus.DEAD)])
    assert HOUR_MS < await remembered_ms(queue) <= 2 * HOUR_MS
    assert await queue.client.redrive([job]) == [job]
    assert await remembered_ms(queue) == FOR_EVER, "it lives again"
    assert await hasty.submit(prompt="x", idempotency_key="k") == job
    (again,) = await worker.claim(1)
    await worker.finish([end_of(again)])
    assert 0 < await remembered_ms(queue) <= 60_000


async def test_a_key_is_kept_for_the_producer_s_time_or_the_queue_s(
    queue: Queue, redis_url: str
) -> None:
    worker = queue.worker(idempotency_ttl_s=7_200)
    await queue.submit(idempotency_key="a day")
    await worker.open()
    await queue.submit(idempotency_key="two hours")
    async with AsyncClient(
        redis_url, queue=QUEUE, options=ClientOptions(idempotency_ttl_s=60)
    ) as client:
        await client.submit(prompt="x", idempotency_key="a minute")
    await worker.finish([end_of(delivery) for delivery in await worker.claim(3)])
    assert 23 * HOUR_MS < await remembered_ms(queue, "a day") <= 24 * HOUR_MS
    assert HOUR_MS < await remembered_ms(queue, "two hours") <= 2 * HOUR_MS
    assert 0 < await remembered_ms(queue, "a minute") <= 60_000


async def test_an_expired_key_may_be_used_again(queue: Queue, hasty: AsyncClient) -> None:
    first = await hasty.submit(prompt="x", idempotency_key="k")
    worker = queue.worker(result_ttl_s=1)
    await worker.finish([end_of(delivery) for delivery in await worker.claim(1)])
    await queue.redis.delete(queue.keys.idempotency("", "k"))  # its time is up
    assert await hasty.submit(prompt="x", idempotency_key="k") != first
