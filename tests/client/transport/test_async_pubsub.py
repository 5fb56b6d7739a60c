"""One subscription's mailbox: order, silence, a receiver that goes away, one too slow; a
connection that fails.
"""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError

from tokenmill.transport.async_pubsub import MAX_WAITING, MultiplexedSubscription, PubSubMultiplexer
from tokenmill.transport.sync_pubsub import Signal


def subscription() -> MultiplexedSubscription:
    return MultiplexedSubscription(PubSubMultiplexer(None), b"channel")  # type: ignore[arg-type]  # no connection is asked for


async def test_messages_come_in_order_with_and_without_a_waiting_reader() -> None:
    mailbox = subscription()
    first = asyncio.create_task(mailbox.receive(5))
    await asyncio.sleep(0)
    for number in range(4):  # the first goes to the waiting task, the others come before it has run
        mailbox.deliver(b"%d" % number)
    assert await first == b"0"
    assert [await mailbox.receive(5) for _ in range(3)] == [b"1", b"2", b"3"]


async def test_a_receive_that_times_out_returns_none_and_loses_no_message() -> None:
    mailbox = subscription()
    assert await mailbox.receive(0.02) is None
    waiting = asyncio.create_task(mailbox.receive(0.02))
    await asyncio.sleep(0.01)
    mailbox.deliver(b"late, but not too late")
    assert await waiting == b"late, but not too late"
    assert await mailbox.receive(0.02) is None


@pytest.mark.parametrize("more", [[], [b"b", b"c"]])
async def test_a_message_for_a_cancelled_receiver_goes_to_the_next_receive(
    more: list[bytes],
) -> None:
    mailbox = subscription()
    receiver = asyncio.create_task(mailbox.receive(5))
    await asyncio.sleep(0)
    mailbox.deliver(b"a")
    for message in more:
        mailbox.deliver(message)
    receiver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiver
    assert [await mailbox.receive(5) for _ in range(1 + len(more))] == [b"a", *more]


async def test_a_message_after_a_cancelled_receive_goes_to_the_next_receive() -> None:
    mailbox = subscription()
    receiver = asyncio.create_task(mailbox.receive(5))
    await asyncio.sleep(0)
    receiver.cancel()
    mailbox.deliver(b"a")
    with pytest.raises(asyncio.CancelledError):
        await receiver
    assert await mailbox.receive(5) == b"a"


async def test_a_slow_reader_is_notified_of_missed_messages() -> None:
    mailbox = subscription()
    for number in range(MAX_WAITING + 2):
        mailbox.deliver(b"%d" % number)
    assert await mailbox.receive(5) is Signal.MISSED
    assert await mailbox.receive(5) == b"%d" % (MAX_WAITING + 1)


@pytest.mark.redis
async def test_a_channel_refused_by_a_failed_connection_is_subscribed_on_the_next(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = redis.asyncio.Redis.from_url(redis_url)
    hub = PubSubMultiplexer(client)
    send = AbstractConnection.send_command
    refused: list[object] = []

    async def refuse_once(self: AbstractConnection, *command: object, **options: object) -> None:
        if b"second" in command and not refused:
            refused.append(command)
            raise ConnectionError("cut")
        await send(self, *command, **options)

    monkeypatch.setattr(AbstractConnection, "send_command", refuse_once)
    try:
        first = await hub.subscribe("first")
        assert await first.receive(5) is Signal.MISSED  # what came before it was subscribed
        second = await hub.subscribe("second")
        assert refused
        assert await first.receive(5) is Signal.MISSED
        assert await second.receive(5) is Signal.MISSED
        await client.publish("second", b"there")
        assert await second.receive(5) == b"there"
    finally:
        await hub.close()
        await client.aclose()
