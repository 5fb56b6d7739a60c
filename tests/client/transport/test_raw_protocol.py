"""A connection hands on replies where they are read: whole, in order, and with one end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
from redis.exceptions import (
    ConnectionError,
    InvalidResponse,
    NoScriptError,
    ReadOnlyError,
    ResponseError,
)

from tests.support.valkey import ControlledValkey
from tests.support.waiting import until
from tokenmill.transport import raw_protocol
from tokenmill.transport.async_pubsub import PubSubMultiplexer
from tokenmill.transport.connect import Link, connect_async
from tokenmill.transport.raw_protocol import READ_BYTES, RawRedisProtocol
from tokenmill.transport.scripts import CANCEL
from tokenmill.transport.sync_pubsub import Signal
from tokenmill_worker.queue.append import PipelinedConnection

pytestmark = pytest.mark.redis


class ReadReplies:
    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.ends: list[Exception] = []

    async def until(self, replies: int = 0, ends: int = 0) -> None:
        await until(lambda: len(self.replies) >= replies and len(self.ends) >= ends)


@asynccontextmanager
async def wired(url: str) -> AsyncIterator[tuple[RawRedisProtocol, ReadReplies, Any]]:
    """Yield a wire over one of the library's connections, a record of its callbacks, and the
    client.
    """
    client, read = connect_async(url, Link()), ReadReplies()
    connection = await client.connection_pool.get_connection()
    try:
        wire = RawRedisProtocol.over(connection, read.replies.append, read.ends.append)
        assert wire is not None
        yield wire, read, client
    finally:
        await connection.disconnect()
        await client.connection_pool.release(connection)
        await client.aclose()


async def test_replies_are_whole_and_in_the_order_of_the_commands(redis_url: str) -> None:
    async with wired(redis_url) as (wire, read, _):
        large = b"x" * (3 * READ_BYTES + 1)
        wire.send("ECHO", large)
        for number in range(100):
            wire.send("ECHO", number)
        await read.until(replies=101)
        assert read.replies == [large, *(b"%d" % number for number in range(100))]
        assert not read.ends


async def test_an_error_reported_by_the_server_is_passed_on_as_a_reply(redis_url: str) -> None:
    async with wired(redis_url) as (wire, read, _):
        wire.send("EVALSHA", "0" * 40, 0)
        wire.send("NONSENSE")
        wire.send("ECHO", "a")
        await read.until(replies=3)
        assert isinstance(read.replies[0], NoScriptError)
        assert isinstance(read.replies[1], ResponseError)
        assert read.replies[2] == b"a"


async def test_a_lost_connection_ends_once_and_refuses_further_commands(
    make_valkey: Callable[..., ControlledValkey],
) -> None:
    server = make_valkey(persistent=False)
    async with wired(server.url) as (wire, read, _):
        server.halt(signal.SIGKILL)
        await read.until(ends=1)
        with pytest.raises(ConnectionError):
            wire.send("PING")
        wire.end(ValueError("a second one"))
        await asyncio.sleep(0.05)
        assert len(read.ends) == 1
        assert isinstance(read.ends[0], ConnectionError)


async def test_replies_after_the_end_of_a_connection_are_dropped(redis_url: str) -> None:
    """Several replies arrive together, and the first one makes its owner end the connection."""
    async with wired(redis_url) as (wire, read, _):

        def only_one(reply: Any) -> None:
            read.replies.append(reply)
            wire.end(ValueError("enough"))

        wire._on_reply = only_one
        wire.send("ECHO", "a")
        wire.send("ECHO", "b")
        await read.until(ends=1)
        await asyncio.sleep(0.05)
        assert read.replies == [b"a"]


async def test_bytes_that_are_no_replies_end_the_connection() -> None:
    async def speak_nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(speak_nonsense, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    read = ReadReplies()
    try:
        RawRedisProtocol(writer.transport, ResponseError, read.replies.append, read.ends.append)
        await read.until(ends=1)
        assert isinstance(read.ends[0], InvalidResponse)
        assert not read.replies
    finally:
        writer.close()
        server.close()


async def test_a_connection_without_a_transport_is_used_through_the_library() -> None:
    fakeredis = pytest.importorskip("fakeredis")
    client = fakeredis.FakeAsyncRedis()
    connection = await client.connection_pool.get_connection()
    assert RawRedisProtocol.over(connection, lambda _: None, lambda _: None) is None
    await client.connection_pool.release(connection)
    await client.aclose()


async def test_the_installed_redis_py_has_the_private_attributes_that_are_read(
    redis_url: str,
) -> None:
    """A failure here means a new redis-py: without the fast path everything works, but each reply
    costs more CPU time.
    """
    client = connect_async(redis_url, Link())
    connection = await client.connection_pool.get_connection()
    try:
        for name in (raw_protocol.WRITER, raw_protocol.PARSER):
            assert hasattr(connection, name), (
                f"redis-py {redis.__version__} has no Connection.{name}, which the versions"
                f" {' to '.join(raw_protocol.TESTED_REDIS_PY)} have: see private_parts"
            )
        transport, make_error = raw_protocol.private_parts(connection)
        assert hasattr(transport, "set_protocol")
        assert isinstance(make_error("READONLY x"), ReadOnlyError)
    finally:
        await connection.disconnect()
        await client.connection_pool.release(connection)
        await client.aclose()


@pytest.mark.parametrize("name", ["WRITER", "PARSER"])
async def test_a_redis_py_without_these_attributes_uses_its_own_connection_and_logs_once(
    redis_url: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(raw_protocol, name, "_renamed")
    raw_protocol._log_once.cache_clear()
    client = connect_async(redis_url, Link())
    multiplexer = PubSubMultiplexer(client)
    try:
        calls = PipelinedConnection(client)
        for _ in range(3):
            reply = await calls.call(CANCEL, "tm:{q}:meta", "tm:{q}:", "PUBLISH", "nobody")
            assert reply == [b"unknown"]
        subscription = await multiplexer.subscribe("news")
        await client.publish("news", "b")
        while (message := await subscription.receive(5)) is Signal.MISSED:
            pass
        assert message == b"b"
        await subscription.close()
    finally:
        await multiplexer.close()
        await client.aclose()
    (record,) = [record for record in caplog.records if "redis-py" in record.getMessage()]
    assert "no attribute '_renamed'" in record.getMessage()
    assert " to ".join(raw_protocol.TESTED_REDIS_PY) in record.getMessage()
