"""Sessions leave the shares of tenants and classes as they are, and wake the right workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.queue.test_sessions import (
    MOST_HELD,
    busy,
    claimed,
    had_by,
    held,
    pass_time,
    two_workers,
)
from tests.queue.test_wake_ups import WakeUpReceiver, listed
from tests.support.queue import Queue
from tokenmill_schemas.job import Priority
from tokenmill_worker.queue.job_stream import LOOK_AGAIN_S

pytestmark = pytest.mark.redis


async def in_turns(queue: Queue, names: tuple[str, ...], count: int) -> list[str]:
    """Let busy workers claim one job each in turns, and return the jobs."""
    workers = [queue.worker(name) for name in names]
    jobs: list[str] = []
    while len(jobs) < count:
        for worker in workers:
            jobs += await claimed(worker, 1)
    return jobs


async def with_sessions(queue: Queue, fields: dict[str, Any], count: int) -> None:
    """Submit jobs of sessions that w1 and w2 have, and of none."""
    named = [fields | {"session": ("one", "two", "")[place % 3]} for place in range(count)]
    await queue.client.submit_many(named)


async def sharing(queue: Queue, *tenants: str) -> None:
    for name, session in (("w1", "one"), ("w2", "two")):
        for tenant in tenants:
            await had_by(queue.worker(name), queue, session, tenant=tenant)
        await busy(queue, name)


@pytest.mark.parametrize("names", [("w1",), ("w1", "w2")])
async def test_classes_have_their_shares_with_sessions(
    queue: Queue, names: tuple[str, ...]
) -> None:
    """The numbers are those of test_claim.py."""
    await sharing(queue, "")
    for priority, count in (("interactive", 100), ("standard", 50), ("bulk", 50)):
        await with_sessions(queue, {"prompt": "x", "priority": priority}, count)
    jobs = await in_turns(queue, names, 64)
    classes = Counter([await queue.field(job, "class") for job in jobs])
    assert classes == {"bulk": 8, "standard": 15, "interactive": 41}


@pytest.mark.parametrize("names", [("w1",), ("w1", "w2")])
async def test_tenants_share_by_tokens_with_sessions(queue: Queue, names: tuple[str, ...]) -> None:
    await sharing(queue, "big", "small")
    await with_sessions(queue, {"prompt": "x", "tenant": "big", "max_tokens": 400}, 40)
    await with_sessions(queue, {"prompt": "x", "tenant": "small", "max_tokens": 100}, 60)
    jobs = await in_turns(queue, names, 50)
    assert Counter([await queue.field(job, "tenant") for job in jobs]) == {"big": 10, "small": 40}


@pytest.mark.parametrize("names", [("w1",), ("w1", "w2")])
async def test_tenants_share_by_weights_with_sessions(queue: Queue, names: tuple[str, ...]) -> None:
    await sharing(queue, "gold", "t")
    await queue.client.set_limits("gold", weight=3)
    for tenant in ("gold", "t"):
        await with_sessions(queue, {"prompt": "x", "tenant": tenant, "max_tokens": 100}, 60)
    jobs = await in_turns(queue, names, 40)
    assert Counter([await queue.field(job, "tenant") for job in jobs]) == {"gold": 30, "t": 10}


async def test_a_tenant_whose_jobs_are_all_held_keeps_its_virtual_time(queue: Queue) -> None:
    await sharing(queue, "a", "b")
    await queue.submit(tenant="a", session="two", max_tokens=100)
    await with_sessions(queue, {"prompt": "x", "tenant": "b", "max_tokens": 100}, 30)
    one, other = queue.worker("w1"), queue.worker("w2")
    await one.claim(1)
    index = queue.keys.fair_shares(Priority.STANDARD)
    before = await queue.redis.zscore(index, "b")
    assert await queue.redis.zscore(index, "a") is None, "its stream is empty"
    await one.claim(9)
    (first, *_) = await claimed(other, 1)
    assert await queue.field(first, "tenant") == "a"
    assert before < await queue.redis.zscore(index, "b")


async def test_late_jobs_of_a_tenant_at_its_limit_hide_no_others(queue: Queue) -> None:
    await queue.client.set_limits("limited", concurrency=1)
    for name, session in (("w2", "s"), ("w3", "t")):
        await had_by(queue.worker(name), queue, session, tenant="limited")
        await had_by(queue.worker(name), queue, session, tenant="free")
    one = await busy(queue, "w1")
    jobs = [{"prompt": "x", "tenant": "limited", "session": "st"[n % 2]} for n in range(70)]
    await queue.client.submit_many(jobs)
    for _ in range(2):
        await one.claim(1)
    await queue.submit(tenant="free", session="s", job_id="free")
    assert len(await held(queue)) >= MOST_HELD
    found: list[str] = []
    for _ in range(8):
        await pass_time(queue)
        found += await claimed(one, 3)
    assert "free" in found


# ── wake-ups ──


async def test_a_claim_that_passed_over_jobs_looks_again_and_stays_listed(queue: Queue) -> None:
    one, _ = await two_workers(queue)
    await queue.submit(session="s")
    one.wake_up.clear()
    assert await claimed(one, 5) == []
    assert await listed(queue, queue.keys.idle_workers()) == {"w1": 5}
    await asyncio.wait_for(one.wake_up.wait(), 30)


async def test_a_claim_does_not_look_again_for_late_jobs_that_may_not_run(queue: Queue) -> None:
    await queue.client.set_limits("t", concurrency=1)
    other = queue.worker("w2")
    await had_by(other, queue, "s", tenant="t")
    one = await busy(queue, "w1")
    await queue.submit(tenant="t", session="s")
    assert await claimed(one, 5) == []
    await queue.submit(tenant="t")
    assert len(await claimed(one, 5)) == 1, "the tenant has no more"
    await pass_time(queue)
    await asyncio.sleep(2 * LOOK_AGAIN_S)
    one.wake_up.clear()
    assert await claimed(one, 5) == []
    await asyncio.sleep(2 * LOOK_AGAIN_S)
    assert not one.wake_up.is_set()


async def test_a_worker_is_woken_for_a_job_that_is_held_for_it(queue: Queue) -> None:
    one, other = await two_workers(queue)
    await queue.submit(session="s")
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open("w1", "w2")
        await queue.redis.zadd(queue.keys.idle_workers(), {"w2": 3})
        assert await claimed(one, 5) == []
        assert await receiver.received() == ["w2"]
        assert len(await claimed(other, 5)) == 1


@pytest.mark.parametrize("priority", ["standard", "interactive"])
async def test_submit_wakes_the_worker_of_the_session_and_no_other(
    queue: Queue, priority: str
) -> None:
    other = queue.worker("w2")
    await had_by(other, queue, "s")
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open("w1", "w2", "w3")
        for name, room in (("w1", 9), ("w2", 2), ("w3", 5)):
            assert await claimed(queue.worker(name), room) == []
        await queue.submit(session="s", priority=priority)
        assert await receiver.received() == ["w2"]
        assert len(await claimed(other, 2)) == 1
        jobs = [{"prompt": "x", "session": "s", "priority": priority}] * 2
        await queue.client.submit_many(jobs)
        assert await receiver.received() == ["w1", "w2", "w3"], "it has room for one of them"


async def test_submit_wakes_others_if_the_session_s_worker_has_no_room(queue: Queue) -> None:
    other = queue.worker("w2")
    await had_by(other, queue, "s")
    async with WakeUpReceiver(queue) as receiver:
        await receiver.open("w1", "w2", "w3")
        for name in ("w1", "w3"):
            assert await claimed(queue.worker(name), 5) == []
        assert await claimed(other, 0) == []
        await queue.submit(session="s")
        assert await receiver.received() == ["w1", "w3"]
