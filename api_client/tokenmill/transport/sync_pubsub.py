"""One subscription on a connection of its own, for the threaded client; sharded in a cluster.

It delivers messages, and reports when some may have been missed.
"""

from __future__ import annotations

import contextlib
import time
from enum import Enum, auto
from typing import Any

import redis
import redis.cluster

from tokenmill.errors import QueueUnavailable
from tokenmill.transport.connect import SERVER_TROUBLE, server_words

_CONFIRM_S = 5.0


class Signal(Enum):
    """An event of a subscription that is no message."""

    MISSED = auto()  # messages may have been lost


class Subscription:
    """A subscription that the server has confirmed when the constructor returns. Raises
    QueueUnavailable.
    """

    def __init__(self, client: redis.Redis, channel: str) -> None:
        self._pubsub = _open(client, channel)
        deadline = time.monotonic() + _CONFIRM_S
        while (
            message := self._next(max(0.0, deadline - time.monotonic()))
        ) is None or "subscribe" not in message["type"]:
            if time.monotonic() > deadline:
                self.close()
                raise QueueUnavailable("the server did not confirm a subscription")

    def receive(self, timeout: float) -> bytes | Signal | None:
        """Return the next message; None after `timeout` seconds; MISSED if redis-py has subscribed
        again. Raises QueueUnavailable if the connection is lost.
        """
        deadline = time.monotonic() + timeout
        while True:
            message = self._next(max(0.0, deadline - time.monotonic()))
            if message is None:
                if time.monotonic() >= deadline:
                    return None
            elif message["type"] in ("message", "smessage"):
                return bytes(message["data"])
            elif message["type"] in ("subscribe", "ssubscribe"):
                return Signal.MISSED
            elif "unsubscribe" in message["type"]:
                raise QueueUnavailable("the server ended a subscription: its slot has moved")

    def close(self) -> None:
        # a lost connection has ended the subscription already
        with contextlib.suppress(*SERVER_TROUBLE):
            self._pubsub.close()

    def _next(self, timeout: float) -> dict[str, Any] | None:
        try:
            message: dict[str, Any] | None = self._pubsub.get_message(timeout=timeout)
        except SERVER_TROUBLE as error:
            self.close()
            raise QueueUnavailable(f"the subscription broke: {server_words(error)}") from error
        return message


def _open(client: Any, channel: str) -> Any:
    try:
        if not isinstance(client, redis.cluster.RedisCluster):
            pubsub = client.pubsub()
            pubsub.subscribe(channel)
            return pubsub
        cluster: Any = client
        cluster.nodes_manager.initialize()  # the slot may have moved since
        pubsub = cluster.get_redis_connection(cluster.get_node_from_key(channel)).pubsub()
        pubsub.ssubscribe(channel)
        return pubsub
    except SERVER_TROUBLE as error:
        raise QueueUnavailable(f"cannot subscribe: {server_words(error)}") from error
