"""Calls append.lua, once per engine step: the batch, and the connection that sends it.

A chunk may be written only if the job still belongs to this worker, and if the log's last entry has
the number that the chunk follows. Both are certain if this worker appended that entry itself and
nothing changed its jobs since. The ownership version is a number that both sides raise by one with
each call. Equal numbers prove that nothing changed, and the script skips both checks.

redis-py wraps a call in its pool, retries, metrics, a task, two timers for time limits, and a
stream. That costs more than making the chunks of 32 sequences. One connection is therefore kept for
these calls; redis-py opens it, through Sentinel too. Nothing is retried here.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

import hiredis
import redis.asyncio
from redis.exceptions import ConnectionError, InvalidResponse, NoScriptError

from tokenmill.transport.connect import SERVER_TROUBLE
from tokenmill.transport.raw_protocol import RawRedisProtocol
from tokenmill.transport.repairs import is_readonly_error, reraise_cancellation
from tokenmill.transport.scripts import Argument, Script, call_async
from tokenmill_schemas.codec import encode
from tokenmill_worker.jobs import AppendFailures, AppendReply, ChunkAppend

_ARRAY, _TEXT, _UINT = 0xDD, 0xDB, 0xCE  # MessagePack: all of 32 bits
_LENGTH, _VALUES = struct.Struct(">BI"), struct.Struct(">BIBIBBI")
_PUBLISHED, _FOLLOWS = 1, 2
# A random start, so that no two processes share a version. Lua is exact up to 2 ** 53.
_VERSION_BITS: Final = 48


class AppendBatch:
    """Encodes the append calls of one worker, one at a time: `pack`, then `apply_reply`, or
    `reset` if there is no reply.
    """

    def __init__(self) -> None:
        self._version = random.SystemRandom().getrandbits(_VERSION_BITS)
        # Job → [number of the log's last entry, fencing token, owner prefix], as of this version.
        self._known: dict[str, list[Any]] = {}
        # Indices in the current call of chunks whose job is not known.
        self._unknown: list[int] = []

    def pack(self, items: Sequence[ChunkAppend]) -> tuple[int, bytes]:
        """Return the ownership version and one MessagePack array with six values per chunk. The
        array is packed by hand with every number in 32 bits: an object per value would cost more
        than the chunk itself. Raises ValueError for a chunk that has neither a token nor an end.
        """
        known, unknown = self._known, self._unknown
        unknown.clear()
        parts = [_LENGTH.pack(_ARRAY, 6 * len(items))]
        for place, item in enumerate(items):
            chunk, token = item.chunk, item.token
            job_id, start, body = chunk.job_id, item.start, encode(chunk)
            size = len(chunk.token_ids)
            if not size:
                if chunk.finish_reason is None:
                    self.reset()
                    raise ValueError(f"a chunk of job {job_id} has neither a token nor an end")
                size = 1
            how = 0 if item.checkpoint else _PUBLISHED
            seen = known.get(job_id)
            if seen is not None and seen[0] == start and seen[1] == token:
                how |= _FOLLOWS
                seen[0] = start + size
                owner = seen[2]
            else:
                unknown.append(place)
                owner = owner_prefix(job_id, token)
            # The chunk's bytes are sent as text: the server's MessagePack library has no bytes.
            values = _VALUES.pack(_UINT, start, _UINT, size, how, _TEXT, len(body))
            parts += (owner, values, body)
        self._version += 1
        return self._version, b"".join(parts)

    def apply_reply(self, items: Sequence[ChunkAppend], reply: Sequence[Any]) -> AppendFailures:
        """Apply the reply to the last call. Return the chunks that were not simply logged, see
        `tokenmill_worker.jobs.AppendFailures`.
        """
        known, learned = self._known, self._unknown
        if not reply and not learned:  # the usual case
            return {}
        if reply and reply[0] == -1:  # the versions differed: only this call's results are known
            known.clear()
            reply, learned = reply[3:], list(range(len(items)))
        failures = {
            place: (AppendReply(word.decode()), int(end))
            for place, word, end in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
        }
        for place in learned:
            job_id, token = items[place].chunk.job_id, items[place].token
            known[job_id] = [items[place].end, token, owner_prefix(job_id, token)]
        for place in failures:
            self.forget(items[place].chunk.job_id)
        return failures

    def reset(self) -> None:
        """Forget all jobs, because the outcome of the call is unknown."""
        self._known.clear()

    def forget(self, job_id: str) -> None:
        """Forget a job that has left this worker, or whose log is in doubt."""
        self._known.pop(job_id, None)


def owner_prefix(job_id: str, token: int) -> bytes:
    """Return the first two of a chunk's six values, packed: job id and fencing token."""
    return encode(job_id) + encode(str(token))


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
