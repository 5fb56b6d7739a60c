"""The pull side of the queue: asks for as many jobs as can start soon, and hands on what it gets.

Work is claimed by credit, so the backlog stays in Redis, where another worker can take it. A ring of the
bell or a freed place wakes it; otherwise it looks once per poll interval, for orphans and delayed jobs
ring no bell. It knows no engine: credits come from a callable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from worker.errors import RedisUnavailable
from worker.jobs import Delivery

log = logging.getLogger(__name__)

LONGEST_BACKOFF_S = 2.0


class Claims(Protocol):
    """What a consumer needs of the queue; JobStream is one."""

    bell: asyncio.Event

    async def claim(self, credits: int) -> list[Delivery]: ...


class Consumer:
    """`on_claim` hears of every claim that succeeded, also an empty one: the worker's pulse."""

    def __init__(
        self,
        stream: Claims,
        credits: Callable[[], int],
        take: Callable[[list[Delivery]], Awaitable[None]],
        *,
        poll_s: float = 1.0,
        on_claim: Callable[[int], None] = lambda _count: None,
        on_error: Callable[[Exception], None] = lambda _error: None,
    ) -> None:
        self._stream = stream
        self._credits = credits
        self._take = take
        self._poll_s = poll_s
        self._on_claim = on_claim
        self._on_error = on_error
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._ended.set()

    def poke(self) -> None:
        """A place may have become free."""
        self._stream.bell.set()

    async def run(self) -> None:
        """Until stop(). Redis being away is waited out; whatever else goes wrong is logged and survived."""
        failures = 0
        self._ended.clear()
        try:
            while not self._stopping.is_set():
                try:
                    found = await self._claim_once()
                    failures = 0
                except RedisUnavailable as error:
                    failures += 1
                    self._note(error, first=failures == 1)
                    await self._sleep(min(LONGEST_BACKOFF_S, 0.05 * 2.0 ** min(failures, 10)))
                    continue
                if not found:
                    await self._wait()
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """No claim begins after this returns."""
        self._stopping.set()
        self._stream.bell.set()
        await self._ended.wait()

    async def _claim_once(self) -> bool:
        """Did it get as many as it asked for? Then there may be more."""
        self._stream.bell.clear()
        wanted = self._credits()
        deliveries = await self._stream.claim(wanted)
        self._on_claim(len(deliveries))
        if not deliveries:
            return False
        try:
            await self._take(deliveries)
        except Exception as error:
            log.exception("claimed jobs could not be taken in; their lease will hand them on")
            self._on_error(error)
        return wanted > 0 and len(deliveries) >= wanted

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stream.bell.wait(), self._poll_s)

    async def _sleep(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)

    def _note(self, error: Exception, *, first: bool) -> None:
        if first:
            log.warning("jobs cannot be claimed (%s): trying again", error)
        self._on_error(error)
