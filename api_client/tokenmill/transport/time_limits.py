"""Limits waits in an event loop by the time in which the loop runs.

A process that gets no CPU for seconds finds its timers due before it has read the replies that came
meanwhile. A limit here therefore counts ticks of a timer: a pause of the loop, however long, counts
as one tick, and the loop reads its sockets before the next. Threads need none of this, because the
kernel looks at the socket once more before it ends a wait.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import redis.exceptions

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
