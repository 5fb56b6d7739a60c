"""`/v1/files`: uploads, and the outputs of batches."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.types import ASGIApp

from tokenmill.errors import TokenmillError
from tokenmill.files.removal import remove_old
from tokenmill.files.stored_file import StoredFile
from tokenmill_gateway.file_content import content_of
from tokenmill_gateway.queries import query_of
from tokenmill_gateway.refusals import HttpRefusal, json_response, log
from tokenmill_gateway.server import Server
from tokenmill_gateway.shapes import DeletedFile, FileList, FileObject
from tokenmill_gateway.storage import now_ms
from tokenmill_gateway.threads import in_thread
from tokenmill_gateway.uploads import receive

_LONGEST_PAGE: Final = 10_000


class FilesQuery(msgspec.Struct, frozen=True, kw_only=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=_LONGEST_PAGE)] = _LONGEST_PAGE
    order: Literal["asc", "desc"] = "desc"
    purpose: str | None = None


async def upload(server: Server, request: Request) -> ASGIApp:
    """`POST /v1/files`: a form with one file and its purpose."""
    key = await server.writer_of(request)
    return json_response(_shown(await receive(request, server.stored, key.tenant)))


async def listed(server: Server, request: Request) -> ASGIApp:
    """`GET /v1/files`: a page of a tenant's own, the newest first."""
    key = await server.key_of(request)
    query = query_of(request, FilesQuery)
    storage, after = server.stored, None
    if query.after is not None:
        try:
            after = await storage.file(key, query.after)
        except HttpRefusal:
            raise no_such("after", query.after) from None
    found = await in_thread(
        lambda: storage.files.page(
            key.tenant,
            now_ms(),
            limit=query.limit + 1,
            after=after,
            purpose=query.purpose,
            newest_first=query.order == "desc",
        )
    )
    return json_response(FileList.of([_shown(file) for file in found], query.limit))


async def retrieve(server: Server, request: Request) -> ASGIApp:
    key = await server.key_of(request)
    return json_response(_shown(await server.stored.file(key, request.path_params["file_id"])))


async def content(server: Server, request: Request) -> ASGIApp:
    """`GET /v1/files/{id}/content`: the bytes, or a range of them."""
    key = await server.key_of(request)
    file = await server.stored.file(key, request.path_params["file_id"])
    return await content_of(request, server.stored.objects, file)


async def delete(server: Server, request: Request) -> ASGIApp:
    """`DELETE /v1/files/{id}`. A batch that reads the file goes on; its bytes go afterwards."""
    key = await server.writer_of(request)
    storage = server.stored
    file = await storage.file(key, request.path_params["file_id"])

    def remove() -> None:
        storage.files.delete(file.id)
        try:
            remove_old(storage.files, storage.objects, now_ms(), file.id)
        except TokenmillError as error:
            log.warning("The bytes of %s stay until the next sweep: %s", file.id, error)

    await in_thread(remove)
    return json_response(DeletedFile(file.id))


def no_such(param: str, given: str) -> HttpRefusal:
    words = f"{param} names nothing in this list: {given[:64]!r}"
    return HttpRefusal.of(400, "invalid_value", words, param)


def _shown(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_ms // 1000,
        expires_at=None if file.expires_ms is None else file.expires_ms // 1000,
        filename=file.name,
        purpose=file.purpose,
    )
