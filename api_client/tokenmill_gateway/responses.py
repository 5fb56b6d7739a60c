"""`/v1/responses`: a response is a job, which holds all that the API shows of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from operator import itemgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.types import ASGIApp

from tokenmill.async_client import AsyncClient
from tokenmill.errors import TokenmillError
from tokenmill.openai.errors import ApiError
from tokenmill.openai.request_body import fields_of
from tokenmill.openai.response_object import Status, repeated_of, response_of, shown_response
from tokenmill.operations.submit import new_job_id
from tokenmill_gateway.answers import result_of
from tokenmill_gateway.bodies import flag, json_object
from tokenmill_gateway.conversation import PREFIX, Envelope, conversation, opened, shown_item
from tokenmill_gateway.events import encode
from tokenmill_gateway.keys import ApiKey
from tokenmill_gateway.queries import query_of
from tokenmill_gateway.queues import completed_at, created_at, job_id_of, not_found
from tokenmill_gateway.refusals import HttpRefusal, json_response, refused_by_client
from tokenmill_gateway.response_events import ResponseEvents
from tokenmill_gateway.server import Server
from tokenmill_gateway.shapes import DeletedResponse, ItemList
from tokenmill_gateway.sse import Chunks, EventStream
from tokenmill_gateway.streams import streamed
from tokenmill_gateway.submission import priority_of, submit, tier_of
from tokenmill_schemas.job import Priority
from tokenmill_schemas.openai import RESPONSES_URL, ResponseObject
from tokenmill_schemas.result import JobResult, JobStatus

_WINDOWS_S: Final[Mapping[str, float | None]] = {
    "soonest": None, "2h": 2 * 3600.0, "8h": 8 * 3600.0,
}  # fmt: skip
_MOST_METADATA, _KEY_CHARS, _VALUE_CHARS = 16, 64, 512  # as OpenAI's
RECORDED_S: Final = 5.0
_MOST_EVENTS: Final = 10**9
Include = Literal["message.output_text.logprobs"]


class RetrieveQuery(msgspec.Struct, frozen=True, kw_only=True):
    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0, le=_MOST_EVENTS)] | None = None
    include: list[Include] = []
    include_obfuscation: bool = False


class ItemsQuery(msgspec.Struct, frozen=True, kw_only=True):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[Include] = []


async def create(server: Server, request: Request) -> ASGIApp:
    """`POST /v1/responses`: plain, as a stream, in the background, or both."""
    key = await server.writer_of(request)
    body = await json_object(request)
    is_stream, is_background = flag(body, "stream"), flag(body, "background")
    is_stored = flag(body, "store", default=True)
    if is_background and not is_stored:
        words = "background needs store to be true: the answer is fetched later"
        raise HttpRefusal.of(400, "invalid_value", words, "store")
    _check_stream_options(body)
    priority, deadline_s = _class_of(body, key, is_background, is_stream)
    previous = body.pop("previous_response_id", None)
    for name in ("safety_identifier", "user"):
        if not isinstance(body.get(name), str | None):
            raise HttpRefusal.of(400, "invalid_value", f"{name} must be a text", name)
    metadata = _metadata(body)
    fields = fields_of(RESPONSES_URL, body)  # refuses a wrong body before anything is made of it
    repeated = repeated_of(body) | {
        "metadata": metadata,
        "background": is_background,
        "store": is_stored,
        "service_tier": tier_of(priority),
    }
    new = body.get("input")
    given = [{"type": "message", "role": "user", "content": new}] if isinstance(new, str) else new
    job_id = new_job_id()
    session = job_id if is_stored else ""  # a chat that may go on
    if previous is not None:
        repeated["previous_response_id"] = previous
        turns, session = await conversation(server.records, key, previous)
        fields = fields_of(RESPONSES_URL, {**body, "input": [*turns, *(given or ())]})
    envelope = encode(Envelope(fields["model"], repeated, list(given or ())))
    one = await submit(
        request,
        server.queues,
        key,
        {"session": session, **fields, "job_id": job_id},
        is_background=is_background,
        priority=priority,
        deadline=deadline_s,
        stream=is_stream or is_background,
        webhook=key.webhook if is_background else None,
        envelope=envelope if is_stored else b"",
        previous_id=job_id_of(previous, PREFIX) if previous is not None else "",
    )
    shown_id = f"{PREFIX}{one.job}"
    if is_stream:
        events = ResponseEvents(one.job, one.model, created_at(one.job), repeated)
        return await streamed(server, request, one, shown_id, events.begin(), events.add)
    if is_background:
        return json_response(
            await _live(one.client, one.job, one.model, repeated), 200, one.headers
        )
    result = await result_of(request, one, shown_id, server.answer_s)
    return json_response(_ended(result, one.model, repeated), 200, one.headers)


async def retrieve(server: Server, request: Request) -> ASGIApp:
    """`GET /v1/responses/{id}`: while it waits, while it runs, and after its end."""
    key = await server.key_of(request)
    query = query_of(request, RetrieveQuery)
    client, job_id, envelope = await _found(server, key, request)
    if query.stream:
        after = query.starting_after
        events = ResponseEvents(
            job_id,
            envelope.model,
            created_at(job_id),
            envelope.repeated,
            starting_after=_last_event(request) if after is None else after,
            has_ids=True,
        )
        chunks = Chunks(client, job_id)
        return EventStream(
            request,
            server.streams,
            chunks,
            events.begin(),
            events.add,
            None,
            {"x-request-id": job_id},
        )
    shown = await _live(client, job_id, envelope.model, envelope.repeated)
    return json_response(shown)


async def cancel(server: Server, request: Request) -> ASGIApp:
    """`POST /v1/responses/{id}/cancel`, which may be repeated."""
    key = await server.writer_of(request)
    client, job_id, envelope = await _found(server, key, request)
    if not envelope.repeated.get("background"):
        words = "only a background response can be cancelled: close the connection of others"
        raise HttpRefusal.of(400, "not_background", words)
    try:
        await client.cancel(job_id)
        result = await client.result(job_id, timeout=server.answer_s)
    except TokenmillError as error:
        raise refused_by_client(error) from error
    return json_response(_ended(result, envelope.model, envelope.repeated))


async def delete(server: Server, request: Request) -> ASGIApp:
    """`DELETE /v1/responses/{id}`: what was asked and answered goes; its usage stays."""
    key = await server.writer_of(request)
    client, job_id, _ = await _found(server, key, request)
    try:
        await client.cancel(job_id)
        await _recorded(server, key, job_id)  # else a worker would record it afterwards
        await server.records.remove(job_id)
    except TokenmillError as error:
        raise refused_by_client(error) from error
    return json_response(DeletedResponse(f"{PREFIX}{job_id}"))


async def input_items(server: Server, request: Request) -> ASGIApp:
    """`GET /v1/responses/{id}/input_items`: a page of them, the last first."""
    key = await server.key_of(request)
    query = query_of(request, ItemsQuery)
    _, job_id, envelope = await _found(server, key, request)
    items = [shown_item(item, f"msg_in_{job_id}_{n}") for n, item in enumerate(envelope.input)]
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == query.after]
        if not places:
            words = f"after names no item of this response: {query.after[:64]!r}"
            raise HttpRefusal.of(400, "invalid_value", words, "after")
        items = items[places[0] + 1 :]
    return json_response(ItemList.of(items, query.limit, itemgetter("id")))


# ── a response and its job ──


async def _found(
    server: Server, key: ApiKey, request: Request
) -> tuple[AsyncClient, str, Envelope]:
    """Return the job of a response of this tenant. What is another's is as unknown: the same
    look-ups, the same words. Raises HttpRefusal.
    """
    shown_id: str = request.path_params["response_id"]
    job_id = job_id_of(shown_id, PREFIX)
    try:
        live = await server.queues.live(job_id, key.tenant)
        recorded = await server.records.find(job_id, key.tenant)
    except TokenmillError as error:
        raise refused_by_client(error) from error
    if recorded is not None:  # also of a dead job, whose request stays in the queue
        if recorded.envelope:
            client = server.queues.of_queue(recorded.queue)
            return client, job_id, opened(recorded.envelope, job_id)
    elif live is not None and live[1].envelope:
        return live[0], job_id, opened(live[1].envelope, job_id)
    raise not_found(shown_id)


async def _recorded(server: Server, key: ApiKey, job_id: str) -> None:
    """Wait until a worker has recorded the end of a job. Raises HttpRefusal after RECORDED_S."""
    until = time.monotonic() + RECORDED_S
    while await server.records.find(job_id, key.tenant) is None:
        if time.monotonic() > until:
            words = f"{PREFIX}{job_id} has been cancelled, and is not recorded yet"
            raise HttpRefusal(ApiError(503, "not_recorded", words), wait_s=RECORDED_S)
        await asyncio.sleep(0.05)


async def _live(
    client: AsyncClient, job_id: str, model: str, repeated: Mapping[str, Any]
) -> ResponseObject:
    """Return a response as it is now."""
    try:
        info = await client.status(job_id)
        if info.status.is_final:
            return _ended(await client.result(job_id, timeout=30.0), model, repeated)
    except TokenmillError as error:
        raise refused_by_client(error) from error
    status: Status = "in_progress" if info.status is JobStatus.RUNNING else "queued"
    return shown_response(job_id, model, created_at(job_id), status, repeated)


def _ended(result: JobResult, model: str, repeated: Mapping[str, Any]) -> ResponseObject:
    response = response_of(result, repeated)
    ended = completed_at(result.job_id, result.usage)
    return msgspec.structs.replace(
        response,
        model=model,
        created_at=created_at(result.job_id),
        completed_at=None if response.completed_at is None else ended,
    )


# ── the parts of a body and of a query ──


def _class_of(
    body: dict[str, Any], key: ApiKey, is_background: bool, is_stream: bool
) -> tuple[Priority, float | None]:
    """Return the class of a response and its deadline in seconds. Raises HttpRefusal."""
    priority = priority_of(body.pop("service_tier", None), key)
    options = body.pop("background_options", None)
    if options is None:
        return priority, None
    name = "background_options"
    if not isinstance(options, dict) or set(options) - {"completion_window"}:
        raise HttpRefusal.of(400, "invalid_value", f"{name} may hold completion_window alone", name)
    window = options.get("completion_window", "soonest")
    if not isinstance(window, str) or window not in _WINDOWS_S:
        words = f"{name}.completion_window must be one of {', '.join(_WINDOWS_S)}"
        raise HttpRefusal.of(400, "invalid_value", words, name)
    deadline_s = _WINDOWS_S[window]
    if deadline_s is None:
        return priority, None
    if not is_background or is_stream:
        words = f"{name} needs background to be true, and stream to be false"
        raise HttpRefusal.of(400, "invalid_value", words, name)
    return Priority.BULK, deadline_s


def _metadata(body: dict[str, Any]) -> dict[str, str]:
    metadata = body.pop("metadata", None)
    if metadata is None:
        return {}
    is_right = isinstance(metadata, dict) and len(metadata) <= _MOST_METADATA
    if not is_right or not all(
        isinstance(value, str) and len(name) <= _KEY_CHARS and len(value) <= _VALUE_CHARS
        for name, value in metadata.items()
    ):
        words = (
            f"metadata may have {_MOST_METADATA} texts of {_VALUE_CHARS} characters, "
            f"with names of {_KEY_CHARS}"
        )
        raise HttpRefusal.of(400, "invalid_value", words, "metadata")
    return dict(metadata)


def _check_stream_options(body: dict[str, Any]) -> None:
    options = body.pop("stream_options", None) or {}
    if not isinstance(options, dict) or set(options) - {"include_obfuscation"}:
        words = "stream_options may hold include_obfuscation alone"
        raise HttpRefusal.of(400, "unknown_parameter", words, "stream_options")


def _last_event(request: Request) -> int:
    """Return the number of the last event that a browser's EventSource has had; -1 without one."""
    given = request.headers.get("last-event-id", "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 10 else -1
