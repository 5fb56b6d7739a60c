"""`/v1/batches`: files of requests, which `tokenmill tasks` runs."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.types import ASGIApp

from tokenmill.bulk.batch import Batch, BatchState, check_metadata, new_batch_id, window_ms
from tokenmill.bulk.formats.input_file import MAX_LINE_BYTES, BadLine, parse
from tokenmill.errors import ConfigurationError
from tokenmill.files.stored_file import StoredFile
from tokenmill.openai.form_values import shown
from tokenmill_gateway.bodies import json_object
from tokenmill_gateway.files import no_such
from tokenmill_gateway.keys import ApiKey
from tokenmill_gateway.queries import query_of
from tokenmill_gateway.refusals import HttpRefusal, json_response, unsupported
from tokenmill_gateway.server import Server
from tokenmill_gateway.shapes import LONGEST_S, BatchInput, BatchList
from tokenmill_gateway.storage import Storage, now_ms
from tokenmill_gateway.threads import in_thread
from tokenmill_gateway.uploads import expiry_s
from tokenmill_schemas.openai import URLS

_MEMBERS: Final = BatchInput.__struct_fields__
_STOPPABLE: Final = (BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING)
_STOPPED: Final = (BatchState.CANCELLING, BatchState.CANCELLED)


class BatchesQuery(msgspec.Struct, frozen=True, kw_only=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


async def create(server: Server, request: Request) -> ASGIApp:
    """`POST /v1/batches`. Its first line names the model, and so the queue."""
    key = await server.writer_of(request)
    storage = server.stored
    body = await json_object(request)
    for name in body:
        if name not in _MEMBERS:
            raise unsupported(name[:64])
    endpoint, window = body.get("endpoint"), body.get("completion_window")
    if not isinstance(endpoint, str) or endpoint not in URLS:
        words = f"endpoint must be one of {', '.join(URLS)}, not {shown(endpoint)}"
        raise _wrong("endpoint", words)
    length_ms = _window_ms(window)
    metadata = _metadata(body.get("metadata"))
    expiry = body.get("output_expires_after")
    output_expires_s = None if expiry is None else expiry_s("output_expires_after", expiry)
    file = await storage.file(key, str(body.get("input_file_id")))
    model = await _model_of(storage, file, endpoint)
    client = await server.queues.of_model(model, key)
    created_ms = now_ms()
    batch = Batch(
        id=_batch_id(request, key),
        queue=client.queue,
        tenant=key.tenant,
        model=model,
        endpoint=endpoint,
        input_file=file.id,
        completion_window=str(window),
        metadata=metadata,
        output_expires_s=output_expires_s,
        created_ms=created_ms,
        expires_ms=created_ms + length_ms,
    )

    def store() -> Batch:
        storage.batches.create(batch, due_ms=created_ms)
        return storage.batches.get(batch.id)

    found = await in_thread(store)
    if (found.input_file, found.endpoint) != (batch.input_file, batch.endpoint):
        words = "the idempotency key was used with another request"
        raise HttpRefusal.of(422, "idempotency_conflict", words)
    return json_response(found.public())


async def listed(server: Server, request: Request) -> ASGIApp:
    """`GET /v1/batches`: a page of a tenant's own, the newest first."""
    key = await server.key_of(request)
    query = query_of(request, BatchesQuery)
    storage, after = server.stored, query.after
    if after is not None:
        try:
            await storage.batch(key, after)
        except HttpRefusal:
            raise no_such("after", after) from None
    found = await in_thread(
        lambda: storage.batches.newest(query.limit + 1, after, hosted_for=key.tenant)
    )
    return json_response(BatchList.of([each.public() for each in found], query.limit))


async def retrieve(server: Server, request: Request) -> ASGIApp:
    key = await server.key_of(request)
    return json_response(await _current(server, key, request.path_params["batch_id"]))


