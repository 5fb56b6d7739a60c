"""The lease keeper on a simulated clock, and the check that it puts before every write."""

from typing import Any

import pytest

from tests.support.queue import Queue, appended, end_of, token
from tokenmill_schemas.control import WorkerStatus
from tokenmill_worker.errors import RedisUnavailable, Replaced
from tokenmill_worker.jobs import AppendReply
from tokenmill_worker.queue.leases import Lease, LeaseKeeper
from tokenmill_worker.queue.scripts import HeartbeatReply


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeBeats:
    def __init__(self, clock: Clock) -> None:
        self.lease = Lease(10.0, clock)
        self.replies: list[HeartbeatReply | Exception] = []
        self.num_beats = 0

    async def heartbeat(self, status: WorkerStatus) -> HeartbeatReply:
        self.num_beats += 1
        reply = self.replies.pop(0) if self.replies else HeartbeatReply()
        if isinstance(reply, Exception):
            raise reply
        return reply


class LeaseEvents:
    """Records the calls of the lease keeper."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.lost: list[str] = []
        self.num_expired = 0

    async def expired(self) -> None:
        self.num_expired += 1


STATUS = WorkerStatus(worker_id="w1")


def keeper_of(stream: Any) -> tuple[LeaseKeeper, LeaseEvents]:
    events = LeaseEvents()
    keeper = LeaseKeeper(
        stream,
        interval_s=3.3,
        on_cancelled=events.cancelled.extend,
        on_lost=events.lost.extend,
        on_expired=events.expired,
    )
    return keeper, events


async def test_a_heartbeat_reports_cancelled_and_lost_jobs() -> None:
    clock = Clock()
    stream = FakeBeats(clock)
    keeper, events = keeper_of(stream)
    stream.replies = [HeartbeatReply(("a",), ("b", "c"))]
    await keeper.beat(STATUS)
    assert (events.cancelled, events.lost) == (["a"], ["b", "c"])


async def test_a_heartbeat_under_a_name_taken_by_another_worker_ends_the_keeper() -> None:
    clock = Clock()
    stream = FakeBeats(clock)
    keeper, events = keeper_of(stream)
    stream.replies = [HeartbeatReply(lost=("a",), is_replaced=True)]
    with pytest.raises(Replaced, match="worker_id of its own"):
        await keeper.run(lambda: STATUS)
    assert events.lost == []


async def test_a_freeze_longer_than_the_lease_gives_up_all_jobs_before_the_next_heartbeat() -> None:
    clock = Clock()
    stream = FakeBeats(clock)
    keeper, events = keeper_of(stream)
    await keeper.tick()
    clock.now += 10.1
    assert stream.lease.is_expired()
    await keeper.beat(STATUS)
    assert stream.num_beats == 0
    await keeper.tick()
    assert events.num_expired == 1
    assert not stream.lease.is_expired()
    await keeper.beat(STATUS)
    assert stream.num_beats == 1


async def test_a_second_freeze_while_jobs_are_given_up_expires_the_lease_again() -> None:
    clock = Clock()
    stream = FakeBeats(clock)
    keeper, events = keeper_of(stream)
    await keeper.tick()
    clock.now += 10.1
    give_up = events.expired

    async def frozen_again() -> None:
        await give_up()
        clock.now += 10.1

    keeper._on_expired = frozen_again
    await keeper.tick()
    assert stream.lease.is_expired()
    keeper._on_expired = give_up
    await keeper.tick()
    assert not stream.lease.is_expired()
    assert events.num_expired == 2


async def test_a_freeze_shorter_than_the_lease_keeps_all_jobs() -> None:
    clock = Clock()
    stream = FakeBeats(clock)
    keeper, events = keeper_of(stream)
    clock.now += 9.9
    await keeper.tick()
    clock.now += 9.9
    await keeper.tick()
    assert events.num_expired == 0


async def test_an_unreachable_server_does_not_count_as_a_freeze() -> None:
    """The loop goes on and no other worker can claim: the jobs are kept; tokens decide later."""
    clock = Clock()
    stream = FakeBeats(clock)
    keeper, events = keeper_of(stream)
    for _ in range(60):
        stream.replies = [RedisUnavailable("gone")]
        clock.now += 1.0
        await keeper.tick()
        await keeper.beat(STATUS)
    assert keeper.problem == "gone"
    assert events.num_expired == 0
    await keeper.beat(STATUS)
    assert keeper.problem is None


@pytest.mark.redis
async def test_a_worker_that_resumes_from_a_freeze_sends_no_write(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x"}] * 2)
    worker, clock = queue.worker(), Clock()
    worker.lease = Lease(10.0, clock)
    keeper, events = keeper_of(worker)
    await keeper.tick()
    a, b = await worker.claim(2)
    assert await appended(worker, [token(a, 0)]) == [(AppendReply.OK, 1)]
    await queue.redis.config_resetstat()
    clock.now += 11
    assert await appended(worker, [token(a, 1)]) == [(AppendReply.LOST, 1)]
    assert await worker.finish([end_of(b)]) == [False]
    assert await worker.release([(b.job_id, b.token, False)]) == [False]
    with pytest.raises(RedisUnavailable):
        await worker.claim(1)
    stats = await queue.redis.info("commandstats")
    assert not [name for name in stats if "eval" in name]
    await keeper.tick()
    assert events.num_expired == 1
    await worker.resign()
    assert len(await worker.claim(2)) == 2  # itself or another: from where the log ends
