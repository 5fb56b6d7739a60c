"""Receives the messages that cannot wait for the next heartbeat: wake-ups for all workers, and
wake-ups and commands for this worker.

It uses a connection of its own. Nothing depends on it: a missed wake-up costs one poll interval, a
missed cancel one heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import redis.asyncio

from tokenmill.errors import QueueUnavailable
from tokenmill.transport.async_pubsub import MultiplexedSubscription, PubSubMultiplexer
from tokenmill.transport.sync_pubsub import Signal
from tokenmill_schemas.codec import DecodeError, decode_control
from tokenmill_schemas.control import Cancel, Drain, WakeUp
from tokenmill_schemas.keys import Keys

log = logging.getLogger(__name__)

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
