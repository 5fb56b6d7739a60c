"""The Lua scripts that producers and workers run on the server: found, joined, hashed once.

A script's text is the shared helpers and its own file, one after the other. Called by hash; a server that
does not know it (restarted, failed over) gets the text in the same call. It knows nothing of arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, cast

import redis
import redis.asyncio
from redis.exceptions import NoScriptError

from api_client.cancellation import heeding_cancellation

COMMON = ("api_client", "common")

Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Script:
    """One script's text and the SHA-1 that the server knows it by."""

    name: str
    text: str
    sha: str


def load_script(*parts: tuple[str, str]) -> Script:
    """Join files of `<package>/lua/<name>.lua`; the last one names the script."""
    text = "\n".join(files(package).joinpath("lua", f"{name}.lua").read_text("utf-8") for package, name in parts)
    return Script(parts[-1][1], text, hashlib.sha1(text.encode()).hexdigest())


SUBMIT = load_script(COMMON, ("api_client", "submit"))
CANCEL = load_script(COMMON, ("api_client", "cancel"))
REDRIVE = load_script(COMMON, ("api_client", "redrive"))
COLLECT = load_script(COMMON, ("api_client", "collect"))


def in_parts(
    items: Iterable[tuple[Argument, ...]], max_bytes: int, max_items: int = 1 << 30
) -> Iterator[list[tuple[Argument, ...]]]:
    """The arguments of many items, cut into what one call should carry at most; one item is never cut."""
    part: list[tuple[Argument, ...]] = []
    size = 0
    for item in items:
        num_bytes = sum(len(value) for value in item if isinstance(value, bytes))
        if part and (len(part) >= max_items or size + num_bytes > max_bytes):
            yield part
            part, size = [], 0
        part.append(item)
        size += num_bytes
    if part:
        yield part


def call(client: redis.Redis, script: Script, key: str, *arguments: Argument) -> Any:
    """One round trip, two when the server has lost the script. `key` routes the call in a cluster."""
    try:
        return client.evalsha(script.sha, 1, key, *cast("tuple[str, ...]", arguments))
    except NoScriptError:
        return client.eval(script.text, 1, key, *cast("tuple[str, ...]", arguments))


async def call_async(client: redis.asyncio.Redis, script: Script, key: str, *arguments: Argument) -> Any:
    """As `call`."""
    with heeding_cancellation():
        try:
            return await client.evalsha(script.sha, 1, key, *cast("tuple[str, ...]", arguments))
        except NoScriptError:
            return await client.eval(script.text, 1, key, *cast("tuple[str, ...]", arguments))
        except AttributeError as error:  # the library's cluster closed a connection that it was still opening for us
            raise redis.exceptions.ConnectionError(f"the connection was lost while it was opened: {error}") from error
