"""append and finish: each token once, under the token of its holder, whatever is repeated."""

import asyncio

import pytest

from tests.support.queue import Queue, appended, end_of, token
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import decode_chunk, decode_result
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import Priority
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.jobs import AppendReply, ChunkAppend

pytestmark = pytest.mark.redis
OK, DUPLICATE, LOST, GAP, CANCELLED = (
    AppendReply.OK, AppendReply.DUPLICATE, AppendReply.LOST, AppendReply.GAP, AppendReply.CANCELLED,
)  # fmt: skip


async def claimed(queue: Queue, worker_id: str = "w1", **fields):
    await queue.submit(**fields)
    worker = queue.worker(worker_id)
    (delivery,) = await worker.claim(1)
    return worker, delivery


def end_chunk(delivery, start: int, choice: int = 0) -> ChunkAppend:
    """A choice's end without a token."""
    chunk = Chunk(
        job_id=delivery.job_id,
        index=start,
        choice=choice,
        text="!",
        finish_reason=FinishReason.STOP,
        n=2,
    )
    return ChunkAppend(delivery.token, chunk, start)


async def test_appended_chunks_are_logged_and_published_in_one_call(queue: Queue) -> None:
    worker, job = await claimed(queue)
    async with queue.redis.pubsub() as pubsub:
        await pubsub.subscribe(queue.keys.chunks(job.job_id))
        await pubsub.get_message(timeout=30)
        assert await appended(worker, [token(job, 0), token(job, 1, 3)]) == [(OK, 1), (OK, 4)]
        received = [(await pubsub.get_message(timeout=30))["data"] for _ in range(2)]
    log = await queue.redis.xrange(queue.keys.log(job.job_id))
    assert [entry_id for entry_id, _ in log] == [b"1-0", b"4-0"]
    assert [fields[b"chunk"] for _, fields in log] == received
    assert decode_chunk(received[1]).token_ids == (1, 2, 3)


async def test_a_repeated_append_neither_logs_nor_publishes_again(queue: Queue) -> None:
    worker, job = await claimed(queue)
    step = [token(job, 0), token(job, 1, 3), end_chunk(job, 4, choice=1)]
    assert await appended(worker, step) == [(OK, 1), (OK, 4), (OK, 5)]
    assert await appended(worker, step) == [(DUPLICATE, 5), (DUPLICATE, 5), (DUPLICATE, 5)]
    assert await appended(worker, [token(job, 5), end_chunk(job, 6)]) == [(OK, 6), (OK, 7)]
    assert await appended(worker, [end_chunk(job, 4, choice=1)]) == [(DUPLICATE, 7)]
    ids = [entry_id for entry_id, _ in await queue.redis.xrange(queue.keys.log(job.job_id))]
    assert ids == [b"1-0", b"4-0", b"5-0", b"6-0", b"7-0"]


async def test_a_log_that_lost_its_tail_replies_gap_with_its_end(queue: Queue) -> None:
    worker, job = await claimed(queue)
    await worker.append([token(job, 0)])
    assert await appended(worker, [token(job, 3)]) == [(GAP, 1)]
    assert await appended(worker, [token(job, 1, 2)]) == [(OK, 3)]
    # begins before the end: cut anew, not overlaid
    assert await appended(worker, [token(job, 2, 3)]) == [(GAP, 3)]


async def test_a_chunk_that_begins_the_log_rewrites_it(queue: Queue) -> None:
    worker, job = await claimed(queue)
    await worker.append([token(job, 0), token(job, 1), token(job, 2)])
    assert await appended(worker, [token(job, 0, 2), token(job, 2)]) == [(OK, 2), (OK, 3)]
    assert await appended(worker, [token(job, 0, 2)]) == [(DUPLICATE, 3)], (
        "the reply was lost, and it is sent again"
    )
    ids = [entry_id for entry_id, _ in await queue.redis.xrange(queue.keys.log(job.job_id))]
    assert ids == [b"2-0", b"3-0"]
    assert 0 < await queue.redis.ttl(queue.keys.log(job.job_id)) <= 86_400


async def test_an_empty_chunk_is_refused(queue: Queue) -> None:
    worker, job = await claimed(queue)
    with pytest.raises(ValueError, match="neither a token nor an end"):
        await worker.append(
            [ChunkAppend(job.token, Chunk(job_id=job.job_id, index=0, text="x"), 0)]
        )


async def test_a_cancel_is_reported_at_the_next_append(queue: Queue) -> None:
    worker, job = await claimed(queue)
    assert await queue.client.cancel(job.job_id) == "cancelling"
    assert await appended(worker, [token(job, 0)]) == [(CANCELLED, 1)]


async def test_checkpoints_are_logged_and_not_published(queue: Queue) -> None:
    worker, job = await claimed(queue)
    async with queue.redis.pubsub() as pubsub:
        await pubsub.subscribe(queue.keys.chunks(job.job_id))
        await pubsub.get_message(timeout=30)
        await worker.append([ChunkAppend(job.token, token(job, 0, 32).chunk, 0, checkpoint=True)])
        assert await pubsub.get_message(timeout=0.1) is None
    assert await queue.redis.xlen(queue.keys.log(job.job_id)) == 1


