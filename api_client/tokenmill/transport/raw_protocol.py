"""Parses a connection's replies inside the event loop's read callback.

redis-py reads through a stream: each reply wakes a task, which calls a parser after everything else
that is ready. When a reply comes at every engine step, this costs more than processing it. redis-py
still opens and closes the connection (Sentinel, TLS, passwords): it receives every event of the
transport except the data.

Taking a connection over needs two private attributes of redis-py, which `private_parts` reads and
nothing else does. Without them every caller reads through redis-py, and one log line says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable
from typing import Any, Final

import hiredis
import redis
import redis.asyncio
from redis.exceptions import ConnectionError, InvalidResponse

from tokenmill.transport.connect import SERVER_TROUBLE
from tokenmill.transport.repairs import end_task
from tokenmill.transport.scripts import Argument

log = logging.getLogger(__name__)

READ_BYTES: Final = 64 * 1024
TESTED_REDIS_PY: Final = ("6.0.0", "8.1.0")  # the earliest and the latest
WRITER, PARSER = "_writer", "_parser"  # private attributes of redis.asyncio.Connection
_NOTHING: Final = object()


class RawRedisProtocol(asyncio.BufferedProtocol):
    """Replaces redis-py's protocol on an open connection.

    `on_reply` is called with each reply, undecoded; errors from the server are exceptions. `on_end`
    is called once, with the reason.
    """

    def __init__(
        self,
        transport: Any,
        make_error: Callable[[str], Exception],
        on_reply: Callable[[Any], None],
        on_end: Callable[[Exception], None],
    ) -> None:
        self._transport = transport
        self._on_reply = on_reply
        self._on_end: Callable[[Exception], None] | None = on_end
        self._buffer = bytearray(READ_BYTES)
        self._replies = hiredis.Reader(
            protocolError=InvalidResponse, replyError=make_error, notEnoughData=_NOTHING
        )
        self._library: Any = transport.get_protocol()
        transport.set_protocol(self)

    @classmethod
    def over(
        cls, connection: Any, on_reply: Callable[[Any], None], on_end: Callable[[Exception], None]
    ) -> RawRedisProtocol | None:
        """Take over an open connection on which no command is in progress.

        Returns None if redis-py must read it: if it has no transport, as in tests without a
        server, or if this redis-py has other private attributes.
        """
        transport, make_error = private_parts(connection)
        # uvloop's have no common base class
        if hasattr(transport, "set_protocol") and callable(make_error):
            return cls(transport, make_error, on_reply, on_end)
        return None

    @property
    def is_over(self) -> bool:
        return self._on_end is None

    def send(self, *command: Argument) -> None:
        """Send a command. Raises ConnectionError if the connection has ended."""
        if self._on_end is None:
            raise ConnectionError("the connection was lost while nothing was asked of it")
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # narrower than it is

    def end(self, error: Exception) -> None:
        """End the connection: no further reply is delivered."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(error)

    # ── what the transport calls ──

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        replies, on_reply = self._replies, self._on_reply
        replies.feed(self._buffer, 0, nbytes)  # type: ignore[arg-type]  # any bytes
        try:
            while self._on_end is not None and (reply := replies.gets(False)) is not _NOTHING:
                on_reply(reply)
        except InvalidResponse as error:
            self.end(error)

    def eof_received(self) -> bool | None:
        self.end(ConnectionError("the server closed the connection"))
        return bool(self._library.eof_received())

    def connection_lost(self, error: Exception | None) -> None:
        self.end(ConnectionError(f"the connection is lost: {error or 'closed'}"))
        self._library.connection_lost(error)

    def pause_writing(self) -> None:
        self._library.pause_writing()

    def resume_writing(self) -> None:
        self._library.resume_writing()


