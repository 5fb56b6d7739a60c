"""Takes an uploaded file from a request into the store, in constant memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, Final, get_args, get_type_hints

from starlette.requests import ClientDisconnect, Request

from tokenmill.errors import TokenmillError
from tokenmill.files.stored_file import StoredFile, new_file_id
from tokenmill_gateway.multipart import Form, FormPart
from tokenmill_gateway.refusals import HttpRefusal
from tokenmill_gateway.shapes import LONGEST_S, SHORTEST_S, FileInput
from tokenmill_gateway.storage import Storage, now_ms
from tokenmill_gateway.threads import in_thread

LIMIT_S: Final = 30.0  # and a second for each LEAST_BYTES_PER_S that came
LEAST_BYTES_PER_S: Final = 1_000
PURPOSES: Final = get_args(get_type_hints(FileInput)["purpose"])
ANCHOR, SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS: Final = ("purpose", ANCHOR, SECONDS)
_VALUE_BYTES: Final = 1_024
_NAME_CHARS: Final = 255
_FORM_BYTES: Final = 65_536  # of a body beside the file


async def receive(request: Request, storage: Storage, tenant: str) -> StoredFile:
    """Store the file of a form, and return its row. Raises HttpRefusal; nothing is kept then."""
    length = request.headers.get("content-length", "")
    is_number = length.isascii() and length.isdigit() and len(length) < 20
    if is_number and int(length) > storage.most_bytes + _FORM_BYTES:
        raise _too_large(storage)
    upload = _Upload(storage, tenant, Form.of(request))
    try:
        async with asyncio.timeout(LIMIT_S) as limit, AsyncExitStack() as stack:
            began, size = asyncio.get_running_loop().time(), 0
            async for data in _body(request):
                size += len(data)
                limit.reschedule(began + LIMIT_S + size / LEAST_BYTES_PER_S)
                await upload.take(data, stack)
            done = upload.checked()  # before the object is complete
        await in_thread(lambda: storage.files.finish(done))
    except BaseException as error:
        with contextlib.suppress(TokenmillError):  # else the sweep of the tasks removes it
            await upload.undo()
        if isinstance(error, TimeoutError):
            words = f"the body came slower than {LEAST_BYTES_PER_S} bytes per second"
            raise HttpRefusal.of(408, "request_timeout", words) from None
        raise
    return done


async def _body(request: Request) -> AsyncIterator[bytes]:
    try:
        async for data in request.stream():
            yield data
    except ClientDisconnect:
        raise HttpRefusal.of(400, "incomplete_body", "the body ended early") from None


class _Upload:
    """One form: its values, and the file that goes to the store as it comes."""

    def __init__(self, storage: Storage, tenant: str, form: Form) -> None:
        self._storage = storage
        self._tenant = tenant
        self._form = form
        self._created_ms = now_ms()
        self._values: dict[str, bytes] = {}
        self._part = ""
        self._file_id: str | None = None
        self._writer: Any = None
        self._name = ""
        self._size = self._lines = 0
        self._last = b"\n"

    async def take(self, data: bytes, stack: AsyncExitStack) -> None:
        """Take a piece of the body. The object is complete when `stack` closes."""
        for piece in self._form.feed(data):
            if isinstance(piece, FormPart):
                await self._begin(piece, stack)
            elif self._part == "file":
                await self._write(piece)
            else:
                value = self._values[self._part] + piece
                if len(value) > _VALUE_BYTES:
                    raise _wrong(self._part, f"{self._part} has more than {_VALUE_BYTES} bytes")
                self._values[self._part] = value

    async def _begin(self, part: FormPart, stack: AsyncExitStack) -> None:
        self._part = part.name
        if part.name != "file":
            if part.name not in _FIELDS:
                words = f"an upload has no {part.name[:64]!r}"
                raise HttpRefusal.of(400, "unknown_parameter", words, part.name[:64])
            if part.name in self._values:
                raise _wrong(part.name, f"{part.name} is given twice")
            self._values[part.name] = b""
            return
        if self._file_id is not None:
            raise _wrong("file", "an upload has one file")
        self._name = _checked_name(part.file_name)
        self._file_id = new_file_id()
        row = StoredFile(id=self._file_id, tenant=self._tenant, created_ms=self._created_ms)
        await in_thread(lambda: self._storage.files.add(row))
        self._writer = await stack.enter_async_context(self._storage.objects.writing(self._file_id))

    async def _write(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._storage.most_bytes:
            raise _too_large(self._storage)
        self._lines += data.count(b"\n")
        self._last = data[-1:]
        await self._writer.write(data)

    def checked(self) -> StoredFile:
        """Return the row of the whole file. Raises HttpRefusal."""
        if not self._form.is_complete:
            raise HttpRefusal.of(400, "incomplete_body", "the body ended early")
        if self._file_id is None:
            raise _wrong("file", "an upload has a file", "missing_required_parameter")
        if not self._size:
            raise _wrong("file", "the file has no bytes")
        purpose = self._values.get("purpose", b"").decode("utf-8", "replace")
        if purpose not in PURPOSES:
            raise _wrong("purpose", f"purpose must be one of {', '.join(PURPOSES)}")
        return StoredFile(
            id=self._file_id,
            tenant=self._tenant,
            purpose=purpose,
            name=self._name,
            bytes=self._size,
            lines=self._lines + (self._last != b"\n"),
            created_ms=self._created_ms,
            expires_ms=self._expires_ms(),
        )

    def _expires_ms(self) -> int | None:
        anchor, text = self._values.get(ANCHOR), self._values.get(SECONDS)
        if anchor is None and text is None:
            return None
        seconds = int(text) if text is not None and text.isdigit() and len(text) < 10 else None
        given = {"anchor": (anchor or b"").decode("utf-8", "replace"), "seconds": seconds}
        return self._created_ms + expiry_s("expires_after", given) * 1000

    async def undo(self) -> None:
        file_id = self._file_id
        if file_id is not None:
            await in_thread(lambda: self._storage.objects.remove(file_id))
            await in_thread(lambda: self._storage.files.forget(file_id))


def expiry_s(param: str, given: Any) -> int:
    """Return the seconds after its creation at which a file expires. Raises HttpRefusal."""
    seconds: Any = given.get("seconds") if isinstance(given, dict) else None
    is_right = type(seconds) is int
    if not is_right or set(given) != {"anchor", "seconds"} or given["anchor"] != "created_at":
        raise _wrong(param, f"{param} has an anchor, created_at, and seconds")
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise _wrong(param, f"{param}.seconds must be from {SHORTEST_S} to {LONGEST_S}")
    return int(seconds)


def _checked_name(name: str | None) -> str:
    if not name:
        raise _wrong("file", "the file has no name")
    if len(name) > _NAME_CHARS or not name.isprintable() or "/" in name or "\\" in name:
        words = f"a file's name has at most {_NAME_CHARS} printable characters and no path"
        raise _wrong("file", words)
    return name


def _wrong(param: str, words: str, code: str = "invalid_value") -> HttpRefusal:
    return HttpRefusal.of(400, code, words, param)


def _too_large(storage: Storage) -> HttpRefusal:
    words = f"the file has more than {storage.most_bytes} bytes"
    return HttpRefusal.of(413, "request_too_large", words, "file")
