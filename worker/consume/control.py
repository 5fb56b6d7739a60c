"""Listens to what cannot wait for the next heartbeat: the queue's bell, and orders to this worker.

A connection of its own. Nothing depends on it: a missed bell costs one poll
interval, a missed cancel one heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from schemas.control import Cancel, ControlMessage, Drain
from schemas.keys import Keys

log = logging.getLogger(__name__)

RECONNECT_S = 0.5
_decoder = msgspec.msgpack.Decoder(ControlMessage)


class ControlChannel:
    """`client` is used for nothing else."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        keys: Keys,
        worker_id: str,
        *,
        on_bell: Callable[[], None],
        on_cancel: Callable[[str], None],
        on_drain: Callable[[], None],
        sharded: bool = False,
    ) -> None:
        self._client = client
        self._bell = keys.bell
        self._control = keys.control(worker_id)
        self._on_bell = on_bell
        self._on_cancel = on_cancel
        self._on_drain = on_drain
        self._sharded = sharded

    async def run(self) -> None:
        """Until cancelled; reconnects for ever."""
        while True:
            try:
                await self._listen()
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("control channel: %s", error)
            await asyncio.sleep(RECONNECT_S)

    async def _listen(self) -> None:
        async with self._client.pubsub() as pubsub:
            subscribe = pubsub.ssubscribe if self._sharded else pubsub.subscribe
            await subscribe(self._bell, self._control)
            self._on_bell()  # whatever rang before
            while True:
                message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=2.0)
                if message is not None:
                    self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        channel = message["channel"]
        if (channel.decode() if isinstance(channel, bytes) else channel) == self._bell:
            self._on_bell()
            return
        try:
            order = _decoder.decode(message["data"])
        except (msgspec.MsgspecError, TypeError) as error:
            log.warning("a control message cannot be read: %s", error)
            return
        match order:
            case Cancel():
                self._on_cancel(order.job_id)
            case Drain():
                self._on_drain()