async def cancel(server: Server, request: Request) -> ASGIApp:
    """`POST /v1/batches/{id}/cancel`, which may be repeated. Answers so far are in its output."""
    key = await server.writer_of(request)
    storage = server.stored
    batch = await storage.batch(key, request.path_params["batch_id"])
    is_moved = await in_thread(
        lambda: storage.batches.move(batch.id, BatchState.CANCELLING, _STOPPABLE)
    )
    batch = await storage.batch(key, batch.id)
    if not is_moved and batch.state not in _STOPPED:
        words = f"{batch.id} is {batch.state.value} already, and cannot be cancelled"
        raise HttpRefusal.of(400, "batch_over", words)
    return json_response(await _current(server, key, batch.id))


async def _current(server: Server, key: ApiKey, batch_id: str) -> Any:
    """Return a batch as it is shown, with the counts of now."""
    storage = server.stored
    batch = await storage.batch(key, batch_id)
    if batch.state in (BatchState.IN_PROGRESS, BatchState.CANCELLING):
        totals = await in_thread(lambda: storage.batches.totals(batch, with_tokens=False))
        if totals is not None and totals.ended >= batch.totals.ended:
            batch = msgspec.structs.replace(batch, totals=totals)
    return batch.public()


def _batch_id(request: Request, key: ApiKey) -> str:
    """Return a new id, or that of the batch that the same idempotency key made."""
    given = request.headers.get("idempotency-key")
    if given is None:
        return new_batch_id()
    words = f"{key.tenant}\0{given}".encode()
    return f"batch_{hashlib.blake2b(words, digest_size=12).hexdigest()}"


async def _model_of(storage: Storage, file: StoredFile, endpoint: str) -> str:
    """Return the model that the first line of a file names. Raises HttpRefusal."""
    if file.purpose != "batch":
        raise _file(f"the purpose of a batch's file is batch, not {file.purpose}")
    if file.lines > storage.most_lines:
        raise _file(f"the file has {file.lines} lines, and a batch at most {storage.most_lines}")
    number_of_line, begun = 1, b""
    try:
        async for part in storage.objects.read(file.id, 0, file.bytes):
            *whole, begun = (begun + part).split(b"\n")
            for line in whole:
                if line.strip():
                    return _checked(number_of_line, line, endpoint)
                number_of_line += 1
            if len(begun) > MAX_LINE_BYTES:
                raise _file(f"line {number_of_line} has more than {MAX_LINE_BYTES} bytes")
    except FileNotFoundError:
        raise _file("the bytes of the file are gone") from None
    if not begun.strip():
        raise _file("the file has no line")
    return _checked(number_of_line, begun, endpoint)


def _checked(number_of_line: int, raw: bytes, endpoint: str) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise _file(f"line {number_of_line} has more than {MAX_LINE_BYTES} bytes")
    line = parse(number_of_line, raw)
    if isinstance(line, BadLine):
        raise _file(f"line {number_of_line}: {line.message}")
    if line.url != endpoint:
        raise _file(f"line {number_of_line}: url must be {endpoint}, not {line.url}")
    model = line.body.get("model")
    if not isinstance(model, str) or not model:
        raise _file(f"line {number_of_line}: its body names no model")
    return model


def _window_ms(window: object) -> int:
    try:
        length_ms = window_ms(window if isinstance(window, str) else "")
    except ConfigurationError as error:
        raise _wrong("completion_window", str(error)) from None
    if length_ms > LONGEST_S * 1000:
        raise _wrong("completion_window", f"completion_window is at most {LONGEST_S} s")
    return length_ms


def _metadata(given: object) -> dict[str, str]:
    try:
        return check_metadata(msgspec.convert(given or {}, dict[str, str]))
    except msgspec.ValidationError:
        raise _wrong("metadata", "metadata must be an object of texts") from None
    except ConfigurationError as error:
        raise _wrong("metadata", str(error)) from None


def _file(words: str) -> HttpRefusal:
    return HttpRefusal.of(400, "invalid_file", words, "input_file_id")


def _wrong(param: str, words: str) -> HttpRefusal:
    return HttpRefusal.of(400, "invalid_value", words, param)
