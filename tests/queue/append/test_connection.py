"""The appends' own connection: kept from call to call, and opened anew whatever happened to it."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.exceptions import ResponseError

from tests.support.queue import Queue, token
from tests.support.topologies import SentinelGroup
from tests.support.valkey import ControlledValkey
from tests.support.waiting import until
from tokenmill.transport.connect import SERVER_TROUBLE, Link, connect_async
from tokenmill.transport.scripts import Script
from tokenmill_worker.queue.append import PipelinedConnection

pytestmark = pytest.mark.redis

KEY = "tm:{q}:meta"


def script(text: str) -> Script:
    return Script("test", text, hashlib.sha1(text.encode()).hexdigest())


ECHO = script("return ARGV[1]")
FAIL = script("return redis.error_reply('WRONG on purpose')")


@asynccontextmanager
async def held(url: str, timeout_s: float = 5.0) -> AsyncIterator[tuple[PipelinedConnection, Any]]:
    client = connect_async(url, Link(timeout_s=timeout_s))
    try:
        yield PipelinedConnection(client), client
    finally:
        await client.aclose()


@asynccontextmanager
async def held_on(
    server: ControlledValkey, timeout_s: float = 5.0
) -> AsyncIterator[PipelinedConnection]:
    """Yield an open connection to a server that belongs to the test."""
    async with held(server.url, timeout_s) as (line, _):
        await line.call(ECHO, KEY, "a")
        yield line


def num_pending(line: PipelinedConnection) -> int:
    return 0 if line._current is None else len(line._current._pending)


async def num_clients(client: Any) -> int:
    return len([entry for entry in await client.client_list() if entry["cmd"] != "client|list"])


async def test_calls_share_one_connection_and_reply_in_order(redis_url: str) -> None:
    async with held(redis_url) as (line, client):
        before = await num_clients(client)
        replies = await asyncio.gather(*(line.call(ECHO, KEY, str(number)) for number in range(50)))
        assert replies == [str(number).encode() for number in range(50)]
        assert await num_clients(client) == before + 1


async def test_a_script_that_the_server_lost_is_loaded_again(redis_url: str) -> None:
    async with held(redis_url) as (line, client):
        assert await line.call(ECHO, KEY, "a") == b"a"
        await client.script_flush()
        assert await line.call(ECHO, KEY, "b") == b"b"


async def test_a_script_error_keeps_the_connection(redis_url: str) -> None:
    async with held(redis_url) as (line, client):
        await line.call(ECHO, KEY, "a")
        before = await num_clients(client)
        with pytest.raises(ResponseError, match="on purpose"):
            await line.call(FAIL, KEY)
        assert await line.call(ECHO, KEY, "b") == b"b"
        assert await num_clients(client) == before


async def test_a_connection_cut_while_idle_is_replaced(redis_url: str) -> None:
    async with held(redis_url) as (line, client):
        await line.call(ECHO, KEY, "a")
        await client.client_kill_filter(_type="normal", skipme=True)
        await until(lambda: line._current is not None and line._current.is_over)
        assert await line.call(ECHO, KEY, "b") == b"b"


async def test_a_connection_cut_during_calls_fails_them(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    server = make_valkey(persistent=False)
    async with held_on(server) as line:
        server.freeze()
        calls = [asyncio.create_task(line.call(ECHO, KEY, str(number))) for number in range(3)]
        await until(lambda: num_pending(line) == 3)
        server.restart(crash=True)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, SERVER_TROUBLE)
        assert await line.call(ECHO, KEY, "b") == b"b"


async def test_the_late_reply_of_an_abandoned_call_is_dropped(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    """A late reply is dropped, after a cancelled call as after one that took too long."""
    server = make_valkey(persistent=False)
    async with held_on(server, timeout_s=2.0) as line:
        server.freeze()
        cancelled = asyncio.create_task(line.call(ECHO, KEY, "b"))
        await until(lambda: num_pending(line) == 1)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        later = asyncio.create_task(line.call(ECHO, KEY, "c"))
        await until(lambda: num_pending(line) == 2)
        server.thaw()
        assert await later == b"c"
        server.freeze()
        with pytest.raises(TimeoutError):
            await line.call(ECHO, KEY, "d")
        server.thaw()
        assert await line.call(ECHO, KEY, "e") == b"e"


async def test_a_push_message_is_not_taken_for_a_reply(redis_url: str) -> None:
    async with held(redis_url) as (line, client):
        await line.call(ECHO, KEY, "a")
        assert line._current is not None
        # the server reports every key that changes
        await line._current.call("CLIENT", "TRACKING", "ON", "BCAST")
        for number in range(5):
            await client.set(f"key{number}", number, ex=60)
            assert await line.call(ECHO, KEY, str(number)) == str(number).encode()


async def test_a_call_s_timeout_counts_from_its_own_start(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    """A timer that an earlier call has set fires during it, and while no call is under way."""
    server, limit_s = make_valkey(persistent=False), 60.0
    async with held_on(server, limit_s) as line:
        assert line._current is not None
        server.freeze()
        late = asyncio.create_task(line.call(ECHO, KEY, "b"))
        await until(lambda: num_pending(line) == 1)
        line._current._on_timeout(limit_s)
        server.thaw()
        assert await late == b"b"
        line._current._on_timeout(limit_s)
        assert await line.call(ECHO, KEY, "c") == b"c"


async def test_calls_succeed_after_a_restart_of_the_server(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    server = make_valkey(persistent=False)
    async with held_on(server) as line:
        server.restart()
        with pytest.raises(SERVER_TROUBLE):
            await line.call(ECHO, KEY, "b")
        assert await line.call(ECHO, KEY, "c") == b"c"


async def test_an_append_succeeds_after_its_connection_was_cut_while_idle(queue: Queue) -> None:
    worker = queue.worker()
    await queue.submit()
    (delivery,) = await worker.claim(1)
    await worker.append([token(delivery, 0)])
    await queue.redis.client_kill_filter(_type="normal", skipme=True)
    await worker.append([token(delivery, 1)])
    assert (await queue.client.status(delivery.job_id)).tokens == 2


@pytest.mark.slow
async def test_the_new_primary_is_found_through_the_sentinels(
    sentinel_group: SentinelGroup,
) -> None:
    async with held(sentinel_group.url) as (line, _):
        assert await line.call(ECHO, KEY, "a") == b"a"
        sentinel_group.fail_over()
        for _ in range(100):
            try:
                reply = await line.call(ECHO, KEY, "b")
                break
            except (*SERVER_TROUBLE, TimeoutError):
                await asyncio.sleep(0.1)
        assert reply == b"b"
