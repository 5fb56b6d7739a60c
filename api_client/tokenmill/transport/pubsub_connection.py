"""One pub/sub connection of an event loop, read by a task and written beside it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from typing import Any

import redis.asyncio

from tokenmill.transport.cancellation import end_task
from tokenmill.transport.connect import SERVER_TROUBLE
from tokenmill.transport.raw_protocol import RawRedisProtocol


class PubSubConnection:
    """One pub/sub connection.

    `deliver` is called with each message as [kind, channel, content]. It returns False if the
    connection must be closed.

    Only the reader task opens and closes the connection. Other tasks send through `update`. A send
    during a close would break redis-py, so a lock separates them.
    """

    def __init__(
        self,
        client: Any,
        deliver: Callable[[list[Any]], bool],
        *,
        sharded: bool,
        owned: redis.asyncio.Redis | None,
    ) -> None:
        self._pubsub = client.pubsub()
        self._deliver = deliver
        self._prefix = "S" if sharded else ""
        self._owned = owned  # a client that exists for this connection only
        self._lock = asyncio.Lock()
        self._protocol: RawRedisProtocol | None = None
        self._over = asyncio.Event()
        self._trouble: Exception | None = None

    async def open(self, channels: list[bytes]) -> None:
        async with self._lock:
            await self._pubsub.connect()
            connection = self._pubsub.connection
            self._protocol = RawRedisProtocol.over(connection, self._take, self._end)
            # redis-py's own `subscribe` may first check the connection and wait for a reply.
            await connection.send_command(f"{self._prefix}SUBSCRIBE", *channels, check_health=False)

    async def update(self, channel: bytes, is_wanted: Callable[[], bool]) -> None:
        """Subscribe or unsubscribe, whichever is wanted when the lock is acquired, so that the last
        request counts. If sending fails, the connection ends."""
        async with self._lock:
            verb = f"{self._prefix}{'' if is_wanted() else 'UN'}SUBSCRIBE"
            connection = self._pubsub.connection
            try:
                if connection is None or not connection.is_connected:
                    raise ConnectionError("not connected")
                await connection.send_command(verb, channel, check_health=False)
            # AttributeError: the socket was dropped meanwhile
            except (*SERVER_TROUBLE, AttributeError) as error:
                self._end(ConnectionError(f"{verb} could not be sent: {error}"))

    async def read(self) -> None:
        """Return when the connection has to be opened again. Raises SERVER_TROUBLE if it is
        lost.
        """
        listener = (
            asyncio.create_task(self._listen(), name="channel-listener")
            if self._protocol is None
            else None
        )
        try:
            await self._over.wait()
        finally:
            await end_task(listener)
        if self._trouble is not None:
            raise self._trouble

    async def close(self) -> None:
        if self._protocol is not None:
            self._protocol.end(ConnectionError("closed"))
        async with self._lock:
            for part in (self._pubsub, self._owned):
                with contextlib.suppress(*SERVER_TROUBLE):
                    if part is not None:
                        await part.aclose()

    async def _listen(self) -> None:
        """Read replies through redis-py, for connections that have no transport."""
        try:
            while not self._over.is_set():
                self._take(
                    await self._pubsub.connection.read_response(
                        disable_decoding=True,
                        timeout=math.inf,
                        disconnect_on_error=False,
                        push_request=True,
                    )
                )
        except (*SERVER_TROUBLE, AttributeError) as error:  # AttributeError: it is closed
            self._end(ConnectionError(f"the connection is lost: {error}"))

    def _take(self, reply: Any) -> None:
        if isinstance(reply, list):
            if not self._deliver(reply):
                self._over.set()
        elif isinstance(reply, Exception):
            self._end(reply)
        else:  # without a timeout, redis-py returns None only for a lost peer (ETIMEDOUT)
            self._end(ConnectionError("the connection is lost"))

    def _end(self, trouble: Exception) -> None:
        if not self._over.is_set():
            self._trouble = trouble
            self._over.set()
