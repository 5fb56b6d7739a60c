"""Jobs of a session go to the worker that had the last of them, as far as no worker stands idle and
no job waits longer than a moment.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.queue import Queue, end_of
from tokenmill.errors import InvalidRequest
from tokenmill_schemas.job import PRIORITY_ORDER, Priority
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = pytest.mark.redis
MOST_HELD = 32


async def had_by(worker: JobStream, queue: Queue, *sessions: str, **fields: Any) -> None:
    """Let a worker have a job of each session, and end it."""
    for session in sessions:
        job = await queue.submit(session=session, priority="interactive", **fields)
        (delivery,) = await worker.claim(1)
        assert delivery.job_id == job
        await worker.finish([end_of(delivery)])


async def busy(queue: Queue, name: str) -> JobStream:
    """Return a worker that owns a job without a session."""
    worker = queue.worker(name)
    await queue.submit(priority="interactive", job_id=f"busy-{name}")
    assert [each.job_id for each in await worker.claim(1)] == [f"busy-{name}"]
    return worker


async def claimed(worker: JobStream, credits: int, urgent: int = 0) -> list[str]:
    return [each.job_id for each in await worker.claim(credits, urgent)]


async def held(queue: Queue) -> set[str]:
    """Return the jobs that are held; each list says the same."""
    redis, keys = queue.redis, queue.keys
    by_class = {job async for job in _members(redis, map(keys.held, PRIORITY_ORDER))}
    by_worker = {job async for job in _members(redis, await redis.keys(keys.held_for("*")))}
    assert by_worker <= by_class
    return by_class


async def _members(redis: Any, names: Any) -> Any:
    for name in names:
        for job in await redis.zrange(name, 0, -1):
            yield job.decode()


async def pass_time(queue: Queue, *, by_ms: float = -600) -> None:
    """Move the time since when jobs are held, so that no test waits for a clock."""
    for key in map(queue.keys.held, PRIORITY_ORDER):
        for job, since in await queue.redis.zrange(key, 0, -1, withscores=True):
            await queue.redis.zadd(key, {job: since + by_ms})


async def two_workers(queue: Queue) -> tuple[JobStream, JobStream]:
    """Return w1, which is busy, and w2, which has had session `s`."""
    other = queue.worker("w2")
    await had_by(other, queue, "s")
    return await busy(queue, "w1"), other


async def test_a_job_goes_to_the_worker_that_had_its_session(queue: Queue) -> None:
    one, other = await two_workers(queue)
    job, free = await queue.submit(session="s"), await queue.submit()
    assert await claimed(one, 5) == [free]
    assert await held(queue) == {job}
    assert (await queue.client.depth()).num_queued == 1
    assert await claimed(other, 5) == [job]
    assert await held(queue) == set()
    assert await queue.field(job, "held") is None


async def test_held_jobs_come_before_those_in_their_stream_and_in_order(queue: Queue) -> None:
    one, other = await two_workers(queue)
    jobs = [await queue.submit(session="s") for _ in range(3)]
    assert await claimed(one, 1) == []
    jobs.append(await queue.submit(session="s"))
    jobs.append(await queue.submit())
    assert await claimed(other, 5) == jobs


async def test_a_job_held_for_too_long_is_any_worker_s_and_its_session_moves(queue: Queue) -> None:
    one, other = await two_workers(queue)
    job = await queue.submit(session="s")
    assert await claimed(one, 5) == []
    assert await claimed(one, 5) == []
    await pass_time(queue)
    assert await claimed(one, 5) == [job]
    again = await queue.submit(session="s")
    await other.claim(0)
    assert await claimed(one, 5) == [again]


async def test_a_held_job_is_free_if_the_server_s_clock_went_back(queue: Queue) -> None:
    one, _ = await two_workers(queue)
    job = await queue.submit(session="s")
    assert await claimed(one, 5) == []
    await pass_time(queue, by_ms=3_600_000)
    assert await claimed(one, 5) == [job]


async def test_a_worker_without_a_job_takes_one_of_another_s_sessions(queue: Queue) -> None:
    other = queue.worker("w2")
    await had_by(other, queue, "s")
    jobs = [await queue.submit(session="s") for _ in range(3)]
    assert await claimed(queue.worker("w1"), 3) == jobs[:1], "then it is not idle any more"
    assert await claimed(other, 3) == jobs[1:]


async def test_a_worker_without_a_job_prefers_those_that_it_need_not_take_from_another(
    queue: Queue,
) -> None:
    other = queue.worker("w2")
    await had_by(other, queue, "s")
    job, free = await queue.submit(session="s"), await queue.submit()
    assert await claimed(queue.worker("w1"), 3) == [free]
    assert await claimed(other, 3) == [job]


async def test_a_job_held_a_moment_ago_is_taken_at_once_by_an_idle_worker(queue: Queue) -> None:
    one, _ = await two_workers(queue)
    job = await queue.submit(session="s")
    assert await claimed(one, 5) == []
    assert await claimed(queue.worker("w3"), 5) == [job]


async def test_a_dead_worker_s_session_is_anyone_s(queue: Queue) -> None:
    one, other = await two_workers(queue)
    jobs = [await queue.submit(session="s")]
    assert await claimed(one, 5) == []
    await queue.redis.delete(queue.keys.worker(other.worker_id))
    jobs.append(await queue.submit(session="s"))
    assert await claimed(one, 5) == jobs[1:], "the other one is held for a moment more"
    await pass_time(queue)
    assert await claimed(one, 5) == jobs[:1]
    assert await queue.redis.exists(queue.keys.held_for("w2")) == 0


async def test_only_so_many_jobs_are_held_for_one_worker(queue: Queue) -> None:
    """A worker that has every session, and claims nothing, delays few jobs."""
    one, _ = await two_workers(queue)
    jobs = [await queue.submit(session="s") for _ in range(MOST_HELD + 8)]
    assert await claimed(one, 5) == jobs[MOST_HELD : MOST_HELD + 5]
    assert await held(queue) == set(jobs[:MOST_HELD])
    assert await claimed(one, 5) == jobs[MOST_HELD + 5 :]
    await pass_time(queue)
    assert await claimed(one, 64) == jobs[:MOST_HELD]


async def test_a_claim_passes_over_so_many_jobs_and_no_more(queue: Queue) -> None:
    one, other = await two_workers(queue)
    third = queue.worker("w3")
    await had_by(third, queue, "t")
    jobs = [await queue.submit(session="st"[place % 2]) for place in range(50)]
    assert await claimed(one, 1) == [jobs[32]]
    assert await held(queue) == set(jobs[:32])
    assert await claimed(other, 16) == jobs[0:32:2]
    assert await claimed(third, 16) == jobs[1:32:2]


async def test_sessions_of_two_tenants_with_one_name_are_two(queue: Queue) -> None:
    other = queue.worker("w2")
    await had_by(other, queue, "s", tenant="a")
    one = await busy(queue, "w1")
    jobs = {tenant: await queue.submit(session="s", tenant=tenant) for tenant in ("a", "b", "")}
    assert set(await claimed(one, 5)) == {jobs["b"], jobs[""]}
    assert await claimed(other, 5) == [jobs["a"]]


@pytest.mark.parametrize("name", ["{x}", "}{", "{q}:job:x", "s:*", "é 日本", " ", "x" * 255])
async def test_any_text_may_name_a_session(queue: Queue, name: str) -> None:
    other = queue.worker("w2")
    await had_by(other, queue, name)
    one, job = await busy(queue, "w1"), await queue.submit(session=name)
    assert await claimed(one, 5) == []
    assert await claimed(other, 5) == [job]
    assert len(await queue.redis.hkeys(queue.keys.sessions)) == 1


@pytest.mark.parametrize("name", ["x" * 10_000, "a\0b", "a\nb"])
async def test_a_name_that_is_too_long_or_no_text_is_refused(queue: Queue, name: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^session "):
        await queue.submit(session=name)
    assert (await queue.client.depth()).num_queued == 0


async def test_an_idempotent_submit_may_name_another_session(queue: Queue) -> None:
    job = await queue.submit(session="a", idempotency_key="k")
    assert await queue.submit(session="b", idempotency_key="k") == job


async def test_only_the_last_sessions_are_remembered(queue: Queue) -> None:
    """The 100,000 newest become the old ones, and those that were old are forgotten."""
    redis, keys, worker = queue.redis, queue.keys, queue.worker("w1")
    await had_by(worker, queue, "first")
    (first,) = await redis.hkeys(keys.sessions)
    await redis.eval(
        "for n = 1, 99998 do redis.call('HSET', KEYS[1], n, 'w1') end", 1, keys.sessions
    )
    await had_by(worker, queue, "last")
    assert await redis.hlen(keys.old_sessions) == 100_000
    assert await redis.exists(keys.sessions) == 0
    await had_by(worker, queue, "next", "first")
    assert await redis.hlen(keys.sessions) == 2, "one that is used again is new again"
    await redis.eval(
        "for n = 1, 99997 do redis.call('HSET', KEYS[1], n, 'w1') end", 1, keys.sessions
    )
    await had_by(worker, queue, "another")
    assert await redis.hlen(keys.old_sessions) == 100_000
    assert await redis.exists(keys.sessions) == 0
    assert await redis.hexists(keys.old_sessions, first)


async def test_cancelled_and_expired_jobs_leave_the_held_ones(queue: Queue) -> None:
    one, other = await two_workers(queue)
    jobs = [await queue.submit(session="s", deadline=3_600) for _ in range(3)]
    assert await claimed(one, 5) == []
    assert await held(queue) == set(jobs)
    assert await queue.client.cancel(jobs[0]) == "cancelled"
    await queue.pass_deadline(jobs[1])
    got = {each.job_id: each.outcome for each in await other.claim(5)}
    assert got == {jobs[0]: "cancelled", jobs[1]: "expired", jobs[2]: "run"}
    assert await held(queue) == set()
    assert (await queue.client.depth()).num_queued == 0


async def test_held_jobs_are_listed_as_queued(queue: Queue) -> None:
    one, _ = await two_workers(queue)
    job = await queue.submit(session="s")
    assert await claimed(one, 5) == []
    assert [each.job_id for each in await queue.client.list(status="queued")] == [job]


async def test_a_held_job_whose_hash_is_gone_is_reported_once(queue: Queue) -> None:
    one, other = await two_workers(queue)
    job, next_job = await queue.submit(session="s"), await queue.submit(session="s")
    assert await claimed(one, 5) == []
    await queue.redis.delete(queue.keys.job(job))
    assert await claimed(other, 5) == [next_job]
    assert await held(queue) == {job}, "it is no worker's"
    await pass_time(queue)
    assert await claimed(one, 5) == []
    assert await held(queue) == set()
    await queue.redis.delete(queue.keys.tenant_stream(Priority.STANDARD))


@pytest.mark.parametrize("name", ["sessions", "old_sessions", "held_for:w1", "held_for:w2"])
async def test_a_key_written_by_another_program_stops_no_claim(
    queue: Queue, name: str, allowed_keys: list[str]
) -> None:
    allowed_keys.append("*")
    one, other = await two_workers(queue)
    await queue.redis.set(queue.keys.base + name, "x")
    job = await queue.submit(session="s")
    got = [*await claimed(one, 5), *await claimed(other, 5)]
    assert got == [job]


@pytest.mark.parametrize("priority", [each.value for each in PRIORITY_ORDER])
async def test_a_list_of_held_jobs_written_by_another_program_stops_no_claim(
    queue: Queue, priority: str, allowed_keys: list[str]
) -> None:
    allowed_keys.append("*")
    one, _ = await two_workers(queue)
    await queue.redis.set(queue.keys.held(Priority(priority)), "x")
    job = await queue.submit(session="s", priority=priority)
    assert await claimed(one, 5) == [job]


async def test_urgent_room_passes_over_another_s_session_too(queue: Queue) -> None:
    one, other = await two_workers(queue)
    job = await queue.submit(session="s", priority="interactive")
    assert await claimed(one, 0, urgent=3) == []
    assert await claimed(other, 0, urgent=3) == [job]


async def test_a_returned_job_is_the_next_worker_s(queue: Queue) -> None:
    one, other = await two_workers(queue)
    job = await queue.submit(session="s")
    (delivery,) = await other.claim(5)
    await other.release([(job, delivery.token, False)])
    assert await claimed(one, 5) == [job]
    again = await queue.submit(session="s")
    assert await claimed(one, 5) == [again], "and so is its session"
