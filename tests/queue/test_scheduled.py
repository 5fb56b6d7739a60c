"""A scheduled job is backlog from its time on, with or without a live worker."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.queue import Queue, end_of
from tokenmill import QueueFull
from tokenmill_worker.telemetry.queue_metrics import QueueMetrics, queue_samples

pytestmark = pytest.mark.redis

WEEK_S = 7 * 86_400


async def backlog(queue: Queue) -> tuple[int, float, int]:
    """Waiting jobs, their tokens and scheduled jobs, as `depth`, `overview` and the metrics have
    them: the same.
    """
    depth, state = await queue.client.depth(), await queue.client.overview()
    tokens = sum(one.waiting_tokens for one in state.classes.values())
    assert (depth.num_queued, depth.queued_tokens, depth.scheduled) == (
        state.waiting,
        tokens,
        state.scheduled,
    )
    watch = QueueMetrics(queue.client)
    await watch.read()
    exported = {
        reading.name: sum(value or 0 for value in reading.values.values())
        for reading in queue_samples([watch])
    }
    names = ("queue_jobs", "queue_tokens", "queue_scheduled_jobs")
    assert tuple(exported[name] for name in names) == (state.waiting, tokens, state.scheduled)
    return state.waiting, tokens, state.scheduled


async def in_a_week(queue: Queue, **fields: Any) -> str:
    return await queue.submit(
        prompt="x", max_tokens=4_000, not_before=time.time() + WEEK_S, **fields
    )


async def test_a_scheduled_job_does_not_count_as_backlog(queue: Queue) -> None:
    job = await in_a_week(queue, priority="bulk")
    assert await backlog(queue) == (0, 0, 1)
    assert await queue.worker().claim(5) == []
    assert await backlog(queue) == (0, 0, 1)
    assert await queue.client.cancel(job) == "cancelled"
    assert await backlog(queue) == (0, 0, 0)


async def test_a_scheduled_job_does_not_fill_the_queue_before_it_is_due(queue: Queue) -> None:
    await queue.client.set_queue_limit(1)
    jobs = [await in_a_week(queue) for _ in range(3)]
    running = await queue.submit()
    (delivery,) = await queue.worker().claim(1)
    assert delivery.job_id == running
    await queue.pass_delay(jobs[0])
    with pytest.raises(QueueFull, match="holds 1 waiting standard jobs and its limit is 1"):
        await queue.submit()


async def test_due_bulk_jobs_count_only_towards_the_limit_of_bulk(queue: Queue) -> None:
    """No worker has moved them into their streams yet."""
    await queue.client.set_queue_limit(2)
    jobs = [await queue.submit(priority="bulk", not_before=time.time() + 60) for _ in range(2)]
    for job in jobs:
        await queue.pass_delay(job)
    with pytest.raises(QueueFull, match="holds 2 waiting bulk jobs and its limit is 2"):
        await queue.submit(priority="bulk")
    await queue.submit(priority="interactive")


async def test_a_due_job_counts_as_backlog_without_a_worker(queue: Queue) -> None:
    """The backlog counts a due job by class, cost and age.

    Workers are scaled up from zero by this figure.
    """
    job = await in_a_week(queue, priority="bulk")
    await queue.pass_delay(job)
    assert await backlog(queue) == (1, 4_000, 0)
    state = await queue.client.overview()
    assert (state.classes["bulk"].waiting, state.classes["bulk"].waiting_tokens) == (1, 4_000)
    assert state.classes["bulk"].oldest_ms > 0
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    assert await backlog(queue) == (0, 0, 0)
    assert (delivery.job_id, await worker.finish([end_of(delivery)])) == (job, [True])


async def test_a_sweep_moves_due_jobs_and_counts_them_once(queue: Queue) -> None:
    for _ in range(3):
        await queue.pass_delay(await in_a_week(queue))
    assert await queue.worker().claim(0) == []
    assert await backlog(queue) == (3, 12_000, 0)
    assert await queue.redis.zcard(queue.keys.delayed) == 0


async def test_a_job_waiting_for_its_retry_does_not_count_as_backlog(queue: Queue) -> None:
    await queue.submit(max_tokens=10)
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    assert await worker.retry(delivery.job_id, delivery.token, 60_000)
    assert await backlog(queue) == (0, 0, 1)
    await queue.pass_delay(delivery.job_id)
    assert (await backlog(queue))[::2] == (1, 0)
    assert [again.job_id for again in await worker.claim(1)] == [delivery.job_id]
    assert await backlog(queue) == (0, 0, 0)


async def test_a_released_job_restores_the_same_backlog(queue: Queue) -> None:
    await queue.submit(max_tokens=10)
    before = await backlog(queue)
    worker = queue.worker()
    (delivery,) = await worker.claim(2)  # which finds its stream empty afterwards
    assert await worker.release([(delivery.job_id, delivery.token, False)]) == [True]
    assert await backlog(queue) == before
    assert await worker.claim(0) == []
    assert await backlog(queue) == before


async def test_an_expired_scheduled_job_does_not_change_the_counters(queue: Queue) -> None:
    job = await in_a_week(queue, deadline=2 * WEEK_S)
    await queue.pass_deadline(job)
    assert [delivery.outcome for delivery in await queue.worker().claim(1)] == ["expired"]
    assert await backlog(queue) == (0, 0, 0)


@pytest.mark.parametrize("ends", ["cancelled", "claimed"])
async def test_a_scheduled_job_of_an_older_version_is_counted_once(queue: Queue, ends: str) -> None:
    """Older ones counted it from the start."""
    job = await in_a_week(queue)
    await queue.redis.hdel(queue.keys.job(job), "uncounted")
    await queue.redis.hincrby(queue.keys.meta, "queued:standard", 1)
    await queue.redis.hincrbyfloat(queue.keys.meta, "queued_tokens:standard", 4_000)
    await queue.submit(max_tokens=10, priority="standard")  # so that nothing is settled
    if ends == "cancelled":
        await queue.client.cancel(job)
    else:
        await queue.pass_delay(job)
        assert (await backlog(queue))[0] == 2
        assert len(await queue.worker().claim(1)) == 1
    assert (await backlog(queue))[0] == 1


async def test_a_job_that_an_older_worker_made_due_is_counted_once(queue: Queue) -> None:
    """It moves the job into its stream and counts nothing."""
    job = await in_a_week(queue)
    await queue.redis.zrem(queue.keys.delayed, job)
    entry = (await queue.redis.xadd(queue.keys.base + "jobs:standard", {"job": job})).decode()
    await queue.redis.hset(queue.keys.job(job), mapping={"state": "queued", "entry": entry})
    await queue.submit()
    assert len(await queue.worker().claim(1)) == 1
    assert (await backlog(queue))[0] == 1


async def test_wrong_counters_are_reset_while_no_job_waits(queue: Queue) -> None:
    await queue.redis.hset(
        queue.keys.meta, mapping={"queued:standard": -1, "queued_tokens:standard": "nan"}
    )
    await queue.submit(priority="bulk")
    await queue.worker().claim(0)
    assert await queue.redis.hmget(queue.keys.meta, "queued:standard", "queued:bulk") == [
        b"0",
        b"1",
    ]
    assert (await queue.client.depth()).queued_tokens > 0
