"""Looks at the Redis server before a worker uses it and every 30 s while it runs.

A server loses jobs if it evicts keys, or if its default user may not do what scripts do: many
versions check each transaction of their append-only file with the default user's rights while they
load it, a script's writes are such a transaction, and what is refused is dropped without a word.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis.asyncio
from redis.exceptions import NoPermissionError, ResponseError

from tokenmill.transport.connect import SERVER_TROUBLE
from tokenmill_worker.errors import SettingsError

log = logging.getLogger(__name__)

MIN_VERSION = (7, 0)
INTERVAL_S = 30.0

_DROPS_WRITES = (
    "the server's default user lacks rights, so a restart drops what scripts wrote, all jobs with "
    "it; begin its list of users with `user default off allkeys allchannels +@all`"
)


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server, as far as a user may see it. `drops_writes`: does a restart lose what scripts
    wrote? None if the user may not ask.
    """

    info: dict[str, Any]  # empty if the user may not read it
    drops_writes: bool | None

    @property
    def version(self) -> str:
        """The version of Redis whose commands the server has."""
        return str(self.info.get("redis_version", "0"))

    @property
    def name(self) -> str:
        valkey = self.info.get("valkey_version")
        return f"Valkey {valkey}" if valkey else f"Redis {self.version}"

    @property
    def is_append_only(self) -> bool:
        return bool(self.info.get("aof_enabled", 0))

    @property
    def max_memory(self) -> int:
        """The server's own limit in bytes; 0: none."""
        return int(self.info.get("maxmemory", 0))

    @property
    def memory(self) -> tuple[int, int] | None:
        """Bytes in use, and their limit: the server's own, or else its machine's memory."""
        limit = self.max_memory or int(self.info.get("total_system_memory", 0))
        return (int(self.info["used_memory"]), limit) if limit else None

    def problems(self) -> list[str]:
        """Return a sentence for each reason why this server would lose jobs, or cannot work."""
        found = []
        version = tuple(int(part) for part in self.version.split(".")[:2])
        if self.info and version < MIN_VERSION:
            found.append(f"the server is {self.name}; Redis 7.0 is the oldest that works")
        policy = self.info.get("maxmemory_policy", "noeviction")
        if self.max_memory and policy != "noeviction":
            found.append(
                f"the server's maxmemory-policy is {policy}: "
                "it would silently drop accepted jobs; set it to noeviction"
            )
        if self.is_append_only and self.drops_writes:
            found.append(_DROPS_WRITES)
        return found


async def read_server(client: redis.asyncio.Redis, key: str) -> ServerState:
    """Ask the server that holds `key` for its state and its default user's rights."""
    ask: Any = client.execute_command
    cluster: Any = client
    if isinstance(cluster, redis.asyncio.RedisCluster):
        await cluster.initialize()
        ask = partial(ask, target_nodes=cluster.get_node_from_key(key))
    try:
        info = await ask("INFO")
    except (NoPermissionError, ResponseError):
        info = {}
    return ServerState(info, await _drops_writes(ask, key))


async def _drops_writes(ask: Callable[..., Awaitable[Any]], key: str) -> bool | None:
    for command in (("XADD", key, "*", "a", "b"), ("HSET", key, "a", "b"), ("DEL", key)):
        try:
            reply = await ask("ACL DRYRUN", "default", *command)
        except (NoPermissionError, ResponseError):
            return None
        if reply not in (b"OK", "OK"):
            return True
    return False


class ServerWatch:
    """Looks at the server that holds `key`. `problem`: why it would lose jobs, since the last
    look; None if it would not.
    """

    def __init__(
        self, client: redis.asyncio.Redis, key: str, interval_s: float = INTERVAL_S
    ) -> None:
        self.problem: str | None = None
        self.memory: tuple[int, int] | None = None  # bytes in use, and their limit
        self._client = client
        self._key = key
        self._interval_s = interval_s

    async def check(self) -> None:
        """Refuse a server that cannot work or would lose jobs. Warns of what the user may not see.
        Raises SettingsError.
        """
        state = await self._look()
        if problems := state.problems():
            raise SettingsError(problems)
        if not state.info:
            log.warning(
                "This Redis user may not read the server's INFO: "
                "its version and eviction policy are not checked"
            )
        elif state.is_append_only and state.drops_writes is None:
            log.warning(
                "This Redis user may not run ACL DRYRUN: "
                "whether a restart of the server keeps the jobs is not checked"
            )

    async def run(self) -> None:
        """Look at intervals until cancelled; log each problem once."""
        while True:
            try:
                problems = (await self._look()).problems()
            except (*SERVER_TROUBLE, TimeoutError):
                self.memory = None  # whoever needs the server says that it is away
            else:
                self._note("; ".join(problems) or None)
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> ServerState:
        state = await read_server(self._client, self._key)
        self.memory = state.memory
        return state

    def _note(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            log.error("Jobs may be lost: %s", problem)
        elif problem is None and self.problem is not None:
            log.info("The server's settings are right again")
        self.problem = problem
