"""Tests of clients that read a log which is missing or holds entries that are no chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.client.test_client import Threaded, collect
from tests.client.testing.players import assert_chunks
from tests.support.queue import QUEUE, Queue, appended, end_of, token
from tokenmill import AsyncClient, Client, ConfigurationError, UnreadableRecord
from tokenmill.operations.records import read_log
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import encode
from tokenmill_schemas.result import JobStatus

OTHER = {b"chunk": b"?"}, {b"else": b""}, {b"chunk": b""}


def entry(index: int, count: int = 1) -> tuple[bytes, dict[bytes, bytes]]:
    chunk = Chunk(job_id="job", index=index, token_ids=tuple(range(index, index + count)))
    return b"%d-0" % chunk.end, {b"chunk": encode(chunk)}


@pytest.mark.parametrize("other", OTHER)
def test_log_entries_that_are_no_chunks_are_skipped(other: dict[bytes, bytes]) -> None:
    log = [
        (b"0-1", other),
        entry(0),
        (b"1-1", other),
        (b"1-2", other),
        entry(1, 2),
        (b"9-0", other),
    ]
    assert [chunk.index for chunk in read_log(log)] == [0, 1]
    assert [chunk.index for chunk in read_log([(b"3-1", other), entry(3)], {0: 3})] == [3]


def test_a_token_missing_behind_an_unreadable_entry_raises() -> None:
    for log, have in (
        ([entry(0), (b"2-0", OTHER[0]), entry(2)], 0),
        ([(b"4-0", OTHER[0]), entry(4)], 3),
    ):
        with pytest.raises(UnreadableRecord, match=r"what follows token [13] is no chunk"):
            read_log(log, {0: have})


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Any]:
    kind: Any = (
        Threaded(Client(redis_url, queue=QUEUE))
        if request.param == "sync"
        else AsyncClient(redis_url, queue=QUEUE)
    )
    yield kind
    await kind.close()


@pytest.mark.redis
async def test_a_subscriber_waits_while_the_log_is_of_a_wrong_type(
    client: Any, queue: Queue
) -> None:
    job = await queue.submit()
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    await appended(worker, [token(delivery, 0), token(delivery, 1)])
    await queue.redis.set(queue.keys.log(job), "not a log")
    reading = asyncio.create_task(collect(client, job))
    await asyncio.sleep(0.3)
    assert not reading.done()
    assert (await client.status(job)).tokens == 0
    await worker.append([token(delivery, 2)])
    await appended(worker, [token(delivery, index) for index in range(3)])
    await worker.finish([end_of(delivery, 3)])
    assert_chunks(await reading, 3)


@pytest.mark.redis
async def test_a_job_cancelled_while_it_waited_has_a_result_despite_a_spoilt_log(
    client: Any, queue: Queue
) -> None:
    job = await queue.submit()
    await queue.redis.set(queue.keys.log(job), "not a log", ex=60)
    assert await client.cancel(job) == "cancelled"
    await queue.redis.set(queue.keys.log(job), "not a log", ex=60)
    result = await client.result(job, timeout=10)
    assert (result.status, result.choices) == (JobStatus.CANCELLED, ())


@pytest.mark.redis
async def test_a_server_error_while_reading_the_log_raises(queue: Queue, redis_url: str) -> None:
    job = await queue.submit()
    await queue.redis.execute_command(
        "ACL", "SETUSER", "reader", "on", ">secret", "~*", "&*", "+@all", "-xrange"
    )
    try:
        async with AsyncClient(
            redis_url.replace("://", "://reader:secret@"), queue=QUEUE
        ) as client:
            with pytest.raises(ConfigurationError, match="xrange"):
                await collect(client, job)
    finally:
        await queue.redis.execute_command("ACL", "DELUSER", "reader")
