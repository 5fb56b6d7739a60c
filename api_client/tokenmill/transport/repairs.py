"""Repairs what redis-py and Python 3.11 get wrong: lost cancellations, time limits, failovers.

Cancellations: redis-py sends with Python 3.11's `wait_for`, which drops a cancellation that arrives
together with the result; the task would then continue for ever.

Time limits: a process that gets no CPU for seconds finds its timers due before it has read the
replies that came meanwhile. A limit here therefore counts ticks of a timer: a pause of the loop,
however long, counts as one tick, and the loop reads its sockets before the next. Threads need none
of this, because the kernel looks at the socket once more before it ends a wait.

Failovers: behind one address, a failover moves the address but not the open connections; these
could be refused writes for ever. redis-py closes them only for Sentinel.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import redis
import redis.asyncio
import redis.exceptions
from redis.exceptions import ConnectionError, ReadOnlyError, ResponseError


@contextmanager
def reraise_cancellation() -> Iterator[None]:
    """Raise a cancellation that the body swallowed, also in place of an error that the body
    raised.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0

    def was_swallowed() -> bool:
        return task is not None and task.cancelling() > before

    try:
        yield
    except Exception as error:
        if was_swallowed():
            raise asyncio.CancelledError from error
        raise
    if was_swallowed():
        raise asyncio.CancelledError


async def wait_at_most(event: asyncio.Event, seconds: float) -> bool:
    """Return whether the event is set within this many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return event.is_set()  # it may have been set while the loop was late
    return True


async def end_task(task: asyncio.Task[object] | asyncio.Task[None] | None) -> None:
    """Cancel a task repeatedly until it has ended. Its outcome is ignored."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=1.0)


TICKS: Final = 5


@asynccontextmanager
async def at_most(seconds: float | None) -> AsyncIterator[None]:
    """Raise TimeoutError after this many seconds in which the loop ran; None: no limit."""
    if seconds is None:
        yield
        return
    loop, tick_s = asyncio.get_running_loop(), seconds / TICKS
    async with asyncio.timeout(None) as limit:
        timer = loop.call_later(tick_s, lambda: tick(TICKS - 1))

        def tick(left: int) -> None:
            nonlocal timer
            if left:
                timer = loop.call_later(tick_s, tick, left - 1)
            else:
                limit.reschedule(loop.time())

        try:
            yield
        finally:
            timer.cancel()


@functools.cache
def with_time_limits(kind: Any) -> type:
    """Derive a class from a connection class of redis.asyncio, with `at_most` for its limits."""

    async def connect(self: Any) -> None:
        limit_s, self.socket_connect_timeout = self.socket_connect_timeout, None
        try:
            async with at_most(limit_s):
                await kind._connect(self)
        finally:
            self.socket_connect_timeout = limit_s

    async def read_response(
        self: Any, disable_decoding: bool = False, timeout: float | None = None, **options: Any
    ) -> Any:
        if timeout is not None:
            return await kind.read_response(self, disable_decoding, timeout, **options)
        limit_s, self.socket_timeout = self.socket_timeout, None
        try:
            async with at_most(limit_s):
                return await kind.read_response(self, disable_decoding, **options)
        except TimeoutError:
            raise redis.exceptions.TimeoutError(f"no reply within {limit_s:g} s") from None
        finally:
            self.socket_timeout = limit_s

    return type(kind.__name__, (kind,), {"_connect": connect, "read_response": read_response})


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
