"""The control channel of a worker, on a real server."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from tests.support.queue import Queue
from tests.support.waiting import until
from tokenmill.errors import QueueUnavailable
from tokenmill.transport.async_pubsub import MultiplexedSubscription, PubSubMultiplexer
from tokenmill.transport.repairs import end_task
from tokenmill_schemas.codec import encode
from tokenmill_schemas.control import Drain
from tokenmill_schemas.keys import Keys
from tokenmill_worker.queue import leases
from tokenmill_worker.queue.leases import ControlChannel

pytestmark = pytest.mark.redis


async def nothing() -> None: ...


async def test_a_refused_channel_leaves_no_subscription_of_the_other_channel(
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
    monkeypatch.setattr(leases, "RECONNECT_S", 0.01)
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


async def test_wake_up_cancel_and_drain_reach_a_worker_over_a_broken_connection(
    queue: Queue,
) -> None:
    wake_ups: list[None] = []
    calls: list[None] = []
    cancelled: list[str] = []
    drains: list[None] = []

    async def call() -> None:
        calls.append(None)

    control = ControlChannel(
        queue.redis,
        queue.keys,
        "w1",
        on_wake_all=lambda: wake_ups.append(None),
        on_wake_up=call,
        on_cancel=cancelled.append,
        on_drain=lambda: drains.append(None),
    )
    task = asyncio.create_task(control.run())

    async def listens() -> bool:
        return bool(
            dict(await queue.redis.pubsub_numsub(queue.keys.control("w1")))[
                queue.keys.control("w1").encode()
            ]
        )

    async def connections() -> set[str]:
        return {client["id"] for client in await queue.redis.client_list(_type="pubsub")}

    async def listens_on_another() -> bool:
        return await listens() and broken.isdisjoint(await connections())

    async def has_received() -> bool:
        return bool(cancelled and drains and len(wake_ups) > before and len(calls) > before_calls)

    await until(listens)
    for _ in range(2):
        before, before_calls = len(wake_ups), len(calls)
        cancelled.clear()
        drains.clear()
        await queue.worker("w1").claim(1)  # listed
        job = await queue.submit()
        await queue.worker("w1").claim(1)
        await queue.worker("w2").wake_all()
        await queue.client.cancel(job)
        await queue.redis.publish(queue.keys.control("w1"), b"not msgpack")
        await queue.redis.publish(queue.keys.control("w1"), encode(Drain()))
        await until(has_received)
        assert cancelled == [job]
        broken = await connections()
        await queue.redis.client_kill_filter(_type="pubsub")
        await until(listens_on_another)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
