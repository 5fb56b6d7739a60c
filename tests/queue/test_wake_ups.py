"""A submit wakes one or two listed workers instead of all, and no worker is forgotten."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from tests.support.queue import Queue
from tokenmill_schemas.codec import decode_control, encode
from tokenmill_schemas.control import WakeUp

pytestmark = pytest.mark.redis


class WakeUpReceiver:
    """Records messages on the wake-up channels of the workers w1 … and on the one for all."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._stack = AsyncExitStack()
        self._pubsub = queue.redis.pubsub()

    async def __aenter__(self) -> "WakeUpReceiver":
        await self._stack.enter_async_context(self._pubsub)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def open(self, *names: str) -> None:
        channels = [self._queue.keys.wake_up, *map(self._queue.keys.control, names)]
        await self._pubsub.subscribe(*channels)
        for _ in channels:
            await self._pubsub.get_message(timeout=5)

    async def received(self) -> list[str]:
        """Return the names of workers woken since the last call; `wake_up`: all."""
        found = []
        await self._queue.redis.ping()
        while (message := await self._pubsub.get_message(timeout=0.05)) is not None:
            name = message["channel"].decode().rpartition(":")[2]
            assert name == "wake_up" or decode_control(message["data"]) == WakeUp()
            found.append(name)
        return sorted(found)


async def listed(queue: Queue, key: str) -> dict[str, float]:
    """Return the idle workers of a list, with their free places."""
    return {
        name.decode(): score
        for name, score in await queue.redis.zrange(key, 0, -1, withscores=True)
        if score > 0
    }


async def test_a_submit_wakes_the_workers_with_most_room_one_more_than_jobs(queue: Queue) -> None:
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open("w1", "w2", "w3", "w4")
        for number, room in enumerate((2, 8, 4, 6), 1):
            assert await queue.worker(f"w{number}").claim(room) == []
        await queue.submit()
        assert await receiver.received() == ["w2", "w4"]
        assert await listed(queue, queue.keys.idle_workers()) == {"w1": 2, "w3": 4}
        await queue.submit()
        assert await receiver.received() == ["w1", "w3"]
        await queue.submit()
        assert await receiver.received() == [], "those that were called know that something waits"
        assert [len(await queue.worker(name).claim(8)) for name in ("w2", "w4", "w1")] == [1, 1, 1]
        assert await queue.worker("w3").claim(8) == []
        assert await listed(queue, queue.keys.idle_workers()) == {"w3": 8}


async def test_a_claim_that_leaves_no_room_removes_the_worker_from_the_idle_list(
    queue: Queue,
) -> None:
    worker = queue.worker()
    assert await worker.claim(3) == []
    await queue.submit()
    assert await worker.claim(3) != []
    assert await listed(queue, queue.keys.idle_workers()) == {"w1": 2}
    for _ in range(2):
        await queue.submit()
    assert len(await worker.claim(2)) == 2
    assert await listed(queue, queue.keys.idle_workers()) == {}
    assert await worker.claim(2) == []
    assert await worker.claim(0) == []
    assert await listed(queue, queue.keys.idle_workers()) == {}


async def test_a_worker_with_room_for_interactive_jobs_is_woken_for_them_only(queue: Queue) -> None:
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open("w1")
        assert await queue.worker().claim(0, 4) == []
        assert await listed(queue, queue.keys.idle_workers(urgent_only=True)) == {"w1": 4}
        for priority in ("bulk", "standard"):
            await queue.submit(priority=priority)
        assert await receiver.received() == []
        await queue.submit(priority="interactive")
        assert await receiver.received() == ["w1"]
        [job] = await queue.worker().claim(0, 4)
        assert await listed(queue, queue.keys.idle_workers(urgent_only=True)) == {"w1": 3}
        assert (await queue.field(job.job_id, "class")) == "interactive"
        await queue.worker("w2").claim(5, 4)
        assert "w2" not in await listed(queue, queue.keys.idle_workers(urgent_only=True))


async def test_a_worker_without_a_subscription_is_skipped(queue: Queue) -> None:
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open("w1")
        await queue.worker("gone").claim(50)
        await queue.worker("w1").claim(5)
        await queue.submit()
        assert await receiver.received() == ["w1"]
        assert await listed(queue, queue.keys.idle_workers()) == {}


async def test_a_worker_that_resigns_or_dies_is_not_listed(queue: Queue) -> None:
    one, other = queue.worker("w1"), queue.worker("w2")
    await one.claim(5)
    await other.claim(0, 5)
    await one.resign()
    assert await listed(queue, queue.keys.idle_workers()) == {}
    await queue.redis.delete(queue.keys.worker("w2"))
    await queue.worker("w3").claim(0)  # sweeps
    assert await listed(queue, queue.keys.idle_workers(urgent_only=True)) == {}


async def test_a_scheduled_job_and_a_repeated_key_wake_no_worker(queue: Queue) -> None:
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open("w1")
        await queue.worker().claim(5)
        await queue.submit(not_before=time.time() + 60)
        assert await receiver.received() == []
        await queue.submit(idempotency_key="a")
        assert await receiver.received() == ["w1"]
        await queue.worker().claim(5)
        await queue.submit(idempotency_key="a")
        assert await receiver.received() == []


async def test_a_worker_whose_reply_was_full_is_woken_for_the_rest(queue: Queue) -> None:
    worker = queue.worker(max_claim_bytes=1)
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open("w1")
        for _ in range(2):
            await queue.submit()
        assert len(await worker.claim(5)) == 1
        assert await receiver.received() == ["w1"]
        assert len(await worker.claim(5)) == 1
        assert await receiver.received() == []


async def test_all_workers_are_woken_if_the_chosen_one_has_no_room(queue: Queue) -> None:
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open()
        await queue.worker().wake_all()
        assert await receiver.received() == ["wake_up"]


async def test_all_workers_are_woken_for_a_returned_job(queue: Queue) -> None:
    job, worker, other = await queue.submit(), queue.worker("w1"), queue.worker("w2")
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open()
        await worker.claim(1)
        await worker.resign()
        assert await receiver.received() == ["wake_up"]
        await worker.resign()
        assert await receiver.received() == [], "it owned no job"
        await worker.claim(1)
        await queue.redis.delete(queue.keys.worker("w1"))
        await other.claim(0)  # sweeps
        assert await receiver.received() == ["wake_up"]
        await queue.client.cancel(job)
        assert await receiver.received() == ["wake_up"], "a worker is to end it"


async def test_a_thousand_jobs_at_once_wake_each_worker_once(queue: Queue) -> None:
    names = [f"w{number}" for number in range(20)]
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open(*names)
        await asyncio.gather(*(queue.worker(name).claim(1) for name in names))
        await queue.client.submit_many([{"prompt": "x", "max_tokens": 1} for _ in range(1000)])
        assert await receiver.received() == sorted(names)


def test_the_wake_up_message_equals_the_one_that_the_script_writes() -> None:
    assert encode(WakeUp()) == b"\x81\xa4type\xa4call"
