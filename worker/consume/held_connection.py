"""One connection that is kept for the calls of one script, one after the other: the call of every engine step.

The library's frame around a call (its pool, retries, metrics, a task and two timers for time limits) costs as much as
making the chunks of 32 sequences. Connecting stays the library's business, Sentinel's included. It retries nothing.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, cast

import redis.asyncio
from redis.exceptions import NoScriptError, ResponseError

from api_client.cancellation import heeding_cancellation
from api_client.connections import SERVER_TROUBLE
from api_client.scripts import Argument, Script, call_async
from api_client.wire import Wire


class HeldConnection:
    """Opened at the first call and after trouble; closed with the client's own. A cluster's calls go through its
    client, since a slot may move between two of them.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._is_cluster = isinstance(cast("Any", client), redis.asyncio.RedisCluster)
        self._connection: Any = None
        self._timeout_s: float | None = None
        self._wire: Wire | None = None
        self._reply: asyncio.Future[Any] | None = None
        self._turn = asyncio.Lock()

    async def call(self, script: Script, key: str, *arguments: Argument) -> Any:
        """As `api_client.scripts.call_async`: one round trip, two when the server has lost the script. Raises what that
        raises."""
        if self._is_cluster:
            return await call_async(self._client, script, key, *arguments)
        async with self._turn:
            if self._connection is None:
                await self._open()
            try:
                async with asyncio.timeout(self._timeout_s):
                    try:
                        return await self._exchange("EVALSHA", script.sha, 1, key, *arguments)
                    except NoScriptError:
                        return await self._exchange("EVAL", script.text, 1, key, *arguments)
            except ResponseError:
                raise
            except BaseException:  # cancelled, too: a reply may be on its way that nobody waits for
                await self._give_up()
                raise

    async def _exchange(self, *command: Argument) -> Any:
        if self._wire is not None:
            self._reply = asyncio.get_running_loop().create_future()
            self._wire.send(*command)
            return await self._reply
        await self._connection.send_command(*command, check_health=False)
        return await self._connection.read_response(timeout=math.inf)

    async def _open(self) -> None:
        pool: Any = self._client.connection_pool
        with heeding_cancellation():
            self._connection = connection = await pool.get_connection()
            self._timeout_s, connection.socket_timeout = connection.socket_timeout, None  # ours is around both ways
            self._wire = Wire.over(connection, self._take, self._fail)

    async def _give_up(self) -> None:
        connection, self._connection = self._connection, None
        wire, self._wire = self._wire, None
        if wire is not None:  # the next connection's replies are none of its business
            wire.end(ConnectionError("given up"))
        connection.socket_timeout = self._timeout_s
        try:
            await connection.disconnect(nowait=True)
        except SERVER_TROUBLE:
            pass
        finally:
            await cast("Any", self._client.connection_pool).release(connection)

    def _take(self, reply: Any) -> None:
        if isinstance(reply, Exception):
            self._fail(reply)
        elif self._reply is not None and not self._reply.done():
            self._reply.set_result(reply)

    def _fail(self, error: Exception) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(error)
