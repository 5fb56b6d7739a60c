"""No client reaches the server for longer than a lease: live workers keep the jobs they own."""

import pytest

from tests.support.queue import Queue
from tokenmill_schemas.control import WorkerStatus
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = pytest.mark.redis
LEASE_S = 60.0  # longer than any test runs: leases end where the test lets time pass


async def beat(worker: JobStream) -> tuple[str, ...]:
    return (await worker.heartbeat(WorkerStatus(worker_id=worker.worker_id))).lost


async def let_pass(queue: Queue, seconds: float) -> None:
    """Put what the server has noted that far into the past: leases end, and sweeps are long ago."""
    passed_ms = round(seconds * 1000)
    for name in await queue.redis.smembers(queue.keys.base + "workers"):
        lease = queue.keys.worker(name.decode())
        if (left_ms := await queue.redis.pttl(lease) - passed_ms) > 0:
            await queue.redis.pexpire(lease, left_ms)
        else:
            await queue.redis.delete(lease)
    for field in ("swept_ms", "sweep_from_ms"):
        if await queue.redis.hexists(queue.keys.meta, field):
            await queue.redis.hincrby(queue.keys.meta, field, -passed_ms)


async def hold_two_each(queue: Queue, *names: str) -> list[JobStream]:
    workers = [queue.worker(name, lease_s=LEASE_S) for name in names]
    for worker in workers:
        await queue.client.submit_many([{"prompt": "x", "stream": False}] * 2)
        assert len(await worker.claim(2)) == 2
    return workers


async def test_the_first_worker_back_after_an_outage_takes_no_job_of_the_others(
    queue: Queue,
) -> None:
    first, second = await hold_two_each(queue, "w1", "w2")
    await let_pass(queue, 2 * LEASE_S)  # without a reachable server no worker sweeps
    assert await beat(first) == ()
    assert await first.claim(9) == []
    assert await beat(second) == ()
    assert (await beat(first), await beat(second)) == ((), ())
    assert len(second.owned) == 2


async def test_a_worker_with_a_valid_lease_takes_no_job_of_others_after_an_outage(
    queue: Queue,
) -> None:
    first, second = await hold_two_each(queue, "w1", "w2")
    await let_pass(queue, 0.3 * LEASE_S)
    assert await beat(first) == ()
    await let_pass(queue, 0.8 * LEASE_S)
    assert await beat(first) == ()
    assert await first.claim(9) == []
    assert await beat(second) == ()


async def test_a_worker_that_does_not_return_from_an_outage_is_swept_a_lease_later(
    queue: Queue,
) -> None:
    first, gone = await hold_two_each(queue, "w1", "w2")
    lost = set(gone.owned)
    await let_pass(queue, 2 * LEASE_S)
    found: list[Delivery] = []
    for _ in range(6):
        assert await beat(first) == ()
        assert found == []
        found = await first.claim(9)
        await let_pass(queue, LEASE_S / 5)
    assert {delivery.job_id for delivery in found} == lost


async def test_a_new_worker_takes_a_dead_worker_s_jobs_at_once(queue: Queue) -> None:
    """A long time without sweeps is no outage when no live worker was there to sweep."""
    (dead,) = await hold_two_each(queue, "w1")
    await let_pass(queue, 2 * LEASE_S)
    found = await queue.worker("w2", lease_s=LEASE_S).claim(9)
    assert {delivery.job_id for delivery in found} == set(dead.owned)


async def test_sweeps_less_frequent_than_leases_do_not_count_as_an_outage(queue: Queue) -> None:
    living, dead = (queue.worker(name, lease_s=LEASE_S, sweep_s=LEASE_S) for name in ("w1", "w2"))
    await queue.submit()
    assert len(await dead.claim(1)) == 1
    found = await living.claim(1)
    for _ in range(10):
        assert found == []
        await let_pass(queue, LEASE_S / 5)
        await beat(living)
        found = await living.claim(1)
        if found:
            break
    assert len(found) == 1
