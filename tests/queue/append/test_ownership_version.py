"""Appends read the hash of a job only if the job may have changed since the last append."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import msgspec
import pytest

from tests.support.queue import Queue, appended, end_of, token
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import decode_chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import AppendReply, ChunkAppend, Delivery
from tokenmill_worker.queue.append import AppendBatch
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = pytest.mark.redis
OK, DUPLICATE, LOST, GAP, CANCELLED = (
    AppendReply.OK, AppendReply.DUPLICATE, AppendReply.LOST, AppendReply.GAP, AppendReply.CANCELLED,
)  # fmt: skip


async def running(queue: Queue, jobs: int = 1, **options: Any) -> tuple[JobStream, list[Delivery]]:
    """Return a worker whose appends read no hashes any more: each job has two logged tokens."""
    await queue.client.submit_many([{"prompt": "x"}] * jobs)
    worker = queue.worker(**options)
    deliveries = await worker.claim(jobs)
    for index in (0, 1):
        assert (
            await appended(worker, [token(job, index) for job in deliveries])
            == [(OK, index + 1)] * jobs
        )
    return worker, deliveries


async def questions(queue: Queue) -> int:
    """Return how often the server was asked for a job's hash."""
    return int((await queue.redis.info("commandstats")).get("cmdstat_hmget", {"calls": 0})["calls"])


async def asked(queue: Queue, worker: JobStream, *steps: tuple[Delivery, int]) -> int:
    """Append tokens successfully and return how often that read a job's hash."""
    before = await questions(queue)
    assert await appended(worker, [token(job, index) for job, index in steps]) == [
        (OK, i + 1) for _, i in steps
    ]
    return await questions(queue) - before


async def logged(queue: Queue, job: Delivery) -> list[int]:
    entries = await queue.redis.xrange(queue.keys.log(job.job_id))
    return [
        token_id for _, fields in entries for token_id in decode_chunk(fields[b"chunk"]).token_ids
    ]


async def test_an_append_with_a_known_version_reads_no_ownership(queue: Queue) -> None:
    worker, (a, b) = await running(queue, jobs=2)
    assert await asked(queue, worker, (a, 2), (b, 2)) == 0
    await queue.client.submit_many([{"prompt": "x"}] * 2)
    c, d = await worker.claim(2)
    assert await asked(queue, worker, (a, 3), (b, 3), (c, 0), (d, 0)) == 2, "of the new ones alone"
    assert await asked(queue, worker, (a, 4), (b, 4), (c, 1), (d, 1)) == 0
    await worker.finish([end_of(a, 5)])
    assert await asked(queue, worker, (b, 5), (c, 2)) == 0
    assert [await logged(queue, job) for job in (b, c)] == [[0, 1, 2, 3, 4, 5], [0, 1, 2]]


async def test_several_tokens_of_a_job_in_one_call_read_no_ownership(queue: Queue) -> None:
    worker, (a,) = await running(queue)
    before = await questions(queue)
    assert await appended(worker, [token(a, 2, 3), token(a, 5)]) == [(OK, 5), (OK, 6)]
    assert await questions(queue) == before


async def test_a_cancel_is_replied_only_at_the_next_append_of_its_job(
    queue: Queue,
) -> None:
    worker, (a, b) = await running(queue, jobs=2)
    await queue.client.cancel(a.job_id)
    assert await appended(worker, [token(b, 2)]) == [(OK, 3)]
    assert await appended(worker, [token(a, 2), token(b, 3)]) == [(CANCELLED, 3), (OK, 4)]
    assert await asked(queue, worker, (b, 4)) == 0


async def test_a_late_append_of_a_job_that_another_worker_took_replies_lost(
    queue: Queue,
) -> None:
    zombie, (a, b) = await running(queue, jobs=2)
    await queue.redis.delete(queue.keys.worker("w1"))
    heir = queue.worker("w2")
    (taken,) = await heir.claim(1)
    theirs, mine = (a, b) if taken.job_id == a.job_id else (b, a)
    (again,) = await zombie.claim(1)
    assert again.job_id == mine.job_id
    for index in (2, 3):  # its ownership version is valid again, by the reply to this append
        assert await appended(zombie, [token(again, index)]) == [(OK, index + 1)]
    assert await appended(heir, [token(taken, 2)]) == [(OK, 3)]
    assert await appended(zombie, [token(theirs, 2), token(again, 4)]) == [(LOST, 3), (OK, 5)]
    assert await appended(zombie, [token(mine, 5)]) == [(LOST, 5)], (
        "the same job, as it held it before"
    )
    assert await logged(queue, again) == [0, 1, 2, 3, 4]
    assert await logged(queue, taken) == [0, 1, 2]


