"""Any number of subscriptions over one connection, for an event loop: AsyncClient's streams, a worker's bell.

The connection exists while somebody is subscribed. When it breaks it is opened again, and every subscriber is
told that he may have missed messages. It promises nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from typing import Any

import redis.asyncio
import redis.asyncio.cluster
from redis.exceptions import RedisError

from api_client.effects import Signal
from api_client.errors import QueueUnavailable

log = logging.getLogger(__name__)

MAX_WAITING = 4_096  # messages of one subscriber; one that is slower reads the log instead
_CONFIRM_S = 5.0
_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_POLL_S = 30.0


class HubSubscription:
    """One subscriber of one channel."""

    def __init__(self, hub: ChannelHub, channel: str) -> None:
        self.channel = channel
        self._hub = hub
        self._messages: asyncio.Queue[bytes | Signal] = asyncio.Queue()

    def deliver(self, message: bytes | Signal) -> None:
        if self._messages.qsize() >= MAX_WAITING:
            while not self._messages.empty():
                self._messages.get_nowait()
            message = Signal.MISSED
        self._messages.put_nowait(message)

    async def receive(self, timeout: float) -> bytes | Signal | None:
        """The next message; None after `timeout` seconds; MISSED when some may have been lost."""
        if not self._messages.empty():
            return self._messages.get_nowait()
        try:
            return await asyncio.wait_for(self._messages.get(), timeout)
        except TimeoutError:
            return None

    async def close(self) -> None:
        await self._hub.forget(self)


class ChannelHub:
    """Bound to one event loop. `client` is used for nothing but its pub/sub connections."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._is_cluster = isinstance(client, redis.asyncio.cluster.RedisCluster)
        self._subscribers: defaultdict[str, set[HubSubscription]] = defaultdict(set)
        self._confirmed: dict[str, asyncio.Event] = {}
        self._pubsub: Any = None
        self._node_client: redis.asyncio.Redis | None = None
        self._reader: asyncio.Task[None] | None = None
        self._trouble: Exception | None = None
        self._is_stale = False  # the connection lacks a channel

    async def subscribe(self, channel: str) -> HubSubscription:
        """Returns when the server has confirmed. Raises QueueUnavailable."""
        subscription = HubSubscription(self, channel)
        is_first = channel not in self._subscribers
        self._subscribers[channel].add(subscription)
        try:
            if is_first:
                self._confirmed[channel] = asyncio.Event()
            if self._reader is None or self._reader.done():
                self._trouble = None
                self._reader = asyncio.create_task(self._run(), name="channel-hub")
            elif is_first and self._pubsub is not None:
                await self._send("subscribe", channel)
            await self._wait_confirmed(channel)
        except BaseException:
            await self.forget(subscription)
            raise
        return subscription

    async def forget(self, subscription: HubSubscription) -> None:
        channel = subscription.channel
        subscribers = self._subscribers.get(channel)
        if not subscribers:
            return
        subscribers.discard(subscription)
        if subscribers:
            return
        del self._subscribers[channel]
        self._confirmed.pop(channel, None)
        if not self._subscribers:
            await self._stop_reader()
        elif self._pubsub is not None:
            await self._send("unsubscribe", channel)

    async def close(self) -> None:
        self._subscribers.clear()
        self._confirmed.clear()
        await self._stop_reader()

    async def _wait_confirmed(self, channel: str) -> None:
        event = self._confirmed[channel]
        try:
            await asyncio.wait_for(event.wait(), _CONFIRM_S)
        except TimeoutError:
            raise QueueUnavailable(f"cannot subscribe: {self._trouble or 'no answer'}") from self._trouble

    async def _stop_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _run(self) -> None:
        failures = 0
        try:
            while self._subscribers:
                try:
                    await self._connect()
                    for subscribers in self._subscribers.values():
                        for subscription in subscribers:
                            subscription.deliver(Signal.MISSED)
                    failures = 0
                    await self._read()
                except (RedisError, OSError) as error:
                    self._trouble = error
                    log.debug("pub/sub connection: %s", error)
                await self._disconnect()
                await asyncio.sleep(_PAUSES_S[min(failures, len(_PAUSES_S) - 1)])
                failures += 1
        finally:
            await self._disconnect()

    async def _connect(self) -> None:
        client: Any = self._client
        if isinstance(client, redis.asyncio.cluster.RedisCluster):
            # All channels of a queue are in one slot. Its node may have changed since.
            await client.nodes_manager.initialize()
            node = client.get_node_from_key(next(iter(self._subscribers)))
            if node is None:
                raise QueueUnavailable("no cluster node serves the queue's slot")
            self._node_client = redis.asyncio.Redis(host=str(node.host), port=int(node.port), **_node_options(node))
            client = self._node_client
        self._is_stale = False
        pubsub = client.pubsub()
        channels = list(self._subscribers)
        await (pubsub.ssubscribe(*channels) if self._is_cluster else pubsub.subscribe(*channels))
        self._pubsub = pubsub
        for channel in self._subscribers.keys() - set(channels):  # somebody came while we connected
            await self._send("subscribe", channel)

    async def _read(self) -> None:
        while self._subscribers and not self._is_stale:
            message = await self._pubsub.get_message(timeout=_POLL_S)
            if message is None:
                continue
            channel = message["channel"].decode()
            if message["type"] in ("message", "smessage"):
                for subscription in self._subscribers.get(channel, ()):
                    subscription.deliver(message["data"])
            elif message["type"] in ("subscribe", "ssubscribe") and channel in self._confirmed:
                self._confirmed[channel].set()
            elif message["type"] == "sunsubscribe" and channel in self._subscribers:
                return  # the slot has moved: connect anew

    async def _send(self, verb: str, channel: str) -> None:
        """Straight to the connection, for only the reader may connect: two that read one socket break each other.
        After a failure the reader connects anew, with every channel.
        """
        connection = self._pubsub.connection
        if connection is None or not connection.is_connected:
            self._is_stale = True
            return
        try:
            command = ("s" if self._is_cluster else "") + verb
            await connection.send_command(command.upper(), channel, check_health=False)
        except (RedisError, OSError, AttributeError):  # closed meanwhile: it has no writer
            self._is_stale = True

    async def _disconnect(self) -> None:
        pubsub, self._pubsub = self._pubsub, None
        node_client, self._node_client = self._node_client, None
        with contextlib.suppress(RedisError, OSError):
            if pubsub is not None:
                await pubsub.aclose()
        with contextlib.suppress(RedisError, OSError):
            if node_client is not None:
                await node_client.aclose()


def _node_options(node: Any) -> dict[str, Any]:
    taken = ("username", "password", "ssl", "socket_timeout", "socket_connect_timeout", "protocol")
    options = {
        name: value for name, value in node.connection_kwargs.items() if name in taken or name.startswith("ssl_")
    }
    if issubclass(node.connection_class, redis.asyncio.SSLConnection):
        options["ssl"] = True
    return options
