"""Reads a request's body as a JSON object, bounded in size and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect, Request

from tokenmill_gateway.events import encode
from tokenmill_gateway.refusals import HttpRefusal
from tokenmill_schemas.codec import MAX_PAYLOAD_BYTES

LIMIT_S: Final = 30.0
MOST_DRAINED: Final = 8 * MAX_PAYLOAD_BYTES
_decode = msgspec.json.Decoder(dict[str, Any]).decode


async def json_object(request: Request) -> dict[str, Any]:
    """Return the body. Raises HttpRefusal for one that is no JSON object, too large or too slow."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        words = f"the body must be of type application/json, not {kind[:64] or 'without a type'}"
        raise HttpRefusal.of(415, "unsupported_media_type", words)
    try:
        async with asyncio.timeout(LIMIT_S):
            data = await _bounded(request)
    except TimeoutError:
        words = f"the body did not arrive within {LIMIT_S:g} s"
        raise HttpRefusal.of(408, "request_timeout", words) from None
    try:
        found = _decode(data)
        _check_names(data, found)
        return found
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        words = f"the body is no JSON object: {reason}"
        raise HttpRefusal.of(400, "invalid_json", words) from None


def flag(body: dict[str, Any], name: str, default: bool = False) -> bool:
    """Take a member that is true or false out of a body. Raises HttpRefusal."""
    value = body.pop(name, None)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise HttpRefusal.of(400, "invalid_value", f"{name} must be true or false", name)
    return value


def _check_names(data: bytes, found: dict[str, Any]) -> None:
    """Raise HttpRefusal if an object has two members of one name, of which one would be ignored:
    then the body has more texts than what was read of it.
    """
    if _num_texts(data) != _num_texts(encode(found)):
        name = _repeated_name(data)[:64]
        words = f"the body has the name {name!r} twice in one object"
        raise HttpRefusal.of(400, "invalid_json", words, name)


def _num_texts(data: bytes) -> int:
    """Return twice the number of texts and names in a JSON document: the quotes that are not
    escaped.
    """
    plain = data.replace(rb"\\", b"")
    return plain.count(b'"') - plain.count(rb"\"")


def _repeated_name(data: bytes) -> str:
    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                repeated.append(name)
            seen.add(name)

    json.loads(data, object_pairs_hook=note, parse_int=str)
    return repeated[0]


async def _bounded(request: Request) -> bytes:
    """Return the body. Read on behind the limit, because a client reads no answer before it has
    sent its body.
    """
    data, size = bytearray(), 0
    try:
        async for part in request.stream():
            size += len(part)
            if size <= MAX_PAYLOAD_BYTES:
                data += part
            elif size > MOST_DRAINED:
                break
    except ClientDisconnect:
        raise HttpRefusal.of(400, "incomplete_body", "the body ended early") from None
    if size > MAX_PAYLOAD_BYTES:
        raise _too_large()
    return bytes(data)


def _too_large() -> HttpRefusal:
    words = f"the body has more than {MAX_PAYLOAD_BYTES} bytes"
    return HttpRefusal.of(413, "request_too_large", words)
