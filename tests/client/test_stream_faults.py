"""Streams while things break: connections cut, replies lost, messages missed, servers restarted,
records gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.client.test_client import Threaded, collect
from tests.client.testing.players import assert_chunks, playing
from tests.support.proxy import FaultProxy
from tests.support.queue import QUEUE, Queue, close_queue, end_of, open_queue, token
from tests.support.valkey import ControlledValkey
from tests.support.waiting import LONG_S, until
from tokenmill import AsyncClient, Client, ClientOptions, JobNotFound
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import encode
from tokenmill_schemas.result import JobResult

pytestmark = pytest.mark.redis
MakeProxy = Callable[[int], FaultProxy]
OPTIONS = ClientOptions(idle_s=0.3, retry_for_s=60)
FOR_EVER = 600.0  # until a reader looks at the log without a message


@pytest.fixture(params=["sync", "async"])
async def faulty(
    request: pytest.FixtureRequest, valkey: ControlledValkey, redis_url: str, make_proxy: MakeProxy
) -> AsyncIterator[tuple[Any, FaultProxy]]:
    """Yield a client behind a proxy, and the proxy."""
    proxy = make_proxy(valkey.port)
    if request.param == "sync":
        with Client(proxy.url, queue=QUEUE, options=OPTIONS) as client:
            yield Threaded(client), proxy
    else:
        async with AsyncClient(proxy.url, queue=QUEUE, options=OPTIONS) as aclient:
            yield aclient, proxy


async def test_repeated_connection_cuts_lose_and_double_no_token(
    faulty: tuple[Any, FaultProxy], queue: Queue
) -> None:
    client, proxy = faulty
    job = await queue.submit(max_tokens=150)
    async with playing(queue, pause_s=0.004):
        reading = asyncio.create_task(collect(client, job))
        for _ in range(6):
            await asyncio.sleep(0.1)
            proxy.cut()
        assert_chunks(await reading, 150)


async def test_a_connection_cut_does_not_count_towards_the_stream_s_timeout(
    faulty: tuple[Any, FaultProxy], queue: Queue
) -> None:
    """The time limit counts from the last token, not from the beginning."""
    client, proxy = faulty
    job = await queue.submit(max_tokens=150)

    async def read() -> list[Chunk]:
        return [chunk async for chunk in client.stream(job, timeout=2.5)]

    async with playing(queue, pause_s=0.02):
        reading = asyncio.create_task(read())
        await asyncio.sleep(2.7)
        proxy.cut(refuse=True)
        await asyncio.sleep(0.2)
        proxy.heal()
        assert_chunks(await reading, 150)


async def test_a_server_unreachable_for_a_while_loses_and_doubles_no_token(
    faulty: tuple[Any, FaultProxy], queue: Queue
) -> None:
    client, proxy = faulty
    job = await queue.submit(max_tokens=60)
    async with playing(queue, pause_s=0.01):
        reading = asyncio.create_task(collect(client, job))
        waiting = asyncio.create_task(client.result(job, timeout=60))
        await asyncio.sleep(0.3)
        proxy.cut(refuse=True)
        await asyncio.sleep(0.8)
        proxy.heal()
        assert_chunks(await reading, 60)
        assert (await waiting).token_ids == tuple(range(60))


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_new_subscription_reads_the_log_at_once(
    queue: Queue, redis_url: str, kind: str
) -> None:
    """A new subscription looks up at once what was appended while there was none.

    It does not wait for `idle_s` of silence.
    """
    patient = ClientOptions(idle_s=FOR_EVER)
    client: Any = AsyncClient(redis_url, queue=QUEUE, options=patient)
    if kind == "sync":
        client = Threaded(Client(redis_url, queue=QUEUE, options=patient))
    job = await queue.submit()
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    stream = client.stream(job)
    async with queue.followed():
        first = asyncio.create_task(anext(stream))
    item = token(delivery, 0)
    # in the log, and never published
    await worker.append([msgspec.structs.replace(item, checkpoint=True)])
    assert await queue.redis.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB")
    async with asyncio.timeout(LONG_S):
        received = [await first]
        await worker.finish([end_of(delivery, 1)])
        received += [chunk async for chunk in stream]
    assert_chunks(received, 1)
    await client.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_the_reader_s_own_time_does_not_count_towards_the_timeout(
    queue: Queue, redis_url: str, kind: str
) -> None:
    """The reader takes longer than the time limit over a chunk from the log, and over a published
    one.
    """
    client: Any = (
        AsyncClient(redis_url, queue=QUEUE)
        if kind == "async"
        else Threaded(Client(redis_url, queue=QUEUE))
    )
    job = await queue.submit()
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    await worker.append([token(delivery, 0)])
    received = []
    async for chunk in client.stream(job, timeout=1.5):
        received.append(chunk)
        if chunk.index == 0:
            await worker.append([token(delivery, 1)])
            await asyncio.sleep(1.6)
        elif chunk.index == 1:
            await queue.redis.execute_command("CLIENT", "KILL", "TYPE", "PUBSUB")
            await asyncio.sleep(1.6)
            await worker.finish([end_of(delivery, 2)])
    assert_chunks(received, 2)
    await client.close()


async def test_a_submit_repeated_after_a_lost_reply_makes_no_second_job(
    faulty: tuple[Any, FaultProxy], queue: Queue
) -> None:
    client, proxy = faulty
    await client.depth()  # connected
    proxy.lose_replies(1)
    job = await client.submit(prompt="x")
    assert (await queue.client.depth()).num_queued == 1
    assert [delivery.job_id for delivery in await queue.worker().claim(2)] == [job]


@pytest.mark.parametrize("missed", [[3], [0], [9], [2, 3, 4], list(range(10))])
async def test_tokens_of_lost_messages_are_read_from_the_log(
    queue: Queue, missed: list[int], redis_url: str
) -> None:
    """The worker logs everything; some of it is never published."""
    job = await queue.submit()
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    async with AsyncClient(redis_url, queue=QUEUE, options=OPTIONS) as client:
        async with queue.followed():
            reading = asyncio.create_task(collect(client, job))
        for i in range(10):
            item = token(delivery, i)
            await worker.append([msgspec.structs.replace(item, checkpoint=i in missed)])
            await asyncio.sleep(0.005)
        await worker.finish([end_of(delivery, 10)])
        assert_chunks(await reading, 10)


async def test_foreign_and_repeated_messages_change_nothing(queue: Queue, redis_url: str) -> None:
    job = await queue.submit()
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    async with AsyncClient(redis_url, queue=QUEUE, options=OPTIONS) as client:
        async with queue.followed():
            reading = asyncio.create_task(collect(client, job))
        await worker.append([token(delivery, 0)])
        for chunk in (
            token(delivery, 0).chunk,
            Chunk(job_id=job, index=5, token_ids=(9,)),
            token(delivery, 0).chunk,
        ):
            await queue.redis.publish(queue.keys.chunks(job), encode(chunk))
        await worker.append([token(delivery, 1)])
        await worker.finish([end_of(delivery, 2)])
        assert_chunks(await reading, 2)


async def test_a_subscriber_slower_than_the_servers_limit_recovers(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    """The server drops it at its output-buffer limit; the log has what it missed."""
    server = make_valkey(
        persistent=False, settings={"client-output-buffer-limit": "pubsub 64kb 32kb 1"}
    )
    queue = await open_queue(server.url)
    job = await queue.submit()
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    with Client(server.url, queue=QUEUE, options=OPTIONS) as client:
        stream = client.stream(job, timeout=60)
        await worker.append([token(delivery, 0)])
        received = [await asyncio.to_thread(next, stream)]
        for i in range(1, 400):  # 40 MB unread: more than the sockets' buffers take
            text = f"{i} " + "x" * 100_000
            await worker.append([token(delivery, i, text=text)])
        received += await asyncio.to_thread(lambda: [next(stream) for _ in range(399)])
        stream.close()  # type: ignore[attr-defined]
        with server.client() as admin:
            assert int(admin.info("stats")["client_output_buffer_limit_disconnections"]) >= 1
    assert [i for chunk in received for i in chunk.token_ids] == list(range(400))
    await close_queue(queue)


async def test_a_restart_of_the_server_loses_and_doubles_no_token(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    server = make_valkey(settings={"appendfsync": "always"})
    queue = await open_queue(server.url)
    async with AsyncClient(server.url, queue=QUEUE, options=OPTIONS) as client:
        job = await client.submit(prompt="x", max_tokens=80)
        async with playing(queue, pause_s=0.01):
            reading = asyncio.create_task(collect(client, job))
            await asyncio.sleep(0.3)
            await asyncio.to_thread(server.restart, crash=True)
            assert_chunks(await reading, 80)
    await close_queue(queue)


class Database:
    """Has one result, and counts how often it was asked."""

    def __init__(self) -> None:
        self.result: JobResult | None = None
        self.asked = 0

    def get(self, job_id: str) -> JobResult | None:
        self.asked += 1
        return self.result if self.result is not None and self.result.job_id == job_id else None

    def close(self) -> None:
        pass


class WithDatabase(AsyncClient):
    """Looks results up in an object of the test's own."""

    def __init__(self, url: str, database: Database) -> None:
        super().__init__(url, queue=QUEUE, options=OPTIONS, database="sqlite:///unused.db")
        self._results = database  # type: ignore[assignment]


