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
import functools
import logging
from collections.abc import Callable
from typing import Any, Final

import hiredis
import redis
from redis.exceptions import ConnectionError, InvalidResponse

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
