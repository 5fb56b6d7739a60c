"""A client that gets no CPU for longer than its time limits, while replies wait in its sockets."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.exceptions import RedisError

from tests.queue.append.test_connection import ECHO, KEY
from tests.support.queue import QUEUE
from tests.support.waiting import until
from tokenmill import AsyncClient, ClientOptions, Link, QueueUnavailable
from tokenmill.transport import async_pubsub
from tokenmill.transport.connect import connect_async
from tokenmill.transport.repairs import at_most, wait_at_most
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.queue.append import PipelinedConnection

pytestmark = pytest.mark.redis

LIMIT_S = 0.5
FREEZE_S = 4 * LIMIT_S


@pytest.fixture
def slow(make_proxy, valkey, redis_url):
    """A proxy through which each reply comes after the client has stopped running."""
    proxy = make_proxy(valkey.port)
    proxy.delay(LIMIT_S / 5)
    return proxy


@contextlib.asynccontextmanager
async def client_through(proxy) -> AsyncIterator[AsyncClient]:
    link = Link(timeout_s=LIMIT_S, connect_timeout_s=LIMIT_S)
    async with AsyncClient(proxy.url, queue=QUEUE, options=ClientOptions(link=link)) as client:
        yield client


async def begin(*tasks: asyncio.Task[Any]) -> None:
    """Let tasks send their commands, then stop the loop for longer than their limits."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    time.sleep(FREEZE_S)  # noqa: ASYNC251 - the loop has to stand still


async def test_a_reply_that_came_during_a_pause_of_the_loop_is_read(slow) -> None:
    async with client_through(slow) as client:
        await client.depth()  # connects
        call = asyncio.create_task(client.depth())
        await begin(call)
        assert (await call).num_queued == 0


async def test_a_connection_that_opened_during_a_pause_of_the_loop_is_used(slow) -> None:
    async with client_through(slow) as client:
        call = asyncio.create_task(client.depth())
        await begin(call)
        assert (await call).num_queued == 0


async def test_a_pipelined_connection_reads_a_reply_that_came_during_a_pause_of_the_loop(
    slow,
) -> None:
    redis = connect_async(slow.url, Link(timeout_s=LIMIT_S))
    line = PipelinedConnection(redis)
    await line.call(ECHO, KEY, "a")
    call = asyncio.create_task(line.call(ECHO, KEY, "b"))
    await begin(call)
    assert await call == b"b"
    await redis.aclose()


async def test_a_subscription_confirmed_during_a_pause_of_the_loop_begins(
    slow, monkeypatch
) -> None:
    monkeypatch.setattr(async_pubsub, "_CONFIRM_S", LIMIT_S)
    redis = connect_async(slow.url)
    pubsub = async_pubsub.PubSubMultiplexer(redis)
    await pubsub.subscribe("first")
    subscribing = asyncio.create_task(pubsub.subscribe("second"))
    await begin(subscribing)
    await subscribing
    await pubsub.close()
    await redis.aclose()


async def test_no_stream_of_a_starved_client_raises(slow, redis_url) -> None:
    async with client_through(slow) as client, AsyncClient(redis_url, queue=QUEUE) as quick:
        jobs = await client.submit_many([{"prompt": "x"}] * 200)

        async def last(job: str) -> JobStatus | None:
            return [chunk.status async for chunk in client.stream(job)][-1]

        streams = [asyncio.create_task(last(job)) for job in jobs]
        await begin(*streams)
        for _ in range(3):
            await asyncio.sleep(LIMIT_S / 5)
            time.sleep(FREEZE_S)  # noqa: ASYNC251 - again, at other moments of their start
        for job in jobs:
            await quick.cancel(job)
        assert set(await asyncio.gather(*streams)) == {JobStatus.CANCELLED}


@pytest.mark.parametrize("use", ["call", "held", "subscribe"])
async def test_a_call_to_a_silent_server_raises_after_the_limit(slow, monkeypatch, use) -> None:
    monkeypatch.setattr(async_pubsub, "_CONFIRM_S", LIMIT_S)
    link = Link(timeout_s=LIMIT_S, connect_timeout_s=LIMIT_S)
    redis = connect_async(slow.url, link)
    line, pubsub = PipelinedConnection(redis), async_pubsub.PubSubMultiplexer(redis)
    await line.call(ECHO, KEY, "a")
    await redis.ping()
    await pubsub.subscribe("first")
    slow.freeze()
    uses: dict[str, Any] = {
        "call": redis.ping,
        "held": lambda: line.call(ECHO, KEY, "b"),
        "subscribe": lambda: pubsub.subscribe("second"),
    }
    with pytest.raises((RedisError, TimeoutError, QueueUnavailable), match=r"no reply|no answer"):
        await asyncio.wait_for(uses[use](), 60)
    slow.heal()
    await pubsub.close()
    await redis.aclose()


async def test_a_connection_that_does_not_open_raises_after_the_limit(
    make_proxy, valkey, redis_url
) -> None:
    proxy = make_proxy(valkey.port)
    proxy.freeze()
    async with client_through(proxy) as client:
        with pytest.raises(QueueUnavailable):
            await asyncio.wait_for(client.depth(), 60)


async def test_a_limit_counts_a_pause_of_the_loop_once() -> None:
    event = asyncio.Event()

    async def waiting() -> bool:
        async with at_most(LIMIT_S):
            await event.wait()
        return True

    task = asyncio.create_task(waiting())
    await begin(task)
    event.set()
    assert await task


async def test_a_limit_ends_a_wait_and_no_limit_does_not() -> None:
    with pytest.raises(TimeoutError):
        async with at_most(0.05):
            await asyncio.Event().wait()
    async with at_most(None):
        pass


async def test_an_event_that_was_set_while_the_loop_was_late_counts() -> None:
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(LIMIT_S / 5, event.set)
    task = asyncio.create_task(wait_at_most(event, LIMIT_S))
    await begin(task)
    assert await task


PROGRAM = """
import asyncio, sys
from tokenmill import AsyncClient, Client, ClientOptions, Link
options = ClientOptions(link=Link(timeout_s=0.5, connect_timeout_s=0.5), retry_for_s=0.0)
url, queue, job, how = sys.argv[1:]
def read():
    with Client(url, queue=queue, options=options) as client:
        print("reads", flush=True)
        return [chunk.status for chunk in client.stream(job)][-1]
async def read_async():
    async with AsyncClient(url, queue=queue, options=options) as client:
        print("reads", flush=True)
        return [chunk.status async for chunk in client.stream(job)][-1]
print(read() if how == "threads" else asyncio.run(read_async()), flush=True)
"""


@pytest.mark.parametrize("how", ["threads", "loop"])
@pytest.mark.parametrize("when", ["it connects", "it waits"])
async def test_a_client_process_continues_after_sigstop_and_sigcont(
    slow, redis_url, how, when
) -> None:
    async with AsyncClient(redis_url, queue=QUEUE) as client:
        job = str(await client.submit(prompt="x"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, slow.url, QUEUE, job, how,
            stdout=asyncio.subprocess.PIPE, env=dict(os.environ),  # noqa: TID251
        )  # fmt: skip
        assert process.stdout is not None
        assert await process.stdout.readline() == b"reads\n"
        if when == "it waits":

            async def listens() -> bool:
                counts = await client._redis.pubsub_numsub(client.keys.chunks(job))
                return bool(counts[0][1])

            await until(listens)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(FREEZE_S)
        await client.cancel(job)
        await asyncio.sleep(LIMIT_S)
        process.send_signal(signal.SIGCONT)
        assert await process.stdout.readline() == b"cancelled\n"
        assert await process.wait() == 0
