"""Leases, and every way in which a worker loses a job: death, drain, crash, retry, cancel,
deadline.
"""

import asyncio
import time

import pytest

from tests.support.queue import Queue, end_of, token
from tokenmill_schemas.codec import decode_chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.redis


def status(worker_id: str = "w1") -> WorkerStatus:
    return WorkerStatus(worker_id=worker_id)


async def die(queue: Queue, worker_id: str) -> None:
    """Let the worker's lease run out."""
    await queue.redis.delete(queue.keys.worker(worker_id))


async def test_a_dead_worker_s_jobs_are_claimed_first_as_suspects(queue: Queue) -> None:
    lost = [await queue.submit() for _ in range(3)]
    dying = queue.worker("w1")
    await dying.claim(3)
    await queue.submit(priority="interactive")
    await die(queue, "w1")
    got = await queue.worker("w2").claim(3)
    assert sorted(d.job_id for d in got) == sorted(lost)
    assert {(d.deliveries, d.crashes, d.alone) for d in got} == {(2, 1, False)}
    assert b"w1" not in await queue.redis.smembers(queue.keys.workers)


async def test_a_job_with_progress_is_no_suspect_without_a_reported_crash(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x"}] * 2)
    dying = queue.worker("w1")
    a, b = await dying.claim(2)
    await dying.append([token(a, 0)])
    for dead, heir, expected in (("w1", "w2", (0, 1)), ("w2", "w3", (1, 2))):  # w2 logs nothing
        await die(queue, dead)
        crashes = {d.job_id: d.crashes for d in await queue.worker(heir).claim(2)}
        assert (crashes[a.job_id], crashes[b.job_id]) == expected


async def test_a_worker_with_heartbeats_keeps_its_jobs_for_any_time(queue: Queue) -> None:
    await queue.submit()
    holder, other = queue.worker("w1", lease_s=60), queue.worker("w2", lease_s=60)
    await holder.claim(1)
    for _ in range(5):
        await queue.redis.pexpire(queue.keys.worker("w1"), 20_000)  # as if the time had gone by
        assert (await holder.heartbeat(status())).lost == ()
        assert await queue.redis.pttl(queue.keys.worker("w1")) > 20_000
        assert await other.claim(1) == []


async def test_orphans_are_freed_after_the_server_s_clock_was_set_back(queue: Queue) -> None:
    job = await queue.submit()
    await queue.worker("w1").claim(1)
    await die(queue, "w1")
    ahead = int(time.time() * 1000) + 3_600_000
    times = {"swept_ms": ahead, "sweep_from_ms": ahead}
    await queue.redis.hset(queue.keys.meta, mapping=times)
    assert [d.job_id for d in await queue.worker("w2").claim(1)] == [job]


async def test_a_busy_worker_frees_orphans_for_others(queue: Queue) -> None:
    """A worker that sends heartbeats sweeps; no claim is needed for it."""
    job = await queue.submit()
    await queue.worker("w1").claim(1)
    await die(queue, "w1")
    await queue.worker("busy").heartbeat(status("busy"))
    assert (await queue.client.status(job)).status is JobStatus.QUEUED
    assert [d.job_id for d in await queue.worker("w3").claim(1)] == [job]


async def test_a_drained_job_is_claimable_at_once_without_suspicion(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x"}] * 20)
    first = queue.worker("w1")
    (job,) = await first.claim(1)
    await first.append([token(job, 0)])
    assert await first.release([(job.job_id, job.token, False)]) == [True]
    # the reply had been lost
    assert await first.release([(job.job_id, job.token, False)]) == [True]
    (again, *_) = await queue.worker("w2").claim(1)  # ahead of nineteen others
    assert (again.job_id, again.crashes, len(again.log)) == (job.job_id, 0, 1)
    await first.resign()


async def test_resigning_releases_all_jobs_without_suspicion(queue: Queue) -> None:
    jobs = [await queue.submit() for _ in range(3)]
    worker = queue.worker("w1")
    await worker.claim(3)
    assert await worker.resign() == 3
    assert await worker.resign() == 0
    got = await queue.worker("w2").claim(3)
    assert [d.job_id for d in got] == jobs
    assert {d.crashes for d in got} == {0}
    assert not await queue.redis.exists(queue.keys.worker("w1"), queue.keys.owned("w1"))


async def test_a_deleted_job_does_not_keep_others_from_returning(queue: Queue) -> None:
    gone, other = await queue.client.submit_many([{"prompt": "x"}] * 2)
    worker = queue.worker("w1")
    await worker.claim(2)
    await queue.redis.delete(queue.keys.job(gone))
    assert await worker.resign() == 2
    assert not await queue.redis.exists(queue.keys.job(gone))
    assert [d.job_id for d in await queue.worker("w2").claim(2)] == [other]


async def test_a_claim_takes_all_returned_jobs_for_which_there_is_room(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x"}] * 70)
    first, second = queue.worker("w1"), queue.worker("w2")
    await first.claim(70)
    await first.resign()
    assert len(await second.claim(70)) == 70


async def test_the_first_of_two_workers_with_one_name_is_replaced_by_the_second(
    queue: Queue,
) -> None:
    first, second = (WorkerStatus(worker_id="w1", started_ms=started) for started in (1_000, 2_000))
    old, new = queue.worker("w1"), queue.worker("w1")
    assert not (await old.heartbeat(first)).is_replaced
    await new.open()
    assert not (await old.heartbeat(first)).is_replaced, "the other has not beaten yet"
    assert not (await new.heartbeat(second)).is_replaced
    assert (await old.heartbeat(first)).is_replaced
    assert not (await new.heartbeat(second)).is_replaced


@pytest.mark.parametrize("value", [b"", b"no status", b"\xc1"])
async def test_an_invalid_worker_key_does_not_count_as_a_worker_of_the_same_name(
    queue: Queue, value: bytes
) -> None:
    await queue.redis.set(queue.keys.worker("w1"), value)
    assert not (await queue.worker("w1").heartbeat(status())).is_replaced
    await queue.redis.delete(queue.keys.worker("w1"))
    await queue.redis.rpush(queue.keys.worker("w1"), "not a string")
    assert not (await queue.worker("w1").heartbeat(status())).is_replaced


async def test_a_restarted_worker_returns_the_jobs_that_its_name_owned(queue: Queue) -> None:
    job = await queue.submit()
    await queue.worker("pod-0").claim(1)
    reborn = queue.worker("pod-0")
    await reborn.open()
    (again,) = await reborn.claim(1)
    assert (again.job_id, again.crashes, again.alone) == (job, 1, True)


async def test_a_job_that_crashes_alone_repeatedly_is_dead_and_can_be_redriven(
    queue: Queue,
) -> None:
    job = await queue.submit(deadline=3600)
    worker = queue.worker(max_solo_crashes=2)
    for _ in range(2):
        (delivery,) = await worker.claim(1)
        assert delivery.outcome == "run"
        await worker.release([(job, delivery.token, True)], alone=True)
    (delivery,) = await worker.claim(0)  # what is only to be recorded costs no credit
    assert delivery.outcome == "dead"
    assert await worker.finish([end_of(delivery, 0, JobStatus.DEAD)]) == [True]
    assert (await queue.client.status(job)).status is JobStatus.DEAD
    (dead,) = await queue.client.dead()
    assert dead.job_id == job
    assert [line.split(" ", 1)[1] for line in dead.history] == ["crash alone on w1"] * 2
    assert await queue.client.redrive(["unknown"]) == []
    assert await queue.client.redrive([job]) == [job]
    assert await queue.client.redrive([job]) == []
    assert await queue.client.dead() == []
    (again,) = await worker.claim(1)
    assert (again.outcome, again.crashes, again.attempt) == ("run", 0, 1)
    assert again.token > delivery.token
    await worker.finish([end_of(again)])


async def test_a_retry_waits_and_continues_with_a_higher_attempt(queue: Queue) -> None:
    job = await queue.submit()
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    await worker.append([token(delivery, 0)])
    assert await worker.retry(job, delivery.token, 60_000, "engine busy")
    assert await worker.retry(job, delivery.token, 60_000, "engine busy")  # the reply had been lost
    assert (await queue.client.status(job)).status is JobStatus.SCHEDULED
    assert await worker.claim(1) == []
    await queue.submit()
    await queue.pass_delay(job)
    (again,) = await worker.claim(1)
    assert again.job_id == job, "it has waited in the queue before, and goes ahead of its stream"
    assert (again.attempt, again.crashes, len(again.log)) == (2, 0, 1)


async def test_the_history_keeps_one_line_for_each_of_the_last_returns(queue: Queue) -> None:
    job = await queue.submit()
    worker = queue.worker("w1")
    for number in range(24):
        (delivery,) = await worker.claim(1)
        assert await worker.retry(job, delivery.token, 60_000, f"busy\n{number}")
        await queue.pass_delay(job)
    history = await queue.redis.hget(queue.keys.job(job), "history")
    lines = [line.split(" ", 1)[1] for line in history.decode().splitlines()]
    assert lines == [f"retry on w1: busy {number}" for number in range(4, 24)]


async def test_a_job_cancelled_while_waiting_ends_at_once(queue: Queue) -> None:
    job, other = await queue.submit(tenant="t"), await queue.submit()
    async with queue.redis.pubsub() as pubsub:
        await pubsub.subscribe(queue.keys.chunks(job))
        await pubsub.get_message(timeout=30)
        assert await queue.client.cancel(job) == "cancelled"
        received = decode_chunk((await pubsub.get_message(timeout=30))["data"])
    assert (received.status, received.index, received.job_id) == (JobStatus.CANCELLED, 0, job)
    assert (await queue.client.result(job, timeout=30)).status is JobStatus.CANCELLED
    assert await queue.client.cancel(job) == "cancelled"
    worker = queue.worker()
    ended, running = await worker.claim(1)
    assert (ended.job_id, ended.outcome, running.job_id) == (job, "cancelled", other)
    assert await worker.finish([end_of(ended, 0, JobStatus.CANCELLED), end_of(running)]) == [
        True,
        True,
    ]
    assert (await queue.client.depth()).num_queued == 0


async def test_an_ended_job_claimed_by_a_dead_worker_is_claimed_by_the_next(queue: Queue) -> None:
    job = await queue.submit()
    await queue.client.cancel(job)
    (first,) = await queue.worker("w1").claim(0)
    await die(queue, "w1")
    heir = queue.worker("w2")
    (second,) = await heir.claim(0)
    assert (second.job_id, second.outcome) == (job, "cancelled")
    assert second.token > first.token
    await heir.finish([end_of(second, 0, JobStatus.CANCELLED)])


async def test_a_returned_job_cancelled_while_waiting_is_ended_by_its_next_worker(
    queue: Queue,
) -> None:
    """SQL may have its end already, by a worker that died before it acknowledged; none other is
    sent.
    """
    worker, job = queue.worker(), await queue.submit()
    (delivery,) = await worker.claim(1)
    await worker.append([token(delivery, 0), token(delivery, 1)])
    await worker.release([(job, delivery.token, False)])
    assert await queue.client.cancel(job) == "cancelling"
    info = await queue.client.status(job)
    assert (info.status, info.cancelling) == (JobStatus.QUEUED, True)
    (ended,) = await worker.claim(0)
    assert (ended.outcome, len(ended.log)) == ("cancelled", 2)
    await worker.finish([end_of(ended, 2, JobStatus.SUCCEEDED)])  # as SQL had it
    assert (await queue.client.status(job)).status is JobStatus.SUCCEEDED
    assert (await queue.client.depth()).num_queued == 0


async def test_a_returned_job_expired_while_waiting_is_reported_to_its_next_worker(
    queue: Queue,
) -> None:
    worker, job = queue.worker(), await queue.submit(deadline=60)
    (delivery,) = await worker.claim(1)
    await worker.append([token(delivery, 0)])
    await worker.release([(job, delivery.token, False)])
    await queue.pass_deadline(job)
    await worker.heartbeat(status())
    assert (await queue.client.status(job)).status is JobStatus.QUEUED
    (ended,) = await worker.claim(0)
    assert ended.outcome == "expired"
    await worker.finish([end_of(ended, 1, JobStatus.SUCCEEDED)])
    assert (await queue.client.status(job)).status is JobStatus.SUCCEEDED


async def test_a_job_cancelled_before_its_worker_died_is_ended_by_the_next(queue: Queue) -> None:
    job = await queue.submit()
    await queue.worker("w1").claim(1)
    assert await queue.client.cancel(job) == "cancelling"
    await die(queue, "w1")
    heir = queue.worker("w2")
    (delivery,) = await heir.claim(0)
    assert delivery.outcome == "cancelled"
    await heir.finish([end_of(delivery, 0, JobStatus.CANCELLED)])


async def test_a_job_whose_deadline_passes_in_the_queue_expires(queue: Queue) -> None:
    deep = [await queue.submit(priority="interactive") for _ in range(3)]
    late = await queue.submit(deadline=60, priority="bulk")
    worker = queue.worker()
    await queue.pass_deadline(late)
    await worker.heartbeat(status())  # any sign of life of any worker ends it
    info = await queue.client.status(late)
    assert info.status is JobStatus.EXPIRED
    assert info.error is not None
    (first, *_) = await worker.claim(1)
    assert (first.job_id, first.outcome) == (late, "expired")
    await worker.finish([end_of(first, 0, JobStatus.EXPIRED)])
    assert late not in deep


async def test_a_job_whose_deadline_passes_between_two_workers_expires(queue: Queue) -> None:
    job = await queue.submit(deadline=60)
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    await worker.append([token(delivery, 0)])
    await queue.pass_deadline(job)
    await worker.heartbeat(status())  # a running job's deadline is the engine's business
    assert (await queue.client.status(job)).status is JobStatus.RUNNING
    await worker.release([(job, delivery.token, False)])
    (again,) = await worker.claim(0)
    assert (again.outcome, len(again.log)) == ("expired", 1)
    await worker.finish([end_of(again, 1, JobStatus.EXPIRED)])


async def test_a_fencing_token_grows_although_the_clock_was_set_back(queue: Queue) -> None:
    job = await queue.submit()
    await queue.redis.hset(queue.keys.job(job), "token", 4 * 10**12)
    assert [d.token for d in await queue.worker().claim(1)] == [4 * 10**12 + 1]


async def test_a_fencing_token_never_repeats_after_the_server_lost_writes(queue: Queue) -> None:
    """A job is never claimed under a used token, also after a restart that lost a second."""
    job = await queue.submit()
    key = queue.keys.job(job)
    snapshot = await queue.redis.dump(key)
    (before,) = await queue.worker("w1").claim(1)
    await queue.redis.delete(key)
    await queue.redis.restore(key, 0, snapshot)
    await queue.redis.zadd(queue.keys.requeued, {job: 0})
    await asyncio.sleep(0.002)
    (after,) = await queue.worker("w2").claim(1)
    assert after.token > before.token > time.time() * 1000 - 60_000
