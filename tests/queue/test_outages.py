"""No client reaches the server for longer than a lease: live workers keep the jobs they own."""

import asyncio

import pytest

from tests.support.queue import Queue
from tokenmill_schemas.control import WorkerStatus
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = pytest.mark.redis
LEASE_S = 0.5


async def beat(worker: JobStream) -> tuple[str, ...]:
    return (await worker.heartbeat(WorkerStatus(worker_id=worker.worker_id))).lost


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
    await asyncio.sleep(2 * LEASE_S)  # without a reachable server no worker sweeps
    assert await beat(first) == ()
    assert await first.claim(9) == []
    assert await beat(second) == ()
    assert (await beat(first), await beat(second)) == ((), ())
    assert len(second.owned) == 2


async def test_a_worker_with_a_valid_lease_takes_no_job_of_others_after_an_outage(
    queue: Queue,
) -> None:
    first, second = await hold_two_each(queue, "w1", "w2")
    await asyncio.sleep(0.3 * LEASE_S)
    assert await beat(first) == ()
    await asyncio.sleep(0.8 * LEASE_S)
    assert await beat(first) == ()
    assert await first.claim(9) == []
    assert await beat(second) == ()


async def test_a_worker_that_does_not_return_from_an_outage_is_swept_a_lease_later(
    queue: Queue,
) -> None:
    first, gone = await hold_two_each(queue, "w1", "w2")
    lost = set(gone.owned)
    await asyncio.sleep(2 * LEASE_S)
    assert await beat(first) == ()
    found = await first.claim(9)
    async with asyncio.timeout(20):
        while not found:
            await asyncio.sleep(LEASE_S / 5)
            await beat(first)
            found = await first.claim(9)
    assert {delivery.job_id for delivery in found} == lost


async def test_a_new_worker_takes_a_dead_worker_s_jobs_at_once(queue: Queue) -> None:
    """A long time without sweeps is no outage when no live worker was there to sweep."""
    (dead,) = await hold_two_each(queue, "w1")
    await asyncio.sleep(2 * LEASE_S)
    found = await queue.worker("w2", lease_s=LEASE_S).claim(9)
    assert {delivery.job_id for delivery in found} == set(dead.owned)


async def test_sweeps_less_frequent_than_leases_do_not_count_as_an_outage(queue: Queue) -> None:
    living, dead = (queue.worker(name, lease_s=LEASE_S, sweep_s=LEASE_S) for name in ("w1", "w2"))
    await queue.submit()
    assert len(await dead.claim(1)) == 1
    found = await living.claim(1)
    async with asyncio.timeout(20):
        while not found:
            await asyncio.sleep(LEASE_S / 5)
            await beat(living)
            found = await living.claim(1)
