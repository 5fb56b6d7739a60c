"""A queue at a glance says what is there, however the jobs came to be where they are."""

import time
from collections.abc import AsyncIterator

import pytest

from tests.support.queue import Queue, close_queue, end_of, open_queue, token
from tests.support.waiting import until
from tokenmill.operations.scaling import workers_wanted
from tokenmill_schemas import Priority
from tokenmill_schemas.control import TenantLoad, WorkerStatus

pytestmark = pytest.mark.redis


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[Queue]:
    opened = await open_queue(redis_url)
    yield opened
    await close_queue(opened)


async def test_the_overview_of_an_empty_queue_has_zeros(queue: Queue) -> None:
    state = await queue.client.overview()
    assert (state.queue, state.waiting, state.running, state.dead, state.workers) == (
        "q",
        0,
        0,
        0,
        [],
    )
    assert {name: one.oldest_ms for name, one in state.classes.items()} == dict.fromkeys(
        state.classes, 0
    )


async def test_the_overview_counts_waiting_running_and_ended_jobs_separately(queue: Queue) -> None:
    for priority, tenant in (
        ("interactive", "acme"),
        ("interactive", ""),
        ("standard", "globex"),
        ("bulk", "acme"),
    ):
        await queue.submit(priority=priority, tenant=tenant)
    await queue.submit(priority="bulk", not_before=time.time() + 60)
    ended = await queue.submit(priority="bulk", tenant="acme")
    await queue.client.cancel(ended)
    worker = queue.worker()
    await worker.heartbeat(
        WorkerStatus(worker_id="w1", tenants={"acme": TenantLoad(running=2, tokens_per_s=9.5)})
    )
    (first,) = [d for d in await worker.claim(1) if d.outcome == "run"]
    state = await queue.client.overview()
    waiting = {name: one.waiting for name, one in state.classes.items()}
    # the one that waits for its time is scheduled
    assert waiting == {
        "interactive": 1,
        "standard": 1,
        "bulk": 1,
    }
    # the cancelled one is being written down
    assert (state.running, state.scheduled, state.submitted) == (
        2,
        1,
        6,
    )
    tenants = {one.tenant: (one.waiting, one.running, one.tokens_per_s) for one in state.tenants}
    assert tenants["acme"][1:] == (2, 9.5)
    assert sum(one[0] for one in tenants.values()) == 3
    assert [one.worker_id for one in state.workers] == ["w1"]
    await worker.append([token(first, 0)])
    await worker.finish([end_of(first, 1)])
    assert (await queue.client.overview()).finished == {"succeeded": 1}


async def test_the_overview_has_the_deadlines_of_some_ranks(queue: Queue) -> None:
    now = time.time()
    for number in range(9):
        await queue.submit(deadline=600 + number)
    await queue.submit()
    state = await queue.client.overview()
    assert [count for count, _ in state.deadlines] == [1, 4, 9]
    expected = [now + 600, now + 603, now + 608]
    assert [due / 1000 for _, due in state.deadlines] == pytest.approx(expected, abs=5)
    assert abs(state.now_ms / 1000 - now) < 60


async def test_jobs_of_a_later_time_need_no_worker_until_they_are_due(queue: Queue) -> None:
    await queue.submit(not_before=time.time() + 1, deadline=600)
    first = workers_wanted(await queue.client.overview())
    assert first.workers == 0

    async def is_needed() -> bool:
        return workers_wanted(await queue.client.overview()).workers == 1

    await until(is_needed)


async def test_the_age_is_of_the_first_job_that_was_never_claimed(queue: Queue) -> None:
    await queue.submit(priority="bulk", tenant="a")
    worker = queue.worker()
    await worker.claim(1)

    async def is_old(class_: str, least_ms: int) -> bool:
        return (await queue.client.overview()).classes[class_].oldest_ms >= least_ms

    assert not await is_old("bulk", 1)  # it runs
    await queue.submit(priority="bulk", tenant="a")
    await queue.submit(priority="bulk", tenant="b")
    await until(lambda: is_old("bulk", 150))
    assert not await is_old("standard", 1)
    assert len(await worker.claim(2)) == 2
    assert not await is_old("bulk", 1)


async def test_a_job_that_came_back_counts_from_its_creation(queue: Queue) -> None:
    await queue.submit(priority="interactive")
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    await worker.release([(delivery.job_id, delivery.token, False)])

    async def has_waited() -> bool:
        state = (await queue.client.overview()).classes["interactive"]
        return state.waiting == 1 and 50 <= state.oldest_ms < 3_600_000

    await until(has_waited)


async def test_a_deleted_tenant_stream_counts_as_empty(
    queue: Queue, allowed_keys: list[str]
) -> None:
    allowed_keys.append("*")
    await queue.redis.zadd(queue.keys.fair_shares(Priority.BULK), {"ghost": 0})
    state = await queue.client.overview()
    assert state.tenants == []
    assert state.waiting == 0
