"""Renews the leases of all jobs of a worker with one heartbeat. A process that was frozen for
longer than its lease owns no job any more.

A process that wakes from a freeze (SIGSTOP, a paused machine) must not write: other workers have
its jobs by then. A ticker measures how long the event loop did not run. `lease_expired` is true
from the first moment after the freeze, and the job stream checks it before every write. Fencing
tokens refuse any write that gets through all the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from tokenmill.transport.cancellation import end_task
from tokenmill_schemas.control import WorkerStatus
from tokenmill_worker.consume.scripts import HeartbeatReply
from tokenmill_worker.errors import RedisUnavailable, Replaced

log = logging.getLogger(__name__)

TICKS_PER_LEASE = 20
LONGEST_TICK_S = 0.5


class HeartbeatSender(Protocol):
    """The part of the queue that a lease keeper uses; implemented by JobStream."""

    lease_expired: Callable[[], bool]

    async def heartbeat(self, status: WorkerStatus) -> HeartbeatReply: ...


class LeaseKeeper:
    """Sends heartbeats and detects freezes. `clock` is monotonic and goes on while the process is
    frozen. Callbacks run in the event loop.
    """

    def __init__(
        self,
        stream: HeartbeatSender,
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
        self._ticked_at = clock()
        self._froze = False
        self.problem: str | None = None  # why the last heartbeat failed
        self.num_renewed = self.num_failed = self.num_expired = 0  # since the start
        stream.lease_expired = self.lease_expired

    def lease_expired(self) -> bool:
        """Was this process frozen past its lease, with its jobs not given up yet?"""
        if self._clock() - self._ticked_at > self._lease_s:
            self._froze = True
        return self._froze

    async def run(self) -> None:
        """Send heartbeats until cancelled. Raises Replaced."""
        self._ticked_at = self._clock()
        ticker = asyncio.create_task(self._tick(), name="lease-ticker")
        try:
            while True:
                await self.beat()
                await asyncio.sleep(self._interval_s)
        finally:
            await end_task(ticker)

    async def _tick(self) -> None:
        while True:
            await self.tick()
            await asyncio.sleep(min(LONGEST_TICK_S, self._lease_s / TICKS_PER_LEASE))

    async def tick(self) -> None:
        """Record that the event loop runs. After a freeze, give up all jobs before anything else
        happens.
        """
        froze = self.lease_expired()
        self._ticked_at = self._clock()
        if not froze:
            return
        self.num_expired += 1
        log.error(
            "This process was frozen for longer than its lease of %g s; it drops all of its jobs",
            self._lease_s,
        )
        try:
            await self._on_expired()
        finally:
            self._froze = False

    async def beat(self) -> None:
        """Renew the lease and act on the reply. An unreachable Redis does not expire the lease: no
        other worker can claim there either, and the fencing tokens decide when it is back. Raises
        Replaced.
        """
        if self.lease_expired():
            return  # the ticker gives up the jobs
        try:
            reply = await self._stream.heartbeat(self._status())
        except RedisUnavailable as error:
            if self.problem is None:
                log.warning("The lease cannot be renewed yet: %s", error)
            self.problem = str(error)
            self.num_failed += 1
            return
        if self.problem is not None:
            log.info("The lease is renewed again")
        self.problem = None
        self.num_renewed += 1
        if reply.is_replaced:
            raise Replaced
        if reply.lost:
            self._on_lost(reply.lost)
        if reply.cancelled:
            self._on_cancelled(reply.cancelled)
