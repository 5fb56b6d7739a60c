"""The ASGI application: routes, and one JSON error for everything that goes wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, Final
from uuid import uuid4

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.errors import TokenmillError
from tokenmill_gateway.answers import ClientGone
from tokenmill_gateway.calls import CALLS
from tokenmill_gateway.console import CONSOLE_CALLS
from tokenmill_gateway.openapi import Call, Handler, document_of
from tokenmill_gateway.refusals import HttpRefusal, json_response, refused_by_client
from tokenmill_gateway.server import Server

log = logging.getLogger(__name__)
MOST_HEADERS: Final = 100
MOST_HEADER_BYTES: Final = 32_768


async def described(_server: Server, _request: Request) -> ASGIApp:
    """`GET /openapi.json`."""
    return json_response(_document())


@cache
def _document() -> dict[str, Any]:
    return document_of(ALL_CALLS)


ALL_CALLS: Final = (
    *CALLS,
    *CONSOLE_CALLS,
    Call(
        method="GET",
        path="/openapi.json",
        handler=described,
        words="Describes the API",
        is_public=True,
    ),
)


def application(server: Server) -> ASGIApp:
    """Return the application of one gateway."""
    paths: dict[str, dict[str, Handler]] = {}
    for call in ALL_CALLS:
        paths.setdefault(call.path, {})[call.method] = call.handler

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await server.queues.close()
        server.records.close()
        server.usage.close()
        for one in (server.ring, server.storage):
            if one is not None:
                one.close()

    routes = [Route(path, _Endpoint(server, path, handlers)) for path, handlers in paths.items()]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.router.redirect_slashes = False
    app.router.default = _unknown_path
    return _Bounded(app)


class _Endpoint:
    """Calls the handler of a request's method, and answers what it raises."""

    def __init__(self, server: Server, path: str, handlers: dict[str, Handler]) -> None:
        self._server = server
        self._path = path
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, since = Request(scope, receive, send), time.monotonic()
        try:
            handler = self._handlers.get(request.method)
            if handler is None:
                allowed = ", ".join(self._handlers)
                words = f"{request.method} is not allowed here: {allowed}"
                refusal = HttpRefusal.of(405, "method_not_allowed", words)
                refusal.more["allow"] = allowed
                raise refusal
            answer: ASGIApp = await handler(self._server, request)
        except HttpRefusal as refusal:
            answer = refusal.response()
        except TokenmillError as error:
            answer = refused_by_client(error).response()
        except ClientGone:
            self._server.metrics.hung_up.inc()
            answer = Response(status_code=499)
        except Exception:
            log.exception("%s %s failed", request.method, scope["path"])
            words = "the gateway failed; its log says why"
            answer = HttpRefusal.of(500, "internal_error", words).response()
        method = request.method if request.method in self._handlers else "other"
        status = answer.status_code if isinstance(answer, Response) else 200
        seconds = time.monotonic() - since
        self._server.metrics.answered(f"{method} {self._path}", status, seconds)
        await answer(scope, receive, send)


async def _unknown_path(scope: Scope, receive: Receive, send: Send) -> None:
    words = f"there is no {scope['method']} {scope['path'][:255]} here"
    await HttpRefusal.of(404, "unknown_url", words).response()(scope, receive, send)


class _Bounded:
    """Refuses more headers than a client sends, before anything reads them, and gives every answer
    an id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            send = _with_id(send)
            headers = scope["headers"]
            size = sum(len(name) + len(value) for name, value in headers)
            if len(headers) > MOST_HEADERS or size > MOST_HEADER_BYTES:
                words = f"more than {MOST_HEADERS} headers, or {MOST_HEADER_BYTES} bytes of them"
                answer = HttpRefusal.of(431, "headers_too_large", words).response()
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _with_id(send: Send) -> Send:
    """Add `x-request-id` to the head of an answer that does not name its job."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = message.setdefault("headers", [])
            if all(name != b"x-request-id" for name, _ in headers):
                headers.append((b"x-request-id", f"req_{uuid4().hex}".encode()))
        await send(message)

    return sent