def private_parts(connection: Any) -> tuple[Any, Any]:
    """Return the transport of a redis-py connection, None if it has none, and redis-py's function
    that makes an exception of an error reply. Returns (None, None) if this redis-py keeps them
    elsewhere.
    """
    try:
        writer, parser = getattr(connection, WRITER), getattr(connection, PARSER)
        return getattr(writer, "transport", None), parser.parse_error
    except AttributeError as error:
        _log_once(
            f"redis-py {redis.__version__} keeps its connections in another way than the tested"
            f" versions {TESTED_REDIS_PY[0]} to {TESTED_REDIS_PY[1]} ({error}): replies are read"
            " through redis-py, which takes more CPU time"
        )
        return None, None


@functools.cache
def _log_once(sentence: str) -> None:
    log.warning(sentence)


class PubSubConnection:
    """One pub/sub connection.

    `deliver` is called with each message as [kind, channel, content]. It returns False if the
    connection must be closed.

    Only the reader task opens and closes the connection. Other tasks send through `update`. A send
    during a close would break redis-py, so a lock separates them.
    """

    def __init__(
        self,
        client: Any,
        deliver: Callable[[list[Any]], bool],
        *,
        sharded: bool,
        owned: redis.asyncio.Redis | None,
    ) -> None:
        self._pubsub = client.pubsub()
        self._deliver = deliver
        self._prefix = "S" if sharded else ""
        self._owned = owned  # a client that exists for this connection only
        self._lock = asyncio.Lock()
        self._protocol: RawRedisProtocol | None = None
        self._over = asyncio.Event()
        self._trouble: Exception | None = None

    async def open(self, channels: list[bytes]) -> None:
        async with self._lock:
            await self._pubsub.connect()
            connection = self._pubsub.connection
            self._protocol = RawRedisProtocol.over(connection, self._take, self._end)
            # redis-py's own `subscribe` may first check the connection and wait for a reply.
            await connection.send_command(f"{self._prefix}SUBSCRIBE", *channels, check_health=False)

    async def update(self, channel: bytes, is_wanted: Callable[[], bool]) -> None:
        """Subscribe or unsubscribe, whichever is wanted when the lock is acquired, so that the last
        request counts. If sending fails, the connection ends."""
        async with self._lock:
            verb = f"{self._prefix}{'' if is_wanted() else 'UN'}SUBSCRIBE"
            connection = self._pubsub.connection
            try:
                if connection is None or not connection.is_connected:
                    raise ConnectionError("not connected")
                await connection.send_command(verb, channel, check_health=False)
            # AttributeError: the socket was dropped meanwhile
            except (*SERVER_TROUBLE, AttributeError) as error:
                self._end(ConnectionError(f"{verb} could not be sent: {error}"))

    async def read(self) -> None:
        """Return when the connection has to be opened again. Raises SERVER_TROUBLE if it is
        lost.
        """
        listener = (
            asyncio.create_task(self._listen(), name="channel-listener")
            if self._protocol is None
            else None
        )
        try:
            await self._over.wait()
        finally:
            await end_task(listener)
        if self._trouble is not None:
            raise self._trouble

    async def close(self) -> None:
        if self._protocol is not None:
            self._protocol.end(ConnectionError("closed"))
        async with self._lock:
            for part in (self._pubsub, self._owned):
                with contextlib.suppress(*SERVER_TROUBLE):
                    if part is not None:
                        await part.aclose()

    async def _listen(self) -> None:
        """Read replies through redis-py, for connections that have no transport."""
        try:
            while not self._over.is_set():
                self._take(
                    await self._pubsub.connection.read_response(
                        disable_decoding=True,
                        timeout=math.inf,
                        disconnect_on_error=False,
                        push_request=True,
                    )
                )
        except (*SERVER_TROUBLE, AttributeError) as error:  # AttributeError: it is closed
            self._end(ConnectionError(f"the connection is lost: {error}"))

    def _take(self, reply: Any) -> None:
        if isinstance(reply, list):
            if not self._deliver(reply):
                self._over.set()
        elif isinstance(reply, Exception):
            self._end(reply)
        else:  # without a timeout, redis-py returns None only for a lost peer (ETIMEDOUT)
            self._end(ConnectionError("the connection is lost"))

    def _end(self, trouble: Exception) -> None:
        if not self._over.is_set():
            self._trouble = trouble
            self._over.set()
