"""Closes connections to a server that has become a replica.

Behind one address, a failover moves the address but not the open connections; these could be
refused writes for ever. redis-py handles this only for Sentinel.
"""

from __future__ import annotations

import functools
from typing import Any

import redis
import redis.asyncio
from redis.exceptions import ConnectionError, ReadOnlyError, ResponseError

_WHY = "the server has become a replica, which is read-only"


def is_readonly_error(error: Exception) -> bool:
    """Return whether an error says that the server is a read-only replica. Servers before Redis 7
    wrap the error of a command inside a script in a sentence of their own.
    """
    return isinstance(error, ReadOnlyError) or (
        isinstance(error, ResponseError) and "-READONLY " in str(error)
    )


def reconnect_on_readonly(client: redis.Redis | redis.asyncio.Redis) -> None:
    """Make the client close a connection whose reply says that the server is a replica. The next
    connection goes to the server that has the address then.
    """
    pool: Any = client.connection_pool
    kind = _reconnecting_async if isinstance(client, redis.asyncio.Redis) else _reconnecting
    pool.connection_class = kind(pool.connection_class)


@functools.cache
def _reconnecting(kind: Any) -> type:
    def read_response(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return kind.read_response(self, *arguments, **options)
        except ResponseError as error:
            if not is_readonly_error(error):
                raise
            self.disconnect()
            raise ConnectionError(_WHY) from error

    return type(kind.__name__, (kind,), {"read_response": read_response})


@functools.cache
def _reconnecting_async(kind: Any) -> type:
    async def read_response(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return await kind.read_response(self, *arguments, **options)
        except ResponseError as error:
            if not is_readonly_error(error):
                raise
            await self.disconnect(nowait=True)
            raise ConnectionError(_WHY) from error

    return type(kind.__name__, (kind,), {"read_response": read_response})
