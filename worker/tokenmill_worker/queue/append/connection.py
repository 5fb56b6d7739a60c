"""Keeps one connection for the calls of one script, such as the append of every engine step.

redis-py wraps a call in its pool, retries, metrics, a task, two timers for time limits, and a
stream. That costs more than making the chunks of 32 sequences. redis-py still opens the connection,
through Sentinel too. Nothing is retried here.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

import hiredis
import redis.asyncio
from redis.exceptions import ConnectionError, InvalidResponse, NoScriptError

from tokenmill.transport.cancellation import reraise_cancellation
from tokenmill.transport.connect import SERVER_TROUBLE
from tokenmill.transport.failover import is_readonly_error
from tokenmill.transport.raw_protocol import RawRedisProtocol
from tokenmill.transport.scripts import Argument, Script, call_async

# A message that the server pushes, with RESP3.
_PUSHED: Any = getattr(hiredis, "PushNotification", ())


class PipelinedConnection:
    """Holds one connection: opened at the first call and after an error, and closed with the
    client's other connections. Calls of a cluster go through its client, because a slot may move
    between two calls; so do calls of a client that has no sockets.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._can_hold = not isinstance(cast("Any", client), redis.asyncio.RedisCluster)
        self._current: _OpenConnection | None = None
        self._opening = asyncio.Lock()

    async def call(self, script: Script, key: str, *arguments: Argument) -> Any:
        """Call the script like `tokenmill.transport.scripts.call_async`: in one round trip, or two
        if the server has lost the script. Raises the same errors, and TimeoutError.
        """
        current = self._current
        if self._can_hold and (current is None or current.is_over):
            current = await self._open()
        if current is None:
            return await call_async(self._client, script, key, *arguments)
        try:
            return await current.call("EVALSHA", script.sha, 1, key, *arguments)
        except NoScriptError:
            return await current.call("EVAL", script.text, 1, key, *arguments)

    async def _open(self) -> _OpenConnection | None:
        async with self._opening:
            if self._current is not None and self._current.is_over:
                old, self._current = self._current, None
                await self._release(old.connection)
            if self._current is None and self._can_hold:
                with reraise_cancellation():
                    connection = await cast("Any", self._client.connection_pool).get_connection()
                opened = _OpenConnection(connection)
                if opened.is_over:
                    self._can_hold = False
                    await self._release(connection)
                else:
                    self._current = opened
            return self._current

    async def _release(self, connection: Any) -> None:
        try:
            await connection.disconnect(nowait=True)
        except SERVER_TROUBLE:
            pass
        finally:
            await cast("Any", self._client.connection_pool).release(connection)


class _OpenConnection:
    """Sends calls over an open connection. Replies come in the order of the calls; a reply whose
    caller was cancelled is dropped. A connection that has ended stays ended, and fails the calls
    that were under way.

    Calls share one timer. It fires when the oldest call may have exceeded the time limit.
    """

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._timeout_s: float | None = connection.socket_timeout
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[float, asyncio.Future[Any]]] = deque()  # (sent at, reply)
        self._timer: asyncio.TimerHandle | None = None
        self._wire = RawRedisProtocol.over(connection, self._answer, self._end)

    @property
    def is_over(self) -> bool:
        return self._wire is None or self._wire.is_over

    def call(self, *command: Argument) -> asyncio.Future[Any]:
        """Send a command and return the future of its reply. Raises ConnectionError if the
        connection has ended.
        """
        if self._wire is None:
            raise ConnectionError("this connection has no socket")
        self._wire.send(*command)
        reply, now = self._loop.create_future(), self._loop.time()
        self._pending.append((now, reply))
        if self._timer is None and self._timeout_s is not None:
            self._timer = self._loop.call_at(
                now + self._timeout_s, self._on_timeout, self._timeout_s
            )
        return reply

    def _answer(self, reply: Any) -> None:
        if isinstance(reply, _PUSHED):
            return
        if not self._pending:
            self._break(InvalidResponse("a reply without a call"))
            return
        _, waiter = self._pending.popleft()
        if waiter.done():
            return
        if isinstance(reply, Exception):
            waiter.set_exception(reply)
            if is_readonly_error(reply):  # the next call resolves the address again
                self._break(ConnectionError("the server has become a replica, which is read-only"))
        else:
            waiter.set_result(reply)

    def _on_timeout(self, timeout_s: float) -> None:
        self._timer = None
        if not self._pending:
            return
        due = self._pending[0][0] + timeout_s
        if due <= self._loop.time():
            self._break(TimeoutError(f"no reply within {timeout_s:g} s"))
        else:
            self._timer = self._loop.call_at(due, self._on_timeout, timeout_s)

    def _break(self, error: Exception) -> None:
        if self._wire is not None:
            self._wire.end(error)

    def _end(self, error: Exception) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for _, waiter in self._pending:
            if not waiter.done():
                waiter.set_exception(error)
        self._pending.clear()
