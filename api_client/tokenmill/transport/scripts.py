"""The Lua scripts that producers and workers run on the server: loaded from their files, joined and
hashed once.

The text of a script is the shared helpers followed by its own file. It is called by its hash. If
the server does not have it, after a restart or a failover, the text is sent and run at once.
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

from tokenmill.transport.repairs import reraise_cancellation

COMMON = ("tokenmill", "common")

Argument = str | bytes | int | float


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text, and the SHA-1 that identifies it on the server."""

    name: str
    text: str
    sha: str


def load_script(*parts: tuple[str, str]) -> Script:
    """Join files named `<package>/lua/<name>.lua`; the last one names the script."""
    text = "\n".join(
        files(package).joinpath("lua", f"{name}.lua").read_text("utf-8") for package, name in parts
    )
    return Script(parts[-1][1], text, hashlib.sha1(text.encode()).hexdigest())


SUBMIT = load_script(COMMON, ("tokenmill", "submit"))
CANCEL = load_script(COMMON, ("tokenmill", "cancel"))
REDRIVE = load_script(COMMON, ("tokenmill", "redrive"))
COLLECT = load_script(COMMON, ("tokenmill", "collect"))
LOOK = load_script(COMMON, ("tokenmill", "look"))


def in_parts(
    items: Iterable[tuple[Argument, ...]], max_bytes: int, max_items: int = 1 << 30
) -> Iterator[list[tuple[Argument, ...]]]:
    """Split the arguments of many items into lists, each small enough for one call. An item is
    never split.
    """
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
    """Run a script in one round trip, or two if the server has to receive its text. In a cluster,
    `key` selects the node.
    """
    try:
        return client.evalsha(script.sha, 1, key, *cast("tuple[str, ...]", arguments))
    except NoScriptError:
        return client.eval(script.text, 1, key, *cast("tuple[str, ...]", arguments))


async def call_async(
    client: redis.asyncio.Redis, script: Script, key: str, *arguments: Argument
) -> Any:
    """Run a script from an event loop; see `call`."""
    with reraise_cancellation():
        try:
            return await client.evalsha(script.sha, 1, key, *cast("tuple[str, ...]", arguments))
        except NoScriptError:
            return await client.eval(script.text, 1, key, *cast("tuple[str, ...]", arguments))
        # redis-py's cluster client closed a connection while opening it
        except AttributeError as error:
            raise redis.exceptions.ConnectionError(
                f"the connection was lost while it was opened: {error}"
            ) from error
