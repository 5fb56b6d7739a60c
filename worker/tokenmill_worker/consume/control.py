"""Receives the messages that cannot wait for the next heartbeat: the queue's wake-ups (`bell`), and
calls and orders to this worker.

It uses a connection of its own. Nothing depends on it: a missed wake-up or call costs one poll
interval, a missed cancel one heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import redis.asyncio

from tokenmill.errors import QueueUnavailable
from tokenmill.transport.async_pubsub import ChannelHub, HubSubscription
from tokenmill.transport.sync_pubsub import Signal
from tokenmill_schemas.codec import DecodeError, decode_control
from tokenmill_schemas.control import Call, Cancel, Drain
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
        on_bell: Callable[[], None],
        on_call: Callable[[], Awaitable[None]],
        on_cancel: Callable[[str], None],
        on_drain: Callable[[], None],
    ) -> None:
        self._client = client
        self._bell = keys.bell
        self._control = keys.control(worker_id)
        self._on_bell = on_bell
        self._on_call = on_call
        self._on_cancel = on_cancel
        self._on_drain = on_drain

    async def run(self) -> None:
        """Receive messages until cancelled; reconnects without limit."""
        hub = ChannelHub(self._client)
        try:
            while True:
                try:
                    async with (
                        _subscribed(hub, self._bell) as bell,
                        _subscribed(hub, self._control) as control,
                    ):
                        await asyncio.gather(self._hear_bell(bell), self._hear_orders(control))
                except QueueUnavailable as error:
                    log.debug("control channel: %s", error)
                await asyncio.sleep(RECONNECT_S)
        finally:
            await hub.close()

    async def _hear_bell(self, subscription: HubSubscription) -> None:
        self._on_bell()  # wake-ups from before the subscription
        while True:
            if (
                await subscription.receive(_WAIT_S) is not None
            ):  # a message, or a Signal that one may have been missed
                self._on_bell()

    async def _hear_orders(self, subscription: HubSubscription) -> None:
        while True:
            message = await subscription.receive(_WAIT_S)
            if message is not None and not isinstance(message, Signal):
                await self._obey(message)

    async def _obey(self, message: bytes) -> None:
        try:
            order = decode_control(message)
        except DecodeError as error:  # for example a message of a later version
            log.warning("not obeyed: %s", error)
            return
        match order:
            case Cancel():
                self._on_cancel(order.job_id)
            case Drain():
                self._on_drain()
            case Call():
                await self._on_call()


@contextlib.asynccontextmanager
async def _subscribed(hub: ChannelHub, channel: str) -> AsyncIterator[HubSubscription]:
    subscription = await hub.subscribe(channel)
    try:
        yield subscription
    finally:
        await subscription.close()