async def test_a_worker_deregistered_between_two_appends_writes_nothing(
    queue: Queue,
) -> None:
    zombie, (a,) = await running(queue)
    await queue.redis.delete(queue.keys.worker("w1"))
    await queue.worker("w2").claim(0)  # sweeps; no worker owns the job
    assert await appended(zombie, [token(a, 2)]) == [(LOST, 2)]
    (heirs,) = await queue.worker("w2").claim(1)
    assert await appended(zombie, [token(a, 2)]) == [(LOST, 2)]
    assert len(heirs.log) == 2


async def test_a_restarted_worker_of_the_same_name_takes_over_the_ownership_version(
    queue: Queue,
) -> None:
    old, (a,) = await running(queue)
    new = queue.worker()
    await new.open()
    (taken,) = await new.claim(1)
    assert await appended(new, [token(taken, 2)]) == [(OK, 3)]
    assert await appended(old, [token(a, 2)]) == [(LOST, 3)]
    assert await appended(old, [token(a, 3)]) == [(LOST, 3)]
    assert await appended(new, [token(taken, 3)]) == [(OK, 4)]
    assert await logged(queue, a) == [0, 1, 2, 3]


async def test_an_append_after_the_server_lost_the_last_one_replies_gap(queue: Queue) -> None:
    worker, (a, b) = await running(queue, jobs=2)
    held = await queue.everything()
    assert await appended(worker, [token(a, 2), token(b, 2)]) == [(OK, 3), (OK, 3)]
    await queue.go_back(held)
    assert await appended(worker, [token(a, 3)]) == [(GAP, 2)]
    assert await appended(worker, [token(a, 2), token(a, 3)]) == [(OK, 3), (OK, 4)]
    assert await appended(worker, [token(a, 4)]) == [(OK, 5)]
    assert await appended(worker, [token(b, 3)]) == [(GAP, 2)], (
        "one that was not in the call that found it"
    )
    assert await appended(worker, [token(b, 2), token(b, 3)]) == [(OK, 3), (OK, 4)]
    assert await logged(queue, a) == [0, 1, 2, 3, 4]
    assert await logged(queue, b) == [0, 1, 2, 3]


async def test_an_append_for_a_claim_that_the_server_lost_replies_lost(queue: Queue) -> None:
    worker, (a,) = await running(queue)
    await queue.submit()
    held = await queue.everything()
    (b,) = await worker.claim(1)
    await queue.go_back(held)
    assert await appended(worker, [token(a, 2), token(b, 0)]) == [(OK, 3), (LOST, 0)]


async def test_after_a_failed_call_ownership_is_read_again(queue: Queue) -> None:
    worker, (a, b) = await running(queue, jobs=2)
    await queue.redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(RedisUnavailable, match="maxmemory"):
            await worker.append([token(a, 2)])
    finally:
        await queue.redis.config_set("maxmemory", 0)
    assert await asked(queue, worker, (a, 2)) == 1
    assert await asked(queue, worker, (b, 2)) == 1
    assert await asked(queue, worker, (a, 3), (b, 3)) == 0


