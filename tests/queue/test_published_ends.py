"""The last chunk of a job is published once, also if the job ended while it waited."""

import asyncio

import pytest

from tests.support.queue import Queue, end_of
from tokenmill_schemas.codec import decode_chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.redis


async def published(queue: Queue, pubsub) -> list[JobStatus | None]:
    """Return the states of the chunks that were published until now."""
    await queue.redis.ping()
    found = []
    while (message := await pubsub.get_message(timeout=0.05)) is not None:
        found.append(decode_chunk(message["data"]).status)
    return found


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_the_end_of_a_waiting_job_is_published_once(queue: Queue, how: str) -> None:
    job = await queue.submit(deadline=3600)
    async with queue.redis.pubsub() as pubsub:
        await pubsub.subscribe(queue.keys.chunks(job))
        await pubsub.get_message(timeout=5)
        if how == "cancelled":
            await queue.client.cancel(job)
        else:
            await queue.pass_deadline(job)
            await queue.worker("w2").heartbeat(WorkerStatus(worker_id="w2"))
        assert await published(queue, pubsub) == [JobStatus(how)]
        (delivery,) = await queue.worker().claim(1)
        assert delivery.outcome == how
        await queue.worker().finish([end_of(delivery, status=JobStatus(how))])
        assert await published(queue, pubsub) == [], "nor at its acknowledgement"


@pytest.mark.parametrize("how", ["cancelled", "expired"])
async def test_the_end_of_a_returned_job_is_published_by_its_acknowledgement(
    queue: Queue, how: str
) -> None:
    """No script has ended it: the worker that claims it does."""
    job = await queue.submit(deadline=3600)
    (first,) = await queue.worker().claim(1)
    await queue.worker().release([(job, first.token, False)])
    async with queue.redis.pubsub() as pubsub:
        await pubsub.subscribe(queue.keys.chunks(job))
        await pubsub.get_message(timeout=5)
        if how == "cancelled":
            await queue.client.cancel(job)
        else:
            await queue.pass_deadline(job)
        (delivery,) = await queue.worker().claim(1)
        assert (delivery.outcome, await published(queue, pubsub)) == (how, [])
        await queue.worker().finish([end_of(delivery, status=JobStatus(how))])
        assert await published(queue, pubsub) == [JobStatus(how)]


async def test_a_stream_of_a_job_ended_while_waiting_ends_before_the_record(
    queue: Queue,
) -> None:
    """Early and late subscribers both, although the record is not published."""
    job = await queue.submit()

    async def last() -> JobStatus | None:
        return [chunk.status async for chunk in queue.client.stream(job, timeout=60)][-1]

    early = asyncio.create_task(last())
    while not (await queue.redis.pubsub_numsub(queue.keys.chunks(job)))[0][1]:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await queue.client.cancel(job)
    assert await early == await last() == JobStatus.CANCELLED
    (delivery,) = await queue.worker().claim(1)
    await queue.worker().finish([end_of(delivery, status=JobStatus.CANCELLED)])
    assert await last() == JobStatus.CANCELLED
