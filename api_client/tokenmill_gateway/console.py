"""`GET /`: the console, one page from files of this package, which needs no key itself.

It knows nothing of the queue: its script uses the calls of the API with the key that its user
enters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tokenmill_gateway.openapi import Call
from tokenmill_gateway.refusals import HttpRefusal
from tokenmill_gateway.server import Server

FOLDER: Final = Path(__file__).parent / "page"
PAGE: Final = "index.html"
_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but the gateway's own files and calls: the text of an answer cannot add a script, and no
# other page can show this one in a frame.
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, but asked for again by its etag
}


async def page(_server: Server, request: Request) -> ASGIApp:
    """Return the page: `GET /`."""
    return _file(request, PAGE)


async def part(_server: Server, request: Request) -> ASGIApp:
    """Return a script, the style or the icon of the page: `GET /console/{name}`."""
    return _file(request, request.path_params["name"])


def _file(request: Request, name: str) -> Response:
    found = _files().get(name)
    if found is None:
        words = f"there is no GET {request.url.path[:255]} here"
        raise HttpRefusal.of(404, "unknown_url", words)
    content, etag = found
    headers = {**HEADERS, "etag": etag}
    given = request.headers.get("if-none-match", "")
    known = {each.strip().removeprefix("W/") for each in given.split(",")}
    if etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_TYPES[Path(name).suffix])


@cache
def _files() -> Mapping[str, tuple[bytes, str]]:
    """Return the bytes and the etag of each file, which are read once."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            found[path.name] = (
                content,
                f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"',
            )
    return found


CONSOLE_CALLS: Final = (
    Call(
        method="GET",
        path="/",
        handler=page,
        words="Shows the console",
        other=("text/html",),
        is_public=True,
    ),
    Call(
        method="GET",
        path="/console/{name}",
        handler=part,
        words="Returns a script, the style or the icon of the console",
        other=("text/javascript", "text/css", "image/svg+xml"),
        is_public=True,
    ),
)
