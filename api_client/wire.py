"""A connection of the library's whose replies are parsed and handed on where the event loop reads them.

The library reads through a stream: each reply wakes a task, which asks a parser, whatever else waits for its turn
meanwhile. Where something comes every engine step, that costs more than what is done with it. Opening and closing
stay the library's business (Sentinel, TLS, passwords): it hears of everything but of what the server says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import hiredis
from redis.exceptions import ConnectionError, InvalidResponse

from api_client.scripts import Argument

READ_BYTES: Final = 64 * 1024
_NOTHING: Final = object()


class Wire(asyncio.BufferedProtocol):
    """`on_reply` is called with each reply, undecoded; errors that the server reports are exceptions. `on_end` is
    called once, with what was wrong."""

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
        self._replies = hiredis.Reader(protocolError=InvalidResponse, replyError=make_error, notEnoughData=_NOTHING)
        self._library: Any = transport.get_protocol()
        transport.set_protocol(self)

    @classmethod
    def over(cls, connection: Any, on_reply: Callable[[Any], None], on_end: Callable[[Exception], None]) -> Wire | None:
        """Takes over a connection that is open and on which nothing is under way. None where it has no transport, as
        in tests without a server: then it has to be read as the library reads."""
        transport = getattr(getattr(connection, "_writer", None), "transport", None)
        make_error = getattr(getattr(connection, "_parser", None), "parse_error", None)
        if hasattr(transport, "set_protocol") and callable(make_error):  # uvloop's transports are of no common class
            return cls(transport, make_error, on_reply, on_end)
        return None

    @property
    def is_over(self) -> bool:
        return self._on_end is None

    def send(self, *command: Argument) -> None:
        """Raises ConnectionError where the connection has ended."""
        if self._on_end is None:
            raise ConnectionError("the connection was lost while nothing was asked of it")
        self._transport.write(hiredis.pack_command(command))  # type: ignore[arg-type]  # narrower than it is

    def end(self, error: Exception) -> None:
        """Nothing is handed on any more."""
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