async def test_a_worker_that_lost_its_lease_cannot_write(queue: Queue) -> None:
    zombie, before = await claimed(queue)
    await zombie.append([token(before, 0)])
    await queue.redis.delete(queue.keys.worker("w1"))  # its lease ran out
    heir = queue.worker("w2")
    (after,) = await heir.claim(1)
    assert (len(after.log), after.log_end) == (1, 1)
    assert await appended(zombie, [token(before, 1)]) == [(LOST, 1)]
    assert await zombie.finish([end_of(before)]) == [False]
    assert await zombie.release([(before.job_id, before.token, True)]) == [False]
    assert await zombie.retry(before.job_id, before.token, 0) is False
    assert await appended(heir, [token(after, 1)]) == [(OK, 2)]
    assert await heir.finish([end_of(after, 2)]) == [True]


async def test_a_released_job_accepts_no_write_before_its_next_claim(queue: Queue) -> None:
    zombie, before = await claimed(queue)
    await zombie.release([(before.job_id, before.token, False)])
    assert await appended(zombie, [token(before, 0)]) == [(LOST, 0)]
    assert await zombie.finish([end_of(before)]) == [False]


async def test_finish_leaves_only_the_result_and_the_log(queue: Queue) -> None:
    worker, job = await claimed(queue, tenant="t")
    await worker.append([token(job, 0)])
    assert await worker.finish([end_of(job, 1)]) == [True]
    names = {key.decode().removeprefix(queue.keys.base) for key in await queue.redis.keys("*")}
    assert names - {"fair_shares:standard"} == {
        f"job:{job.job_id}",
        "meta",
        "tenant:t",
        "worker:w1",
        "workers",
        "ownership_versions",
    }
    await worker.resign()
    assert not await queue.redis.exists(queue.keys.ownership_versions)
    assert 0 < await queue.redis.ttl(queue.keys.job(job.job_id)) <= 3600
    packed = await queue.redis.hget(queue.keys.job(job.job_id), "result")
    assert packed is not None
    assert decode_result(packed).token_ids == (0,)
    assert await queue.field(job.job_id, "request") is None
    depth = await queue.client.depth()
    assert (depth.num_queued, depth.running, depth.queued_tokens) == (0, 0, 0.0)


async def test_a_repeated_finish_replies_the_same_and_publishes_nothing(queue: Queue) -> None:
    worker, job = await claimed(queue)
    async with queue.redis.pubsub() as pubsub:
        await pubsub.subscribe(queue.keys.chunks(job.job_id))
        await pubsub.get_message(timeout=30)
        assert await worker.finish([end_of(job), end_of(job)]) == [True, True]
        assert await worker.finish([end_of(job)]) == [True]
        assert decode_chunk((await pubsub.get_message(timeout=30))["data"]).is_last
        assert await pubsub.get_message(timeout=0.1) is None


async def test_an_append_after_the_end_replies_lost(queue: Queue) -> None:
    worker, job = await claimed(queue)
    await worker.finish([end_of(job)])
    assert await appended(worker, [token(job, 0)]) == [(LOST, 0)]
    assert not await queue.redis.exists(queue.keys.log(job.job_id))


async def test_a_large_finish_is_split_into_several_calls(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x"}] * 6)
    worker = queue.worker()
    ends = [end_of(job, 90_000) for job in await worker.claim(6)]
    assert await worker.finish(ends) == [True] * 6


async def test_a_log_expires_after_its_time_to_live(queue: Queue) -> None:
    worker, job = await claimed(queue)
    await worker.append([token(job, 0)])
    assert 0 < await queue.redis.ttl(queue.keys.log(job.job_id)) <= 86_400
    await worker.finish([end_of(job, 1)])


async def test_a_job_whose_log_expired_starts_from_the_beginning(queue: Queue) -> None:
    worker, before = await claimed(queue)
    await worker.append([token(before, 0)])
    await queue.redis.delete(queue.keys.log(before.job_id))
    await worker.release([(before.job_id, before.token, False)])
    (after,) = await worker.claim(1)
    assert after.log == ()
    assert await appended(worker, [token(after, 0)]) == [(OK, 1)]
    await worker.finish([end_of(after, 1)])


async def test_the_tenant_s_cost_is_corrected_at_the_end_of_a_job(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x", "tenant": "t", "max_tokens": 1000}] * 2)
    worker = queue.worker()
    (job,) = await worker.claim(1)
    index = queue.keys.fair_shares(Priority.STANDARD)
    charged = await queue.redis.zscore(index, "t")
    await worker.finish([end_of(job, 10)])  # 3 + 10 tokens in truth
    settled = await queue.redis.zscore(index, "t")
    assert charged == pytest.approx(1000)
    assert settled == pytest.approx(13)


async def test_appends_of_two_jobs_do_not_disturb_each_other(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x"}] * 2)
    worker = queue.worker()
    a, b = await worker.claim(2)
    await worker.release([(a.job_id, a.token, False)])
    assert await appended(worker, [token(a, 0), token(b, 0)]) == [(LOST, 0), (OK, 1)]
    assert list(worker.owned) == [b.job_id]


async def test_scripts_that_the_server_lost_are_loaded_again(queue: Queue) -> None:
    worker, job = await claimed(queue)
    await queue.redis.script_flush()
    assert await appended(worker, [token(job, 0)]) == [(OK, 1)]
    await queue.redis.script_flush()
    results = await asyncio.gather(worker.finish([end_of(job, 1)]), queue.client.depth())
    assert results[0] == [True]


async def test_failed_cancelled_and_expired_jobs_keep_their_state(queue: Queue) -> None:
    for status in (JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.EXPIRED):
        worker, job = await claimed(queue)
        await worker.finish([end_of(job, 0, status)])
        assert (await queue.client.status(job.job_id)).status is status
