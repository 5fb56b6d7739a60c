"""The consumer with a simulated queue."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Literal

import pytest

from tests.support.queue import Queue
from tests.support.waiting import until
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.queue.consumer import MAX_AT_ONCE, Consumer, Credits

FOR_EVER = 600.0  # until the next poll


def delivery(name: str) -> Delivery:
    return Delivery(name, 1, b"", 1, 0, "run", (), 0, 0, 1)


class WakeUp(asyncio.Event):
    """Knows whether somebody waits for it."""

    is_awaited = False

    async def wait(self) -> Literal[True]:
        self.is_awaited = True
        try:
            return await super().wait()
        finally:
            self.is_awaited = False


class FakeQueue:
    def __init__(self, *names: str) -> None:
        self.watched = WakeUp()
        self.wake_up: asyncio.Event = self.watched
        self.waiting = [delivery(name) for name in names]
        self.troubles: list[Exception] = []
        self.asked: list[int] = []
        self.released: list[tuple[str, int, bool]] = []
        self.wake_ups = 0
        self.on_claim: Callable[[], Awaitable[None]] | None = None  # after the queue was looked at

    async def claim(self, credits: int, urgent: int = 0) -> list[Delivery]:
        self.asked.append(credits)
        if self.troubles:
            raise self.troubles.pop(0)
        credits = max(credits, urgent)  # here all are interactive
        taken, self.waiting = self.waiting[:credits], self.waiting[credits:]
        if self.on_claim is not None:
            await self.on_claim()
        return taken

    async def wake_all(self) -> None:
        self.wake_ups += 1

    async def release(self, jobs: Iterable[tuple[str, int, bool]], *, alone: bool) -> list[bool]:
        self.released += jobs
        return [True]


class JobSink:
    """Takes jobs while it has places."""

    def __init__(self, places: int) -> None:
        self.places = places
        self.urgent = 0
        self.taken: list[str] = []
        self.trouble: Exception | None = None

    def credits(self) -> Credits:
        return Credits(self.places - len(self.taken), self.urgent)

    async def take(self, deliveries: list[Delivery]) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.taken += [item.job_id for item in deliveries]


@asynccontextmanager
async def consuming(
    queue: FakeQueue, sink: JobSink, poll_s: float = 5.0
) -> AsyncIterator[Consumer]:
    consumer = Consumer(queue, sink.credits, sink.take, poll_s=poll_s)
    task = asyncio.create_task(consumer.run())
    yield consumer
    await consumer.stop()
    await asyncio.wait_for(task, 30)


async def is_idle(queue: FakeQueue) -> None:
    """Wait until the consumer waits for a wake-up that nobody has sent: what it has not done by
    then, it does not do.
    """
    await until(lambda: queue.watched.is_awaited and not queue.watched.is_set())


async def test_the_consumer_claims_no_more_jobs_than_can_start() -> None:
    queue, sink = FakeQueue("a", "b", "c", "d"), JobSink(3)
    async with consuming(queue, sink):
        await until(lambda: len(sink.taken) == 3)
        await is_idle(queue)
        assert sink.taken == ["a", "b", "c"]
        assert max(queue.asked) == 3


async def test_a_wake_up_claims_urgent_jobs_while_bulk_fills_the_worker() -> None:
    queue, sink = FakeQueue(), JobSink(0)
    sink.urgent = 1
    async with consuming(queue, sink):
        await is_idle(queue)
        queue.waiting.append(delivery("urgent"))
        queue.wake_up.set()
        await until(lambda: sink.taken == ["urgent"])


async def test_a_wake_up_without_credit_leads_to_a_claim_once_there_is_room() -> None:
    queue, sink = FakeQueue(), JobSink(0)
    async with consuming(queue, sink, poll_s=FOR_EVER) as consumer:
        await is_idle(queue)
        queue.waiting.append(delivery("a"))
        queue.wake_up.set()
        await is_idle(queue)
        sink.places = 1
        consumer.notice_room()
        await until(lambda: sink.taken == ["a"])


@pytest.mark.parametrize("first", [["a", "b"], ["a"]], ids=["full", "short"])
async def test_a_wake_up_during_a_claim_leads_to_a_claim_once_there_is_room(
    first: list[str],
) -> None:
    """The next claim has no room for anything. The job of the wake-up is claimed as soon as there
    is some, not at the next poll.
    """
    queue, sink = FakeQueue(*first), JobSink(2)

    async def ring_for_another() -> None:
        queue.on_claim = None
        queue.waiting.append(delivery("late"))
        queue.wake_up.set()
        sink.places = len(first)

    queue.on_claim = ring_for_another
    async with consuming(queue, sink, poll_s=FOR_EVER) as consumer:
        await until(lambda: sink.taken == first)
        await is_idle(queue)
        sink.places += 1
        consumer.notice_room()
        await until(lambda: sink.taken == [*first, "late"])


async def test_jobs_left_by_a_full_claim_are_claimed_once_there_is_room() -> None:
    queue, sink = FakeQueue("a", "b"), JobSink(1)
    async with consuming(queue, sink, poll_s=FOR_EVER) as consumer:
        await until(lambda: sink.taken == ["a"])
        await is_idle(queue)
        assert queue.asked == [1]  # a full claim is not followed by one without room
        sink.places = 2
        consumer.notice_room()
        await until(lambda: sink.taken == ["a", "b"])


async def test_room_alone_starts_no_claim_while_no_job_waits() -> None:
    queue, sink = FakeQueue(), JobSink(1)
    async with consuming(queue, sink, poll_s=FOR_EVER) as consumer:
        await is_idle(queue)
        consumer.notice_room()
        await is_idle(queue)
        assert queue.asked == [1]


async def test_many_jobs_are_claimed_in_small_parts() -> None:
    """A wave of bulk jobs is claimed in parts.

    Urgent jobs come first in every claim, so also between parts.
    """
    names = [str(number) for number in range(3 * MAX_AT_ONCE)]
    queue, sink = FakeQueue(*names), JobSink(100)
    async with consuming(queue, sink, poll_s=FOR_EVER):
        await until(lambda: sink.taken == names)
    assert max(queue.asked) == MAX_AT_ONCE


async def test_a_wake_up_starts_a_claim_when_it_has_room() -> None:
    queue, sink = FakeQueue(), JobSink(2)
    async with consuming(queue, sink):
        await is_idle(queue)
        queue.waiting.append(delivery("new"))
        queue.wake_up.set()
        await until(lambda: sink.taken == ["new"])


async def test_a_wake_up_without_room_starts_no_claim() -> None:
    queue, sink = FakeQueue(), JobSink(0)
    async with consuming(queue, sink):
        await is_idle(queue)
        for _ in range(3):
            queue.wake_up.set()
            await is_idle(queue)
        assert len(queue.asked) == 1
        sink.places = 1
        queue.waiting.append(delivery("x"))
        queue.wake_up.set()
        await until(lambda: sink.taken == ["x"])


async def test_the_consumer_polls_without_room() -> None:
    """Jobs that only have to be recorded need no room, and orphaned jobs send no wake-up."""
    queue, sink = FakeQueue(), JobSink(0)
    async with consuming(queue, sink, poll_s=0.02):
        await until(lambda: len(queue.asked) >= 4)


async def test_a_claim_is_repeated_after_an_outage() -> None:
    queue, sink = FakeQueue("a"), JobSink(1)
    queue.troubles = [RedisUnavailable("away"), RedisUnavailable("away"), RedisUnavailable("away")]
    async with consuming(queue, sink):
        await until(lambda: bool(sink.taken))
        assert len(queue.asked) >= 4


async def test_jobs_whose_processing_raises_are_returned_as_suspects() -> None:
    queue, sink = FakeQueue("a", "b"), JobSink(2)
    sink.trouble = RuntimeError("a bug")
    async with consuming(queue, sink):
        await until(lambda: len(queue.released) >= 2)
    assert queue.released[:2] == [("a", 1, True), ("b", 1, True)]


async def test_jobs_are_returned_unsuspected_if_redis_fails_while_they_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    queue, sink = FakeQueue("a", "b"), JobSink(2)
    sink.trouble = RedisUnavailable("Redis: refused")
    async with consuming(queue, sink):
        await until(lambda: len(queue.released) >= 2)
    assert queue.released[:2] == [("a", 1, False), ("b", 1, False)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]


async def test_a_wake_up_without_room_is_passed_on_and_remembered() -> None:
    queue, sink = FakeQueue(), JobSink(1)
    async with consuming(queue, sink, poll_s=FOR_EVER) as consumer:
        await is_idle(queue)
        sink.places = 0
        await consumer.answer_wake_up()
        assert queue.wake_ups == 1
        sink.places = 1
        queue.waiting.append(delivery("a"))
        consumer.notice_room()
        await until(lambda: sink.taken == ["a"])
        sink.places = 2
        await consumer.answer_wake_up()
        assert queue.wake_ups == 1


async def test_a_claim_without_credits_leaves_the_backlog_unknown() -> None:
    """The queue does not list a worker without room, so no wake-up comes: it claims when it has
    room.
    """
    queue, sink = FakeQueue(), JobSink(1)
    async with consuming(queue, sink, poll_s=FOR_EVER) as consumer:
        await until(lambda: queue.asked == [1])
        sink.places = 0
        await consumer._claim_once()
        queue.waiting.append(delivery("a"))
        sink.places = 1
        consumer.notice_room()
        await until(lambda: sink.taken == ["a"])


async def test_a_stopped_consumer_claims_nothing() -> None:
    queue, sink = FakeQueue(), JobSink(5)
    async with consuming(queue, sink, poll_s=0.01) as consumer:
        await is_idle(queue)
        await consumer.stop()
        asked = len(queue.asked)
        queue.wake_up.set()
    assert len(queue.asked) == asked, "and the consumer's task has ended"


@pytest.mark.redis
async def test_an_idle_worker_records_every_job_that_ended_in_the_queue(queue: Queue) -> None:
    """More than fit one claim, without waiting for polls in between."""
    jobs = await queue.client.submit_many([{"prompt": "x"}] * 200)
    for job in jobs:
        await queue.client.cancel(job)
    taken: list[str] = []

    async def take(deliveries: list[Delivery]) -> None:
        taken.extend(each.job_id for each in deliveries)

    consumer = Consumer(queue.worker(), lambda: Credits(4, 0), take, poll_s=FOR_EVER)
    running = asyncio.create_task(consumer.run())
    await until(lambda: len(taken) == 200)
    await consumer.stop()
    await running
    assert sorted(taken) == sorted(jobs)
