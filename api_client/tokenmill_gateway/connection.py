"""Bounds what a connection may do around the application: slow or large heads, bytes that are no
HTTP, readers that take nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tokenmill.openai.errors import ApiError
from tokenmill_gateway.events import encode

HEAD_S: Final = 30.0  # a connection that sends no whole head for so long is closed
MOST_HEAD_BYTES: Final = 65_536  # parsed at most; the application allows fewer
MOST_IGNORED: Final = 64 * 2**20  # of what follows a refusal, so that its client reads the answer
IGNORED_S: Final = 2.0


class Connection(HttpToolsProtocol):
    """One connection. `write_s`: seconds for which its reader may take nothing."""

    def __init__(self, *arguments: Any, write_s: float, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._write_s = write_s
        self._is_in_head = False
        self._head_bytes = 0
        self._ignored: int | None = None  # bytes since a refusal
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self._on_late_head)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # ── heads ──

    def data_received(self, data: bytes) -> None:
        if self._ignored is not None:
            self._ignored += len(data)
            if self._ignored > MOST_IGNORED:
                self.transport.abort()
            return
        super().data_received(data)
        if self._is_in_head and self._ignored is None:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                words = f"the headers have more than {MOST_HEAD_BYTES} bytes"
                self._refuse(ApiError(431, "headers_too_large", words))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._on_late_head)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP. In the middle of an answer, close the connection."""
        if self.cycle is not None and self.cycle.response_started and not self._is_answered:
            self.transport.close()
        else:
            words = "this is no HTTP request, or its length is not what it says"
            self._refuse(ApiError(400, "invalid_request", words))

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _on_late_head(self) -> None:
        self._head_timer = None
        if self._is_in_head:
            words = f"the headers did not arrive within {HEAD_S:g} s"
            self._refuse(ApiError(408, "request_timeout", words))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer, and end the connection. What its client still sends is ignored for a while: a
        client reads no answer from a connection that is closed before it has sent all.
        """
        self._ignored = 0
        if not self._is_answered:  # a request before this one: it has no reader any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = encode(error.body)
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(IGNORED_S, self.transport.close)

    # ── readers ──

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._write_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
