"""Checks the Redis server before a worker uses it, and translates its errors."""

from __future__ import annotations

import logging
from typing import Any

import redis.asyncio
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from tokenmill.transport.connect import SERVER_TROUBLE
from tokenmill_worker.errors import RedisUnavailable, SettingsError

log = logging.getLogger(__name__)

MIN_VERSION = (6, 2)


async def check_server(client: redis.asyncio.Redis) -> None:
    """Refuse a server that is too old, or that would evict jobs when memory is short. Raises
    SettingsError.
    """
    try:
        info: dict[str, Any] = await client.info("everything")
    except (NoPermissionError, ResponseError):
        log.warning(
            "This Redis user may not read the server's INFO: "
            "its version and eviction policy are not checked"
        )
        return
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise SettingsError([f"the server is Redis {version}; 6.2 is the oldest that works"])
    policy = info.get("maxmemory_policy", "noeviction")
    if info.get("maxmemory", 0) and policy != "noeviction":
        raise SettingsError(
            [
                f"the server's maxmemory-policy is {policy}: "
                "it would silently drop accepted jobs; set it to noeviction"
            ]
        )


class translated_errors:
    """Translates server and network errors into RedisUnavailable."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (*SERVER_TROUBLE, TimeoutError)):
            return
        if isinstance(error, RedisUnavailable):
            return
        if isinstance(error, (AuthenticationError, NoPermissionError)):
            message = f"Redis refuses this user: {error}"
            raise RedisUnavailable(message, is_misconfigured=True) from error
        raise RedisUnavailable(f"Redis: {type(error).__name__}: {error}") from error