async def test_a_job_deleted_from_redis_is_read_from_the_database(
    queue: Queue, redis_url: str
) -> None:
    job = await queue.submit()
    worker, database = queue.worker(), Database()
    (delivery,) = await worker.claim(1)
    finished = end_of(delivery, 12)
    await worker.finish([finished])
    database.result = finished.result
    await queue.redis.delete(queue.keys.job(job))
    async with WithDatabase(redis_url, database) as client:
        assert (await client.result(job)).token_ids == tuple(range(12))
        assert (await client.status(job)).status == "succeeded"
        assert await client.cancel(job) == "succeeded"
        assert_chunks(await collect(client, job), 12)
        assert_chunks(await collect(client, job, starting_after=5), 12, first=5)
        with pytest.raises(JobNotFound):
            await client.result("another")


async def test_a_stream_whose_server_lost_its_data_ends_from_the_database(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    """The running job still reaches SQL; its subscriber gets the rest from there."""
    server, database = make_valkey(persistent=False), Database()
    queue = await open_queue(server.url)
    async with WithDatabase(server.url, database) as client:
        job = await client.submit(prompt="x")
        worker = queue.worker()
        (delivery,) = await worker.claim(1)
        await worker.append([token(delivery, 0), token(delivery, 1)])
        async with queue.followed():
            reading = asyncio.create_task(collect(client, job))
            waiting = asyncio.create_task(client.result(job, timeout=60))
        await asyncio.to_thread(server.restart, keep=False)
        await until(lambda: database.asked >= 4)
        assert not reading.done()
        database.result = end_of(delivery, 6).result
        assert_chunks(await reading, 6)
        assert (await waiting).token_ids == tuple(range(6))
    await close_queue(queue)


async def test_a_stream_of_checkpoints_yields_every_token(
    queue: Queue, redis_url: str, tmp_path: Path
) -> None:
    """`stream=False` publishes nothing; a subscriber gets the chunks from the log."""
    job = await queue.submit(stream=False)
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    async with AsyncClient(redis_url, queue=QUEUE, options=OPTIONS) as client:
        stream = client.stream(job, timeout=60)
        async with queue.followed():
            first = asyncio.create_task(anext(stream))
        item = token(delivery, 0, 8)
        await worker.append([msgspec.structs.replace(item, checkpoint=True)])
        received = [await first]
        await worker.finish([end_of(delivery, 10)])
        received += [chunk async for chunk in stream]
    assert [i for chunk in received for i in chunk.token_ids] == list(range(10))
    assert [len(chunk.token_ids) for chunk in received] == [8, 1, 1, 0]
