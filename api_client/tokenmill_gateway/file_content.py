"""Sends the bytes of a file, or a range of them, a part at a time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.files.object_store import ObjectStore
from tokenmill.files.stored_file import StoredFile
from tokenmill_gateway.queues import not_found
from tokenmill_gateway.refusals import HttpRefusal, json_response
from tokenmill_gateway.sse import gone

_RANGE: Final = re.compile(r"bytes=(\d{0,15})-(\d{0,15})", re.ASCII)


async def content_of(request: Request, objects: ObjectStore, file: StoredFile) -> ASGIApp:
    """Return the response with a file's bytes. Raises HttpRefusal."""
    begin, end, status = 0, file.bytes, 200
    wanted = _RANGE.fullmatch(request.headers.get("range", ""))
    if wanted is not None and (wanted[1] or wanted[2]):  # other ranges are ignored
        status = 206
        if wanted[1]:
            begin = int(wanted[1])
            end = min(int(wanted[2]) + 1, end) if wanted[2] else end
        else:
            begin = max(0, end - int(wanted[2]))
        if begin >= end:
            words = f"the range begins behind the file's {file.bytes} bytes, or is empty"
            refusal = HttpRefusal.of(416, "invalid_range", words)
            headers = {"content-range": f"bytes */{file.bytes}"}
            return json_response(refusal.error.body, 416, headers)
    parts = objects.read(file.id, begin, end)
    try:
        first = await anext(parts)  # the store answers before the status leaves
    except FileNotFoundError:
        raise not_found(file.id) from None
    headers = {
        "content-type": "application/octet-stream",
        "content-length": str(end - begin),
        "content-disposition": "attachment",
        "accept-ranges": "bytes",
        "x-content-type-options": "nosniff",
    }
    if status == 206:
        headers["content-range"] = f"bytes {begin}-{end - 1}/{file.bytes}"
    return _Content(status, headers, first, parts)


class _Content:
    """An ASGI response, which ends when its client closes."""

    def __init__(
        self, status: int, headers: dict[str, str], first: bytes, rest: AsyncIterator[bytes]
    ) -> None:
        named = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._head = {"type": "http.response.start", "status": status, "headers": named}
        self._first = first
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(self._head)
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            sent, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
        if isinstance(sent, Exception):
            raise sent  # the connection is cut: no client takes the bytes as whole

    async def _send_all(self, send: Send) -> None:
        await send(_part(self._first))
        async for part in self._rest:
            await send(_part(part))
        await send({"type": "http.response.body", "body": b""})


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
