"""Multiplexes many subscriptions over one connection, for an event loop: AsyncClient's streams and
a worker's wake-ups.

The connection is open while there is a subscriber. When it breaks it is opened again, and every
subscriber receives MISSED, because messages may have been lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import redis.asyncio
import redis.asyncio.cluster

from tokenmill.errors import QueueUnavailable
from tokenmill.transport.backoff import Backoff
from tokenmill.transport.connect import SERVER_TROUBLE
from tokenmill.transport.raw_protocol import PubSubConnection
from tokenmill.transport.repairs import TICKS, end_task, wait_at_most
from tokenmill.transport.sync_pubsub import Signal

log = logging.getLogger(__name__)

# messages queued per subscriber; beyond it they are dropped and it reads the log
MAX_WAITING = 1_024
_CONFIRM_S = 5.0
_GATHER_S = 0.1  # silent subscriptions of so long a time are looked at together
_LOOKED_AT_ONCE = 500
Look = Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]]
_RECONNECT = Backoff(first_s=0.05, longest_s=2.0)


class MultiplexedSubscription:
    """One subscription to one channel; one task receives at a time.

    Each subscription has one timer for all its messages, because a timer per message would cost
    more than the message. It fires at the latest time for which a receiver waited when it was set,
    and is set again if a receiver then waits for longer.
    """

    __slots__ = (
        "_fires_at",
        "_limit_at",
        "_loop",
        "_messages",
        "_multiplexer",
        "_timer",
        "_wait_s",
        "_wait_until",
        "_waiter",
        "channel",
        "seen",
    )

    def __init__(self, multiplexer: PubSubMultiplexer, channel: bytes) -> None:
        self.channel = channel
        self._multiplexer = multiplexer
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes | Signal] = deque()
        self._waiter: asyncio.Future[bytes | Signal | None] | None = None
        self._wait_until = self._limit_at = 0.0  # in the loop's time
        self._wait_s = 0.0
        self.seen: bytes | None = None  # the state at the last look
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = math.inf  # when the timer fires; inf without a timer

    def deliver(self, message: bytes | Signal) -> None:
        waiter, messages = self._waiter, self._messages
        if waiter is not None and not waiter.done():  # the usual case; no message is queued then
            waiter.set_result(message)
            return
        if len(messages) >= MAX_WAITING:
            messages.clear()
            message = Signal.MISSED
        messages.append(message)

    def taken(self) -> bytes | Signal | None:
        """Return a message that is there; None without one."""
        return self._messages.popleft() if self._messages else None

    async def receive(self, timeout: float, limit: float = 0.0) -> bytes | Signal | None:
        """Return the next message; None after `timeout` seconds; MISSED if messages may have been
        lost. With a look of the multiplexer, None comes if that sees a change, or after `limit`
        seconds.
        """
        if self._messages:
            return self._messages.popleft()
        loop = self._loop
        now = loop.time()
        self._wait_s = timeout
        self._wait_until = now + timeout
        self._limit_at = now + limit
        if self._fires_at > self._wait_until:
            self._set_timer()
        waiter = self._waiter = loop.create_future()
        try:
            message = await waiter
        except asyncio.CancelledError:
            # a message came too
            if not waiter.cancelled() and (message := waiter.result()) is not None:
                self._messages.appendleft(message)
            raise
        finally:
            self._waiter = None
        return self._messages.popleft() if message is None and self._messages else message

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._fires_at = None, math.inf
        await self._multiplexer.forget(self)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = self._wait_until
        self._timer = self._loop.call_at(self._wait_until, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._fires_at = None, math.inf
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._wait_until:
            self._set_timer()
        elif not (self._wait_until < self._limit_at and self._multiplexer.look_at(self)):
            self._waiter.set_result(None)
        else:
            self._wait_until = min(self._loop.time() + self._wait_s, self._limit_at)
            self._set_timer()

    def wake(self) -> bool:
        """End a wait with None. Return whether there was one."""
        if self._waiter is None or self._waiter.done():
            return False
        self._waiter.set_result(None)
        return True


class PubSubMultiplexer:
    """The subscriptions of one event loop. `client` is used only for its pub/sub connections.
    `look` returns the state of each channel's subject, for the silent ones.
    """

    def __init__(self, client: redis.asyncio.Redis, look: Look | None = None) -> None:
        self._client: Any = client
        self._look = look
        self._silent: list[MultiplexedSubscription] = []
        self._looking: asyncio.Task[None] | None = None
        self._is_cluster = isinstance(self._client, redis.asyncio.cluster.RedisCluster)
        self._subscribers: dict[bytes, tuple[MultiplexedSubscription, ...]] = {}
        self._confirmed: dict[bytes, asyncio.Event] = {}
        self._connection: PubSubConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._trouble: Exception | None = None
        self._num_heard = 0  # messages and confirmations
        self._is_closed = False

    async def subscribe(self, channel: str) -> MultiplexedSubscription:
        """Subscribe to a channel; return when the server has confirmed it. Raises
        QueueUnavailable.
        """
        self._check_open()
        name = channel.encode()
        subscription = MultiplexedSubscription(self, name)
        others = self._subscribers.get(name, ())
        is_first = not others
        self._subscribers[name] = (*others, subscription)
        try:
            if is_first:
                self._confirmed[name] = asyncio.Event()
            if self._reader is None:
                self._trouble = None
                self._reader = asyncio.create_task(self._run(), name="pubsub-multiplexer")
            elif is_first and self._connection is not None:
                await self._connection.update(name, partial(self._is_wanted, name))
            await self._wait_confirmed(name)
        except BaseException:
            await self.forget(subscription)
            raise
        return subscription

    async def forget(self, subscription: MultiplexedSubscription) -> None:
        channel = subscription.channel
        subscribers = self._subscribers.get(channel, ())
        if subscription not in subscribers:
            return
        others = tuple(other for other in subscribers if other is not subscription)
        if others:
            self._subscribers[channel] = others
            return
        del self._subscribers[channel]
        self._confirmed.pop(channel, None)
        if not self._subscribers:
            await self._stop_reader()
        elif self._connection is not None:
            await self._connection.update(channel, partial(self._is_wanted, channel))

    async def close(self) -> None:
        """Close all subscriptions for good. Every waiting receiver returns MISSED at once."""
        self._is_closed = True
        subscribers, self._subscribers = self._subscribers, {}
        for confirmed in self._confirmed.values():
            confirmed.set()
        await self._stop_reader()
        looking, self._looking = self._looking, None
        await end_task(looking)
        for subscription in chain(*subscribers.values()):
            subscription.deliver(Signal.MISSED)

    def look_at(self, subscription: MultiplexedSubscription) -> bool:
        """Wake a silent subscription if the next look sees a change. Return False without looks."""
        if self._look is None or self._is_closed:
            return False
        self._silent.append(subscription)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_at_silent(), name="silent-streams")
        return True

    async def _look_at_silent(self) -> None:
        assert self._look is not None
        try:
            await asyncio.sleep(_GATHER_S)
            while self._silent:
                part = self._silent[:_LOOKED_AT_ONCE]
                del self._silent[:_LOOKED_AT_ONCE]
                try:
                    states: Sequence[bytes | None]
                    states = await self._look([one.channel for one in part])
                except QueueUnavailable:
                    states = [None] * len(part)  # each looks for itself, and knows how long to wait
                for one, state in zip(part, states, strict=True):
                    if (state is None or state != one.seen) and one.wake():
                        one.seen = state
        finally:
            self._looking = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise QueueUnavailable("cannot subscribe: closed")

    async def _wait_confirmed(self, channel: bytes) -> None:
        """Wait until the server has confirmed a channel. The limit is for the silence of the
        connection: the confirmations of thousands of channels may come one after the other.
        """
        confirmed, heard, silent_ticks = self._confirmed[channel], self._num_heard, 0
        while not await wait_at_most(confirmed, _CONFIRM_S / TICKS):
            silent_ticks = silent_ticks + 1 if heard == self._num_heard else 0
            heard = self._num_heard
            if silent_ticks == TICKS:
                raise QueueUnavailable(
                    f"cannot subscribe: {self._trouble or 'no answer'}"
                ) from self._trouble
        self._check_open()

    async def _stop_reader(self) -> None:
        """End the reader task. A subscription made meanwhile starts a new one."""
        reader, self._reader, self._connection = self._reader, None, None
        await end_task(reader)

    async def _run(self) -> None:
        me, failures = asyncio.current_task(), 0
        while self._reader is me and self._subscribers:
            connection: PubSubConnection | None = None
            try:
                connection = await self._connect()
                failures = 0
                await connection.read()
            except SERVER_TROUBLE as error:
                self._trouble = error
                log.debug("The pub/sub connection is lost; it is made again: %s", error)
            finally:
                if self._connection is connection:
                    self._connection = None
                if connection is not None:
                    await connection.close()
            failures += 1
            await asyncio.sleep(_RECONNECT.delay_s(failures))

    async def _connect(self) -> PubSubConnection:
        client, owned = self._client, None
        if self._is_cluster:
            # All channels of a queue are in one slot, whose node may have changed.
            await client.initialize()  # without this, its close() closes nothing
            await client.nodes_manager.initialize()
            node = client.get_node_from_key(next(iter(self._subscribers), b""))
            if node is None:
                raise QueueUnavailable("no cluster node serves the queue's slot")
            client = owned = redis.asyncio.Redis(
                host=str(node.host), port=int(node.port), **_node_options(node)
            )
        connection = PubSubConnection(client, self._deliver, sharded=self._is_cluster, owned=owned)
        try:
            channels = list(self._subscribers)
            await connection.open(channels)
            self._connection = connection
            # subscribed during the connect
            for channel in self._subscribers.keys() - set(channels):
                await connection.update(channel, partial(self._is_wanted, channel))
        except BaseException:
            await connection.close()
            raise
        for subscribers in self._subscribers.values():
            for subscription in subscribers:
                subscription.deliver(Signal.MISSED)
        return connection

    def _is_wanted(self, channel: bytes) -> bool:
        return channel in self._subscribers

    def _deliver(self, message: list[Any]) -> bool:
        """Deliver a message to its subscribers. Return False if the slot has moved to another node
        and the connection must be opened again."""
        self._num_heard += 1
        kind, channel = message[0], message[1]
        if kind in (b"message", b"smessage"):
            for subscription in self._subscribers.get(channel, ()):
                subscription.deliver(message[2])
        elif kind in (b"subscribe", b"ssubscribe") and channel in self._confirmed:
            self._confirmed[channel].set()
        elif kind == b"sunsubscribe" and channel in self._subscribers:
            return False
        return True


def _node_options(node: Any) -> dict[str, Any]:
    taken = (
        "username", "password", "ssl", "socket_timeout", "socket_connect_timeout", "protocol",
        "driver_info",
    )  # fmt: skip
    options = {
        name: value
        for name, value in node.connection_kwargs.items()
        if name in taken or name.startswith("ssl_")
    }
    if issubclass(node.connection_class, redis.asyncio.SSLConnection):
        options["ssl"] = True
    return options
