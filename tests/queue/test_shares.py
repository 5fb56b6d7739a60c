"""Several workers that are woken for the same jobs: each claim takes its share of them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tests.queue.test_wake_ups import WakeUpReceiver, listed
from tests.support.queue import Queue, end_of
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.queue.job_stream import LOOK_AGAIN_S, JobStream

pytestmark = pytest.mark.redis


@pytest.fixture
async def listening(queue: Queue) -> AsyncIterator[WakeUpReceiver]:
    """The control channels of w1, w2 and w3 have a receiver, so that these workers can be woken."""
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open("w1", "w2", "w3")
        yield receiver


async def idle_workers(queue: Queue, count: int, credits: int = 64) -> list[JobStream]:
    workers = [queue.worker(f"w{number}") for number in range(1, count + 1)]
    for worker in workers:
        assert await worker.claim(credits) == []
    return workers


async def burst(queue: Queue, count: int, **fields: object) -> list[str]:
    jobs = [{"prompt": "x", "max_tokens": 5, **fields} for _ in range(count)]
    return [str(job) for job in await queue.client.submit_many(jobs)]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("num_jobs", [1, 2, 3, 7, 16, 31, 60])
async def test_a_burst_goes_to_idle_workers_in_equal_parts(
    queue: Queue, listening: WakeUpReceiver, num_workers: int, num_jobs: int
) -> None:
    workers = await idle_workers(queue, num_workers)
    jobs = await burst(queue, num_jobs)
    parts = [await worker.claim(64) for worker in workers]
    assert sorted(each.job_id for part in parts for each in part) == sorted(jobs)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1, sizes


async def test_a_worker_without_room_gets_no_share(queue: Queue, listening: WakeUpReceiver) -> None:
    (worker,) = await idle_workers(queue, 1)
    assert await queue.worker("w2").claim(0) == []
    await burst(queue, 16)
    assert len(await worker.claim(16)) == 16


async def test_a_worker_with_a_backlog_claims_all_that_fits(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    """Full workers do not share: each claims when a place becomes free."""
    workers = await idle_workers(queue, 2)
    await burst(queue, 60)
    assert [len(await worker.claim(8)) for worker in workers] == [8, 8]
    assert [len(await worker.claim(16)) for worker in workers] == [16, 16]


async def test_jobs_left_by_a_smaller_worker_are_claimed_at_the_next_poll(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    large, small = await idle_workers(queue, 2)
    await burst(queue, 16)
    assert len(await large.claim(64)) == 8
    assert len(await small.claim(3)) == 3
    await asyncio.wait_for(large.wake_up.wait(), 30)
    assert len(await large.claim(56)) == 5


async def test_a_worker_that_left_jobs_to_others_polls_again(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    first, _ = await idle_workers(queue, 2)
    await burst(queue, 16)
    began = time.monotonic()
    assert len(await first.claim(64)) == 8
    assert "w1" not in await listed(queue, queue.keys.idle_workers()), "it needs no wake-up"
    await asyncio.wait_for(first.wake_up.wait(), 30)
    assert time.monotonic() - began >= LOOK_AGAIN_S


async def test_a_frozen_worker_s_share_is_claimed_by_the_others_after_a_few_polls(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    """w2 was woken and never claims: w1 has all jobs after a few looks."""
    first, _ = await idle_workers(queue, 2)
    await burst(queue, 16)
    assert [len(await first.claim(64)) for _ in range(6)] == [8, 4, 2, 1, 1, 0]


async def test_a_worker_woken_long_ago_gets_no_share(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    first, _ = await idle_workers(queue, 2)
    await burst(queue, 16)
    await queue.redis.zadd(queue.keys.idle_workers(), {"w2": 2_000 - time.time() * 1000})
    assert len(await first.claim(64)) == 16


async def test_a_dead_worker_gets_no_share(queue: Queue, listening: WakeUpReceiver) -> None:
    first, dead = await idle_workers(queue, 2)
    await burst(queue, 16)
    await queue.redis.delete(queue.keys.worker(dead.worker_id))  # its lease is over
    assert len(await first.claim(64)) == 16


async def test_workers_full_of_bulk_share_interactive_jobs(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    workers = [queue.worker(name) for name in ("w1", "w2")]
    for worker in workers:
        assert await worker.claim(0, 32) == []
    await burst(queue, 40, priority="bulk")
    jobs = await burst(queue, 16, priority="interactive")
    parts = [await worker.claim(0, 32) for worker in workers]
    assert [len(part) for part in parts] == [8, 8]
    assert {each.job_id for part in parts for each in part} == set(jobs)


async def test_room_for_any_and_for_interactive_jobs_counts_as_one_share(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    workers = [queue.worker(name) for name in ("w1", "w2")]
    for worker in workers:
        assert await worker.claim(4, 12) == []
    await burst(queue, 16, priority="interactive")
    assert [len(await worker.claim(4, 12)) for worker in workers] == [8, 8]


async def test_each_share_has_jobs_of_every_tenant(queue: Queue, listening: WakeUpReceiver) -> None:
    workers = await idle_workers(queue, 2)
    await burst(queue, 8, tenant="a")
    await burst(queue, 8, tenant="b")
    for worker in workers:
        part = await worker.claim(64)
        tenants = Counter([await queue.field(each.job_id, "tenant") for each in part])
        assert tenants == {"a": 4, "b": 4}


async def test_ended_jobs_do_not_count_towards_a_share(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    first, second = await idle_workers(queue, 2)
    jobs = await burst(queue, 16)
    for job in jobs[:6]:
        await queue.client.cancel(job)
    outcomes = Counter(each.outcome for each in await first.claim(64))
    assert outcomes == {"cancelled": 6, "run": 5}
    assert len(await second.claim(64)) == 5


async def test_idle_workers_share_the_jobs_of_a_drained_worker(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    leaving = queue.worker("w3")
    jobs = await burst(queue, 16)
    assert len(await leaving.claim(16)) == 16
    workers = await idle_workers(queue, 2)
    await leaving.resign()
    parts = [await worker.claim(64) for worker in workers]
    assert [len(part) for part in parts] == [8, 8]
    assert {each.job_id for part in parts for each in part} == set(jobs)


async def test_idle_workers_share_orphaned_jobs(queue: Queue, listening: WakeUpReceiver) -> None:
    dead = queue.worker("w3")
    await burst(queue, 16)
    assert len(await dead.claim(16)) == 16
    workers = await idle_workers(queue, 2)
    await queue.redis.delete(queue.keys.worker("w3"))
    assert [len(await worker.claim(64)) for worker in workers] == [8, 8]


async def test_due_jobs_wake_idle_workers_which_share_them(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    workers = await idle_workers(queue, 3)
    jobs = await burst(queue, 15, not_before=time.time() + 60)
    for job in jobs:
        await queue.pass_delay(job)
    sizes = [len(await workers[0].claim(64))]
    assert {"w2", "w3"} <= set(await listening.received())
    sizes += [len(await worker.claim(64)) for worker in workers[1:]]
    assert sizes == [5, 5, 5]


async def test_idle_workers_share_a_redriven_backlog(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    breaker = queue.worker("w3", max_crashes=1)
    jobs = await burst(queue, 8)
    (*claimed,) = await breaker.claim(8)
    await breaker.release([(each.job_id, each.token, True) for each in claimed])
    dead = [each for each in await breaker.claim(8) if each.outcome == "dead"]
    await breaker.finish([end_of(each, status=JobStatus.DEAD) for each in dead])
    await breaker.resign()
    workers = await idle_workers(queue, 2)
    assert sorted(await queue.client.redrive()) == sorted(jobs)
    assert [len(await worker.claim(64)) for worker in workers] == [4, 4]


async def test_concurrent_claims_of_a_burst_never_share_a_job(
    queue: Queue, listening: WakeUpReceiver
) -> None:
    workers = await idle_workers(queue, 3)
    jobs = await burst(queue, 60)
    parts = await asyncio.gather(*(worker.claim(64) for worker in workers))
    assert [len(part) for part in parts] == [20, 20, 20]
    assert sorted(each.job_id for part in parts for each in part) == sorted(jobs)
