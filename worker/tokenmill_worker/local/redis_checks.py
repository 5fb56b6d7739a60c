"""The checks of `tokenmill doctor` that concern Redis: the server and the queue, as far as the user
of the URL may see them.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import AuthenticationError, NoPermissionError

from tokenmill import Client
from tokenmill.cli.output import count
from tokenmill.transport.connect import SERVER_TROUBLE, Link, connect, connect_async
from tokenmill.transport.refusals import translate
from tokenmill.transport.server_clock import MAX_SKEW_S
from tokenmill_schemas.keys import Keys
from tokenmill_worker.local.findings import Finding
from tokenmill_worker.queue.server_check import ServerState, read_server
from tokenmill_worker.settings import Settings

_LINK = Link(timeout_s=3, connect_timeout_s=3)


def redis_findings(settings: Settings) -> Iterator[Finding]:
    address = str(settings.public()["redis_url"])
    try:
        client = connect(settings.redis_url, _LINK)
        started = time.time()
        client.ping()
        elapsed = time.time() - started
    except SERVER_TROUBLE as error:
        hint = "start it, or set TOKENMILL_REDIS_URL; `tokenmill dev` brings one"
        if isinstance(error, AuthenticationError):
            hint = "TOKENMILL_REDIS_URL has the user and the password: redis://user:password@host:6379/0"
        yield Finding("redis", "error", with_address(address, str(translate(error))), hint)
        return
    try:
        state = asyncio.run(_read(settings))
        yield from _server(state, f"{address}, {elapsed * 1000:.1f} ms away")
        yield from _clock(client)
        yield from _queue(client, settings)
    except SERVER_TROUBLE as error:
        yield Finding(
            "redis",
            "error",
            f"it refuses a command: {error}",
            "check the user's rights (ACL)",
        )
    finally:
        client.close()


def with_address(address: str, words: str) -> str:
    """Return an error's words, behind the address unless they name the server already."""
    host = urlsplit(address).hostname
    is_named = host is not None and re.search(rf'\bat "?{re.escape(host)}\b', words)
    return words if is_named else f"{address}: {words}"


async def _read(settings: Settings) -> ServerState:
    client = connect_async(settings.redis_url, _LINK)
    try:
        return await read_server(client, Keys(settings.queue_name, settings.key_prefix).meta)
    finally:
        await client.aclose()


def _server(state: ServerState, where: str) -> Iterator[Finding]:
    if not state.info:
        yield Finding("redis", "ok", f"it answers at {where}")
        yield Finding(
            "redis",
            "warning",
            "this user may not read its version, eviction policy and persistence (INFO)",
            "run this as the user of a worker, or as the operator",
        )
        return
    yield Finding("redis", "ok", f"{state.name} at {where}")
    for problem in state.problems():
        yield Finding("redis", "error", problem)
    yield from _eviction(state)
    yield from _persistence(state)
    role = state.info.get("role")
    if role not in (None, "master"):
        hint = "name the primary, or use redis+sentinel://"
        yield Finding("redis", "error", f"it is a {role}", hint)


def _eviction(state: ServerState) -> Iterator[Finding]:
    policy = state.info.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        yield Finding("redis", "ok", "it deletes no job when its memory is full (noeviction)")
    elif not state.max_memory:
        hint = "CONFIG SET maxmemory-policy noeviction (else it deletes jobs once it has a limit)"
        yield Finding("redis", "warning", f"its eviction policy is {policy}", hint)


def _persistence(state: ServerState) -> Iterator[Finding]:
    if not state.is_append_only:
        hint = "CONFIG SET appendonly yes (and appendonly yes in its configuration)"
        words = "it keeps no append-only file: a restart loses accepted jobs"
        yield Finding("redis", "warning", words, hint)
    elif state.drops_writes is None:
        yield Finding("redis", "ok", "it keeps an append-only file")
        words = "this user may not ask if a restart keeps what scripts wrote (ACL DRYRUN)"
        yield Finding("redis", "warning", words, "run this as the user of a worker")
    elif not state.drops_writes:
        yield Finding("redis", "ok", "it keeps an append-only file, and all of it after a restart")


def _clock(client: Any) -> Iterator[Finding]:
    try:
        seconds, microseconds = client.time()
    except NoPermissionError:
        return
    skew = abs(time.time() - (seconds + microseconds / 1e6))
    if skew > MAX_SKEW_S:
        hint = "synchronise the clocks (NTP): jobs follow the server's, logs this machine's"
        words = f"this machine's clock and the server's differ by {skew:.1f} s"
        yield Finding("clock", "warning", words, hint)


def _queue(client: Any, settings: Settings) -> Iterator[Finding]:
    queue = Client(
        settings.redis_url,
        queue=settings.queue_name,
        prefix=settings.key_prefix,
        redis_client=client,
    )
    depth, workers = queue.depth(), queue.workers()
    words = f"{settings.queue_name}: {depth.num_queued} waiting, {depth.running} running"
    words += f", {count(len(workers), 'worker')}"
    if depth.num_queued and not workers:
        yield Finding("queue", "warning", words, "no worker serves it: tokenmill worker")
    else:
        yield Finding("queue", "ok", words)
