"""Many jobs end in one call; an error of one of them does not affect the others."""

import pytest

from tests.support.queue import end_of
from tokenmill_schemas.job import Priority
from tokenmill_worker.errors import RedisUnavailable

pytestmark = pytest.mark.redis


async def test_a_job_that_fails_the_script_does_not_keep_the_others_from_finishing(
    queue, allowed_keys
):
    allowed_keys.append(queue.keys.job("broken"))
    worker, stream = queue.worker("w1"), queue.keys.tenant_stream(Priority.BULK)
    for name in ("first", "broken", "last"):
        await queue.submit(job_id=name, priority="bulk")
    first, broken, last = await worker.claim(credits=3)
    await queue.redis.delete(queue.keys.job("broken"))
    await queue.redis.set(queue.keys.job("broken"), "no hash")
    with pytest.raises(RedisUnavailable):
        await worker.finish([end_of(job, 1) for job in (first, broken, last)])
    assert await counts(queue) == (b"2", b"1")
    assert await queue.redis.xlen(stream) == 2
    assert await worker.finish([end_of(first, 1), end_of(last, 1)]) == [True, True]
    assert await counts(queue) == (b"1", b"2")
    assert await queue.redis.xlen(stream) == 1


async def counts(queue):
    return tuple(await queue.redis.hmget(queue.keys.meta, "running", "finished:succeeded"))


async def test_a_job_with_a_damaged_entry_does_not_keep_others_in_the_stream(queue, allowed_keys):
    allowed_keys.append("*")  # the damaged job's own entry stays
    worker = queue.worker("w1")
    for number in range(5):
        await queue.submit(job_id=f"job-{number}")
    jobs = await worker.claim(credits=5)
    await queue.redis.hset(queue.keys.job("job-2"), "entry", "nonsense")
    assert await worker.finish([end_of(job, 1) for job in jobs]) == [True] * 5
    assert await queue.redis.xlen(queue.keys.tenant_stream(Priority.STANDARD)) == 1


async def test_jobs_claimed_before_a_failing_job_stay_counted(queue, allowed_keys):
    allowed_keys.append("*")
    worker = queue.worker("w1")
    for name in ("good", "broken"):
        await queue.submit(job_id=name)
    await queue.redis.delete(queue.keys.job("broken"))
    await queue.redis.set(queue.keys.job("broken"), "no hash")
    with pytest.raises(RedisUnavailable):
        await worker.claim(credits=2)
    depth = await queue.client.depth()
    assert (depth.running, depth.queued["standard"]) == (1, 1)
    (good,) = await worker.claim(credits=1)  # what that call's reply did not tell
    assert (good.job_id, good.deliveries) == ("good", 1)