async def test_after_a_lost_reply_ownership_is_read_again(queue: Queue) -> None:
    worker, (a,) = await running(queue)
    sent = asyncio.create_task(worker.append([token(a, 2)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    sent.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sent
    ((word, end),) = await appended(worker, [token(a, 2)])
    assert (word, end) in ((OK, 3), (DUPLICATE, 3))
    assert await appended(worker, [token(a, 3)]) == [(OK, 4)]
    assert await logged(queue, a) == [0, 1, 2, 3]


async def test_a_deleted_log_is_rewritten(queue: Queue) -> None:
    worker, (a, b) = await running(queue, jobs=2)
    await queue.redis.delete(queue.keys.log(a.job_id))
    assert await appended(worker, [token(a, 2), token(b, 2)]) == [(GAP, 0), (OK, 3)]
    assert await appended(worker, [token(a, 0, 3)]) == [(OK, 3)]
    assert 0 < await queue.redis.ttl(queue.keys.log(a.job_id)) <= 86_400
    assert await logged(queue, a) == [0, 1, 2]


async def test_a_rewritten_log_has_the_ends_of_its_choices(queue: Queue) -> None:
    worker, (a,) = await running(queue)
    ended = ChunkAppend(
        a.token, Chunk(job_id=a.job_id, index=0, choice=1, finish_reason=FinishReason.STOP, n=2), 2
    )
    before = await questions(queue)
    assert await appended(worker, [ended]) == [(OK, 3)]
    assert await questions(queue) == before, "an end is known as well as a token"
    await queue.redis.delete(queue.keys.log(a.job_id))
    assert await appended(worker, [token(a, 3)]) == [(GAP, 0)]
    assert await appended(worker, [token(a, 0, 2), ended, token(a, 3)]) == [
        (OK, 2),
        (OK, 3),
        (OK, 4),
    ]
    assert await queue.redis.xlen(queue.keys.log(a.job_id)) == 3


async def test_appends_renew_the_log_s_expiry(queue: Queue) -> None:
    worker, (a,) = await running(queue)
    await queue.redis.expire(queue.keys.log(a.job_id), 5)
    for index in range(2, 64):
        assert await asked(queue, worker, (a, index)) == 0
    assert await queue.redis.ttl(queue.keys.log(a.job_id)) > 5


async def test_a_chunk_that_skips_an_index_replies_gap(queue: Queue) -> None:
    worker, (a,) = await running(queue)
    assert await appended(worker, [token(a, 3)]) == [(GAP, 2)]
    assert await appended(worker, [token(a, 4)]) == [(GAP, 2)]
    assert await appended(worker, [token(a, 1)]) == [(DUPLICATE, 2)]
    assert await appended(worker, [token(a, 2)]) == [(OK, 3)]


async def test_an_overwritten_ownership_version_leads_to_one_full_check(
    queue: Queue, allowed_keys: list[str]
) -> None:
    worker, (a,) = await running(queue)
    await queue.redis.hset(queue.keys.ownership_versions, "w1", "what?")
    assert await asked(queue, worker, (a, 2)) == 1
    assert await asked(queue, worker, (a, 3)) == 0
    await queue.redis.hset(queue.keys.ownership_versions, "w1", str(2**63 - 1))
    assert await asked(queue, worker, (a, 4)) == 1
    assert await asked(queue, worker, (a, 5)) == 0
    await queue.redis.set(queue.keys.ownership_versions, "no hash")
    allowed_keys.append("*ownership_versions")
    assert await asked(queue, worker, (a, 6)) == 1
    assert await asked(queue, worker, (a, 7)) == 1
    await queue.redis.delete(queue.keys.worker("w1"))
    await queue.worker("w2").heartbeat(WorkerStatus(worker_id="w2"))  # sweeps all the same
    assert await appended(worker, [token(a, 8)]) == [(LOST, 8)]


async def test_checkpoints_with_a_known_version_read_no_ownership(queue: Queue) -> None:
    worker, (a,) = await running(queue)
    before = await questions(queue)
    async with queue.redis.pubsub() as pubsub:
        await pubsub.subscribe(queue.keys.chunks(a.job_id))
        await pubsub.get_message(timeout=30)
        assert await appended(
            worker, [ChunkAppend(a.token, token(a, 2, 32).chunk, 2, checkpoint=True)]
        ) == [(OK, 34)]
        assert await pubsub.get_message(timeout=0.1) is None
    assert await questions(queue) == before


async def test_a_worker_without_jobs_leaves_no_ownership_version(queue: Queue) -> None:
    worker, (a,) = await running(queue)
    assert await queue.redis.hexists(queue.keys.ownership_versions, "w1")
    await worker.release([(a.job_id, a.token, False)])
    assert not await queue.redis.exists(queue.keys.ownership_versions)
    await worker.resign()
    assert not await queue.redis.exists(queue.keys.ownership_versions)
    assert await appended(worker, [token(a, 2)]) == [(LOST, 2)]
    assert not await queue.redis.exists(queue.keys.ownership_versions)


def test_after_a_reset_an_append_is_packed_without_assumptions() -> None:
    calls, chunk = AppendBatch(), Chunk(job_id="a", index=0, token_ids=(1,))
    first, _ = calls.pack([ChunkAppend(7, chunk, 0)])
    assert calls.apply_reply([ChunkAppend(7, chunk, 0)], [-1, b"version", 0]) == {}
    known, packed = calls.pack([ChunkAppend(7, msgspec.structs.replace(chunk, index=1), 1)])
    calls.reset()
    unknown, again = calls.pack([ChunkAppend(7, msgspec.structs.replace(chunk, index=2), 2)])
    assert (known, unknown) == (first + 1, first + 2)
    assert [msgpack.unpackb(call, raw=True)[4] for call in (packed, again)] == [3, 1]


async def test_chunks_refused_by_the_script_raise_a_value_error_and_write_nothing(
    queue: Queue,
) -> None:
    """No later call would send them, so the queue does not count as away."""
    worker, (a, b) = await running(queue, jobs=2)
    with pytest.raises(ValueError, match="INVALID chunks"):
        await worker.append([token(a, 2), token(b, 2**32 - 1, 2)])
    assert await logged(queue, a) == [0, 1], "a refused call writes nothing"
    assert await appended(worker, [token(a, 2)]) == [(OK, 3)]
