"""Sends a job's chunks to an HTTP client as server-sent events, as long as both sides live."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tokenmill.async_client import AsyncClient
from tokenmill.errors import TokenmillError
from tokenmill_gateway.events import COMMENT, DONE, data_event
from tokenmill_gateway.refusals import refused_by_client
from tokenmill_schemas.chunk import Chunk

SILENCE_S: Final = 15.0  # then a comment, so that no proxy ends the connection
WAIT_FOR_STATUS_S: Final = 2.0
_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

Write = Callable[[Chunk], Iterable[bytes]]


class Chunks:
    """Reads a job's chunks in batches of those that are there, each chunk once and in order."""

    def __init__(self, client: AsyncClient, job_id: str) -> None:
        self._batches = client.batches(job_id)
        self._first: asyncio.Task[Sequence[Chunk]] | None = None

    async def first(self) -> Chunk | None:
        """Wait for the first chunk, as long as the status of an answer may wait."""
        self._first = asyncio.ensure_future(anext(self._batches))
        try:
            done, _ = await asyncio.wait((self._first,), timeout=WAIT_FOR_STATUS_S)
        except BaseException:
            await self.close()
            raise
        return self._first.result()[0] if done else None

    async def all(self) -> AsyncGenerator[Sequence[Chunk], None]:
        """Yield the batches from the first on."""
        try:
            if self._first is not None:
                yield await self._first
            async for batch in self._batches:
                yield batch
        finally:
            await self.close()

    async def close(self) -> None:
        if self._first is not None and not self._first.done():
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._batches.aclose()


class OpenStreams(set["EventStream"]):
    """The streams of a gateway, which end before it stops."""

    is_ending = False

    def end(self) -> None:
        self.is_ending = True
        for stream in list(self):
            stream.end()


class EventStream:
    """An ASGI response. `on_gone` is awaited if the client closes before the end."""

    def __init__(
        self,
        request: Request,
        streams: OpenStreams,
        chunks: Chunks,
        begin: Iterable[bytes],
        write: Write,
        on_gone: Callable[[], Awaitable[object]] | None,
        headers: dict[str, str],
    ) -> None:
        self._receive = request.receive
        self._streams = streams
        self._chunks = chunks
        self._begin = begin
        self._write = write
        self._on_gone = on_gone
        self._headers = headers
        self._loop = asyncio.get_running_loop()
        self._sending: asyncio.Task[None] | None = None
        self._comment: asyncio.Task[None] | None = None
        self._is_ending = self._is_in_send = False
        self._sent_at = self._loop.time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        head = {"type": "http.response.start", "status": 200, "headers": [*_HEADERS, *named]}
        await send(head)
        sending = self._sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(gone(self._receive))
        self._timer = self._loop.call_later(SILENCE_S, self._on_silence, send)
        self._streams.add(self)
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if self._is_ending:
                await send({"type": "http.response.body", "body": b""})
            elif sending.done():
                sending.result()
            elif self._on_gone is not None:
                await self._on_gone()
        finally:
            self._streams.discard(self)
            self._timer.cancel()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    def end(self) -> None:
        """End the stream behind a whole event: its reader continues it at another gateway."""
        if self._sending is not None and not self._sending.done():
            self._is_ending = True
            self._sending.cancel()

    def _on_silence(self, send: Send) -> None:
        now = self._loop.time()
        due = self._sent_at + SILENCE_S
        if now >= due and not self._is_in_send:
            self._comment = self._loop.create_task(self._sent(send, COMMENT))
            due = now + SILENCE_S
        self._timer = self._loop.call_at(max(due, now + 1.0), self._on_silence, send)

    async def _send_all(self, send: Send) -> None:
        await self._sent(send, b"".join(self._begin))
        if self._streams.is_ending:
            self._is_ending = True
            return
        write = self._write
        try:
            async with aclosing(self._chunks.all()) as batches:
                async for batch in batches:
                    data = b"".join([event for chunk in batch for event in write(chunk)])
                    if data:
                        await self._sent(send, data)
                    if len(batch) > 1:  # many wait: give the loop back between two writes
                        await asyncio.sleep(0)
        except TokenmillError as error:  # the head has left: the error is an event
            await self._sent(send, data_event(refused_by_client(error).error.body) + DONE)
        await send({"type": "http.response.body", "body": b""})

    async def _sent(self, send: Send, data: bytes) -> None:
        """Send whole events. A reader that takes nothing for long loses its connection."""
        self._is_in_send = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
        self._is_in_send = False
        self._sent_at = self._loop.time()


async def gone(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
