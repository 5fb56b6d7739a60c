"""Renews the leases of all jobs of a worker with one heartbeat. A process that was frozen for
longer than its lease owns no job any more.

A process that wakes from a freeze (SIGSTOP, a paused machine) must not write: other workers have
its jobs by then. The job stream owns a `Lease` and asks it before every write; the keeper ticks it.
Fencing tokens refuse any write that gets through all the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from tokenmill.transport.repairs import end_task
from tokenmill_schemas.control import WorkerStatus
from tokenmill_worker.errors import RedisUnavailable, Replaced
from tokenmill_worker.queue.scripts import HeartbeatReply

log = logging.getLogger(__name__)

TICKS_PER_LEASE = 20
LONGEST_TICK_S = 0.5


class Lease:
    """Tells whether this process was frozen for longer than its lease. `tick` says that the event
    loop runs; before the first tick nothing expires. `clock` is monotonic and goes on while the
    process is frozen.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._ticked_at: float | None = None
        self._has_frozen = False

    def is_expired(self) -> bool:
        """Return True from the first moment after such a freeze until `resume`."""
        if self._ticked_at is not None and self._clock() - self._ticked_at > self.seconds:
            self._has_frozen = True
        return self._has_frozen

    def tick(self) -> bool:
        """Note that the event loop runs; return whether the lease has expired."""
        is_expired = self.is_expired()
        self._ticked_at = self._clock()
        return is_expired

    def resume(self) -> None:
        """Allow writes again: the jobs of before the freeze are given up."""
        self._has_frozen = False


class HeartbeatSender(Protocol):
    """The part of the queue that a lease keeper uses; implemented by JobStream."""

    lease: Lease

    async def heartbeat(self, status: WorkerStatus) -> HeartbeatReply: ...


class LeaseKeeper:
    """Sends heartbeats and ticks the stream's lease. Callbacks run in the event loop."""

    def __init__(
        self,
        stream: HeartbeatSender,
        *,
        interval_s: float,
        on_cancelled: Callable[[tuple[str, ...]], None],
        on_lost: Callable[[tuple[str, ...]], None],
        on_expired: Callable[[], Awaitable[None]],
    ) -> None:
        self._stream = stream
        self._lease = stream.lease
        self._interval_s = interval_s
        self._on_cancelled = on_cancelled
        self._on_lost = on_lost
        self._on_expired = on_expired
        self.problem: str | None = None  # why the last heartbeat failed
        self.num_renewed = self.num_failed = self.num_expired = 0  # since the start

    async def run(self, status: Callable[[], WorkerStatus]) -> None:
        """Send heartbeats with the worker's status until cancelled. Raises Replaced."""
        self._lease.tick()
        ticker = asyncio.create_task(self._tick(), name="lease-ticker")
        try:
            while True:
                await self.beat(status())
                await asyncio.sleep(self._interval_s)
        finally:
            await end_task(ticker)

    async def _tick(self) -> None:
        while True:
            await self.tick()
            await asyncio.sleep(min(LONGEST_TICK_S, self._lease.seconds / TICKS_PER_LEASE))

    async def tick(self) -> None:
        """Record that the event loop runs. After a freeze, give up all jobs before anything else
        happens.
        """
        if not self._lease.tick():
            return
        self.num_expired += 1
        log.error(
            "This process was frozen for longer than its lease of %g s; it drops all of its jobs",
            self._lease.seconds,
        )
        try:
            await self._on_expired()
        finally:
            self._lease.resume()

    async def beat(self, status: WorkerStatus) -> None:
        """Renew the lease and act on the reply. An unreachable Redis does not expire the lease: no
        other worker can claim there either, and the fencing tokens decide when it is back. Raises
        Replaced.
        """
        if self._lease.is_expired():
            return  # the ticker gives up the jobs
        try:
            reply = await self._stream.heartbeat(status)
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
