"""One heartbeat per worker keeps the leases of all its jobs; who misses its own deadline holds nothing.

A process that was frozen longer than the lease must not write a thing when it wakes: others hold its
jobs by then. The keeper measures its own silence and says `on_expired` before the next beat; the fencing
tokens refuse whatever slips through.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from schemas.control import WorkerStatus
from worker.consume.replies import HeartbeatReply
from worker.errors import RedisUnavailable

log = logging.getLogger(__name__)


class Beats(Protocol):
    """What a keeper needs of the queue; JobStream is one."""

    async def heartbeat(self, status: WorkerStatus) -> HeartbeatReply: ...

    async def resign(self) -> int: ...


class LeaseKeeper:
    """`clock` is monotonic and goes on while the process is frozen. Callbacks run in the event loop."""

    def __init__(
        self,
        stream: Beats,
        status: Callable[[], WorkerStatus],
        *,
        lease_s: float,
        interval_s: float,
        on_cancelled: Callable[[tuple[str, ...]], None],
        on_lost: Callable[[tuple[str, ...]], None],
        on_expired: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._status = status
        self._lease_s = lease_s
        self._interval_s = interval_s
        self._on_cancelled = on_cancelled
        self._on_lost = on_lost
        self._on_expired = on_expired
        self._clock = clock
        self._renewed_at = clock()
        self.is_reachable = True

    @property
    def is_expired(self) -> bool:
        """Has the lease run out since the last beat that was answered?"""
        return self._clock() - self._renewed_at > self._lease_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(self._interval_s)

    async def beat(self) -> None:
        """Renew, and act on what the reply says. Redis being away is not an expiry by itself: nobody else can
        claim there either, and the tokens decide when it is back.
        """
        was_frozen = self.is_expired and self.is_reachable
        if was_frozen:
            log.error(
                "this process stood still for longer than its lease of %g s: its jobs are others' now", self._lease_s
            )
            await self._on_expired()
        sent_at = self._clock()
        try:
            reply = await self._stream.heartbeat(self._status())
        except RedisUnavailable as error:
            if self.is_reachable:
                log.warning("the lease cannot be renewed (%s): trying again", error)
            self.is_reachable = False
            return
        if not self.is_reachable:
            log.info("the lease is renewed again")
        self.is_reachable = True
        self._renewed_at = sent_at
        if reply.lost:
            self._on_lost(reply.lost)
        if reply.cancelled:
            self._on_cancelled(reply.cancelled)
