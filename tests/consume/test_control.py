"""A control channel that the worker may not subscribe to costs it no other subscription."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from tokenmill.errors import QueueUnavailable
from tokenmill.transport.async_pubsub import MultiplexedSubscription, PubSubMultiplexer
from tokenmill.transport.cancellation import end_task
from tokenmill_schemas.keys import Keys
from tokenmill_worker.consume import control
from tokenmill_worker.consume.control import ControlChannel

pytestmark = pytest.mark.redis


async def nothing() -> None: ...


async def test_one_channel_refused_leaves_no_subscription_of_the_other(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, attempts, open_wake_ups = Keys("q"), asyncio.Semaphore(0), 0
    subscribe, close = PubSubMultiplexer.subscribe, MultiplexedSubscription.close

    async def refuse_control(self: PubSubMultiplexer, channel: str) -> MultiplexedSubscription:
        nonlocal open_wake_ups
        if channel == keys.wake_up:
            open_wake_ups += 1
            return await subscribe(self, channel)
        attempts.release()
        raise QueueUnavailable("no permissions")

    async def count_close(self: MultiplexedSubscription) -> None:
        nonlocal open_wake_ups
        open_wake_ups -= 1
        await close(self)

    monkeypatch.setattr(PubSubMultiplexer, "subscribe", refuse_control)
    monkeypatch.setattr(MultiplexedSubscription, "close", count_close)
    monkeypatch.setattr(control, "RECONNECT_S", 0.01)
    client = redis.asyncio.Redis.from_url(redis_url)
    channel = ControlChannel(
        client,
        keys,
        "w",
        on_wake_all=lambda: None,
        on_wake_up=nothing,
        on_cancel=lambda _: None,
        on_drain=lambda: None,
    )
    listening = asyncio.create_task(channel.run())
    try:
        for _ in range(3):
            await asyncio.wait_for(attempts.acquire(), 10)
        assert open_wake_ups <= 1
    finally:
        await end_task(listening)
        await client.aclose()
