"""Renews the leases of all jobs of a worker with one heartbeat, and receives the messages that
cannot wait for the next one: wake-ups for all workers, and wake-ups and commands for this worker.

A process that was frozen for longer than its lease (SIGSTOP, a paused machine) owns no job any more
and must not write: other workers have its jobs by then. The job stream owns a `Lease` and asks it
before every write; the keeper ticks it. Fencing tokens refuse any write that gets through all the
same.

The control channel uses a connection of its own. Nothing depends on it: a missed wake-up costs one
poll interval, a missed cancel one heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import redis.asyncio

from tokenmill.errors import QueueUnavailable
from tokenmill.transport.async_pubsub import MultiplexedSubscription, PubSubMultiplexer
from tokenmill.transport.repairs import end_task
from tokenmill.transport.sync_pubsub import Signal
from tokenmill_schemas.codec import DecodeError, decode_control
from tokenmill_schemas.control import Cancel, Drain, WakeUp, WorkerStatus
from tokenmill_schemas.keys import Keys
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


RECONNECT_S = 0.5
_WAIT_S = 60.0


class ControlChannel:
    """Subscribes to the queue's wake-up channel and to the worker's own. `client` is used for
    nothing else.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        worker_id: str,
        *,
        on_wake_all: Callable[[], None],
        on_wake_up: Callable[[], Awaitable[None]],
        on_cancel: Callable[[str], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._client = client
        self._wake_channel = keys.wake_up
        self._control_channel = keys.control(worker_id)
        self._on_wake_all = on_wake_all
        self._on_wake_up = on_wake_up
        self._on_cancel = on_cancel
        self._on_drain = on_drain

    async def run(self) -> None:
        """Receive messages until cancelled; reconnects without limit."""
        pubsub = PubSubMultiplexer(self._client)
        try:
            while True:
                try:
                    async with (
                        _subscribed(pubsub, self._wake_channel) as wake_ups,
                        _subscribed(pubsub, self._control_channel) as commands,
                    ):
                        await asyncio.gather(
                            self._read_wake_ups(wake_ups), self._read_commands(commands)
                        )
                except QueueUnavailable as error:
                    log.debug(
                        "The control channel is interrupted; it is subscribed again: %s", error
                    )
                await asyncio.sleep(RECONNECT_S)
        finally:
            await pubsub.close()

    async def _read_wake_ups(self, subscription: MultiplexedSubscription) -> None:
        self._on_wake_all()  # wake-ups from before the subscription
        while True:
            message = await subscription.receive(_WAIT_S)
            if message is not None:  # a message, or a Signal that one may have been missed
                self._on_wake_all()

    async def _read_commands(self, subscription: MultiplexedSubscription) -> None:
        while True:
            message = await subscription.receive(_WAIT_S)
            if message is not None and not isinstance(message, Signal):
                await self._handle(message)

    async def _handle(self, message: bytes) -> None:
        try:
            command = decode_control(message)
        except DecodeError as error:  # for example a message of a later version
            log.warning("Ignored a control message that cannot be decoded: %s", error)
            return
        match command:
            case Cancel():
                self._on_cancel(command.job_id)
            case Drain():
                self._on_drain()
            case WakeUp():
                await self._on_wake_up()


@contextlib.asynccontextmanager
async def _subscribed(
    pubsub: PubSubMultiplexer, channel: str
) -> AsyncIterator[MultiplexedSubscription]:
    subscription = await pubsub.subscribe(channel)
    try:
        yield subscription
    finally:
        await subscription.close()
