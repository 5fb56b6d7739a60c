"""`/v1/models`, and whether the gateway can serve."""

from __future__ import annotations

import asyncio
import logging

from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from tokenmill.errors import TokenmillError
from tokenmill_gateway.queues import unknown_model
from tokenmill_gateway.refusals import HttpRefusal, json_response
from tokenmill_gateway.server import Server
from tokenmill_gateway.shapes import HealthReport, ModelList, ModelObject

log = logging.getLogger(__name__)


async def listed(server: Server, request: Request) -> ASGIApp:
    key = await server.key_of(request)
    found = await server.queues.models(key)
    return json_response(ModelList([_shown(name, found[name]) for name in sorted(found)]))


async def one(server: Server, request: Request) -> ASGIApp:
    key = await server.key_of(request)
    name: str = request.path_params["model"]
    found = await server.queues.models(key, with_queues=True)
    if name not in found:
        raise unknown_model(name)
    return json_response(_shown(name, found[name]))


def _shown(name: str, length: int | None) -> ModelObject:
    return ModelObject(id=name, max_model_len=length or UNSET)


async def alive(_server: Server, _request: Request) -> ASGIApp:
    return json_response(HealthReport())


async def ready(server: Server, _request: Request) -> ASGIApp:
    """Answer 503 while the gateway ends, and while queue or database is away."""
    if server.is_draining:
        raise HttpRefusal.of(503, "draining", "this gateway ends")
    try:
        await asyncio.gather(server.queues.ping(), server.records.ping())
    except (TokenmillError, OSError) as error:
        log.warning("The gateway is not ready: %s", error)
        words = "the queue or its database does not answer now"
        raise HttpRefusal.of(503, "unavailable", words) from None
    return json_response(HealthReport())
