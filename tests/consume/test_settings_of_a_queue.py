"""What workers set for a whole queue binds its producers; what they set for themselves binds their claims."""

import time

import pytest

from api_client import AsyncClient, ClientOptions, InvalidRequest
from schemas.result import JobStatus
from tests.consume.queue import QUEUE, Queue, end_of, token

pytestmark = pytest.mark.redis

HOUR_MS = 3_600_000


async def remembered_ms(queue: Queue, key: str) -> int:
    return int(await queue.redis.pttl(queue.keys.idempotency("", key)))


async def test_a_larger_request_than_the_queue_takes_is_refused_before_it_is_stored(queue: Queue) -> None:
    await queue.worker(max_payload_bytes=2_000).open()
    small = await queue.submit(prompt="x" * 1_000)
    with pytest.raises(InvalidRequest, match=r"the request has \d{4} bytes; the queue's limit is 2000"):
        await queue.submit(prompt="x" * 2_000)
    with pytest.raises(InvalidRequest):
        await queue.client.submit_many([{"prompt": "fits"}, {"prompt": "x" * 2_000}])
    assert (await queue.client.depth()).num_queued == 1, "a refused call stores nothing"
    assert [delivery.job_id for delivery in await queue.worker().claim(5)] == [small]


async def test_a_key_lives_as_long_as_the_queues_workers_say(queue: Queue) -> None:
    await queue.submit(idempotency_key="before")
    assert 23 * HOUR_MS < await remembered_ms(queue, "before") <= 24 * HOUR_MS
    await queue.worker(idempotency_ttl_s=7_200).open()
    await queue.submit(idempotency_key="after")
    assert HOUR_MS < await remembered_ms(queue, "after") <= 2 * HOUR_MS


async def test_a_producer_may_say_otherwise(queue: Queue, redis_url: str) -> None:
    await queue.worker(idempotency_ttl_s=7_200).open()
    async with AsyncClient(redis_url, queue=QUEUE, options=ClientOptions(idempotency_ttl_s=60)) as client:
        await client.submit(prompt="x", idempotency_key="k")
    assert 0 < await remembered_ms(queue, "k") <= 60_000


async def test_the_key_of_a_job_that_starts_later_lives_from_its_start(queue: Queue, redis_url: str) -> None:
    """Or the same submit, repeated before the job has even begun, would be a second job."""
    async with AsyncClient(redis_url, queue=QUEUE, options=ClientOptions(idempotency_ttl_s=60)) as client:
        await client.submit(prompt="x", idempotency_key="k", not_before=time.time() + 3_600)
    assert HOUR_MS < await remembered_ms(queue, "k") <= HOUR_MS + 60_000


async def test_a_key_survives_its_jobs_end_and_goes_at_its_own(queue: Queue, redis_url: str) -> None:
    async with AsyncClient(redis_url, queue=QUEUE, options=ClientOptions(idempotency_ttl_s=1)) as client:
        first = await client.submit(prompt="x", idempotency_key="k")
        worker = queue.worker(result_ttl_s=1)
        (delivery,) = await worker.claim(1)
        await worker.finish([end_of(delivery)])
        key = queue.keys.idempotency("", "k")
        assert 0 < await queue.redis.pttl(key) <= 1_000, "the end of the job changes nothing"
        assert await client.submit(prompt="x", idempotency_key="k") == first
        await queue.redis.pexpire(key, 1)
        while await queue.redis.exists(key):
            pass
        assert await client.submit(prompt="x", idempotency_key="k") != first


async def test_a_job_whose_workers_keep_vanishing_is_set_aside(queue: Queue) -> None:
    """Also one that makes progress each time, which no crash count condemns. Drains and retries do not count."""
    job = await queue.submit(max_tokens=100)
    for round_ in range(3):
        for how in ("drained", "retried", "vanished"):
            worker = queue.worker(f"{how}-{round_}", max_deliveries=3)
            (delivery,) = await worker.claim(1)
            assert delivery.verdict == "run"
            if how == "drained":
                await worker.resign()
            elif how == "retried":
                await worker.retry(job, delivery.token, 0)
            else:
                await worker.append([token(delivery, len(delivery.log))])
                await queue.redis.delete(queue.keys.worker(worker.worker_id))
    worker = queue.worker(max_deliveries=3)
    (delivery,) = await worker.claim(0)
    assert (delivery.verdict, delivery.crashes, delivery.deliveries) == ("dead", 0, 10)
    await worker.finish([end_of(delivery, 3, JobStatus.DEAD)])
    assert await queue.client.redrive([job]) == [job]
    (again,) = await worker.claim(1)
    assert again.verdict == "run"
