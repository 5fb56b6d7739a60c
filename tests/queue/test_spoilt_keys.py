"""Keys of a running job are overwritten: other jobs go on, and the job's log is made again."""

from __future__ import annotations

import pytest

from tests.support.queue import Queue, appended, token
from tokenmill_schemas.codec import decode_chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import AppendReply, ChunkAppend

pytestmark = pytest.mark.redis
OK, GONE, GAP = AppendReply.OK, AppendReply.GONE, AppendReply.GAP


async def two_running(queue: Queue):
    for _ in range(2):
        await queue.submit()
    worker = queue.worker("w1")
    spoilt, other = await worker.claim(2)
    assert await appended(worker, [token(spoilt, 0), token(other, 0)]) == [(OK, 1), (OK, 1)]
    return worker, spoilt, other


async def ends_of(queue: Queue, job_id: str) -> list[int]:
    return [
        decode_chunk(fields[b"chunk"]).end
        for _, fields in await queue.redis.xrange(queue.keys.log(job_id))
    ]


async def write_over(queue: Queue, job_id: str) -> None:
    await queue.redis.set(queue.keys.log(job_id), "not a log")


async def run_ahead(queue: Queue, job_id: str) -> None:
    await queue.redis.xadd(queue.keys.log(job_id), {"chunk": "?"}, id="9-0")


@pytest.mark.parametrize("spoil", [write_over, run_ahead])
async def test_an_overwritten_log_is_rewritten_from_its_worker_s_chunks(
    queue: Queue, spoil
) -> None:
    worker, job, other = await two_running(queue)
    await spoil(queue, job.job_id)
    assert await appended(worker, [token(job, 1), token(other, 1)]) == [(GAP, 0), (OK, 2)]
    again: list[ChunkAppend] = [token(job, 0), token(job, 1)]
    assert await appended(worker, [*again, token(other, 2)]) == [(OK, 1), (OK, 2), (OK, 3)]
    assert await ends_of(queue, job.job_id) == [1, 2]
    assert await ends_of(queue, other.job_id) == [1, 2, 3]


async def test_only_the_job_whose_hash_is_overwritten_is_lost(queue: Queue) -> None:
    worker, job, other = await two_running(queue)
    await queue.redis.delete(queue.keys.job(job.job_id))
    await queue.redis.set(queue.keys.job(job.job_id), "not a job")
    # nobody looks
    assert await appended(worker, [token(job, 1), token(other, 1)]) == [(OK, 2), (OK, 2)]
    assert (await worker.heartbeat(WorkerStatus(worker_id="w1"))).lost == (job.job_id,)
    assert await appended(worker, [token(job, 2), token(other, 2)]) == [(GONE, 2), (OK, 3)]
    assert await ends_of(queue, other.job_id) == [1, 2, 3]
    await queue.redis.delete(queue.keys.job(job.job_id))


async def test_a_job_with_an_overwritten_log_starts_anew_on_another_worker(queue: Queue) -> None:
    worker, job, _ = await two_running(queue)
    await write_over(queue, job.job_id)
    assert await worker.release([(job.job_id, job.token, False)]) == [True]
    heir = queue.worker("w2")
    (found,) = await heir.claim(1)
    assert (found.job_id, found.log) == (job.job_id, ())
    assert await appended(heir, [token(found, 0)]) == [(OK, 1)]
    assert await ends_of(queue, job.job_id) == [1]


async def test_an_emptied_log_is_rewritten_by_the_next_worker(queue: Queue) -> None:
    """The empty stream still refuses the numbers that it had before."""
    worker, job, _ = await two_running(queue)
    await queue.redis.xtrim(queue.keys.log(job.job_id), maxlen=0)
    assert await worker.release([(job.job_id, job.token, False)]) == [True]
    heir = queue.worker("w2")
    (found,) = await heir.claim(1)
    assert await appended(heir, [token(found, 0)]) == [(GAP, 0)]
    assert await appended(heir, [token(found, 0)]) == [(OK, 1)]
    assert await ends_of(queue, job.job_id) == [1]


async def test_a_server_error_in_an_append_is_not_blamed_on_a_job(queue: Queue) -> None:
    worker, job, _ = await two_running(queue)
    await queue.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisUnavailable, match="maxmemory"):
            await worker.append([token(job, 1)])
    finally:
        await queue.redis.config_set("maxmemory", 0)
    assert await appended(worker, [token(job, 1)]) == [(OK, 2)]
    assert await ends_of(queue, job.job_id) == [1, 2]
