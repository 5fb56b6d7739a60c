"""A job whose hash holds what no version wrote: it ends somehow, and never keeps the queue from serving the others."""

import random

import pytest

from schemas.control import WorkerStatus
from tests.consume.queue import end_of, token
from tests.fuzz.mutation import BYTES, NUMBERS, TEXTS

pytestmark = pytest.mark.redis

NUMERIC = (
    "token", "deliveries", "crashes", "solo_crashes", "orphaned", "attempt", "created_ms", "started_ms", "deadline_ms",
    "due_ms", "end", "mark", "cost",
)  # fmt: skip
OTHER = ("class", "tenant", "entry", "request", "cancel", "doomed", "worker", "history", "fingerprint", "error")
VALUES = [
    *(value for value in BYTES),
    *(str(number) for number in NUMBERS),
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
    b"nan", b"inf", b"-inf", b"1e308", b"0x10", b"1.5", b" 7 ", b"-5",
]  # fmt: skip


@pytest.mark.parametrize("field", [*NUMERIC, *OTHER])
async def test_the_others_are_served_whatever_a_field_holds(queue, field, allowed_keys):
    """Queued, running, given back and finished: each script meets the damaged job and goes on."""
    allowed_keys.append("*")  # where it says another tenant or class, its old entry may stay
    worker = queue.worker("w1")
    for place, value in enumerate(VALUES):
        name = f"bad{place}"
        await queue.submit(job_id=name, tenant="a", deadline=3600)
        await queue.redis.hset(queue.keys.job(name), field, value)
    good = await queue.submit(job_id="good", tenant="b")
    seen = {}
    for _ in range(4):
        for delivery in await worker.claim(credits=len(VALUES) + 1):
            seen[delivery.job_id] = delivery
    assert seen[good].verdict == "run"
    for delivery in seen.values():
        await queue.redis.hset(queue.keys.job(delivery.job_id), field, random.Random(field).choice(VALUES))
    await worker.append([token(delivery, 0) for delivery in seen.values()])
    await worker.heartbeat(WorkerStatus(worker_id="w1"))
    await worker.release([(delivery.job_id, delivery.token, True) for delivery in seen.values()])
    again = [delivery for _ in range(4) for delivery in await worker.claim(credits=len(VALUES) + 1)]
    await worker.finish([end_of(delivery, 1) for delivery in again])
    assert good in {delivery.job_id for delivery in again}
    fresh = await queue.submit(job_id="fresh")
    assert fresh in {delivery.job_id for _ in range(4) for delivery in await worker.claim(credits=100)}


@pytest.mark.parametrize("field", [*NUMERIC, *OTHER])
async def test_waiting_jobs_end_whatever_a_field_holds(queue, field, allowed_keys):
    """Cancelled, expired and due ones."""
    allowed_keys.append("*")
    worker = queue.worker("w1")
    for place, value in enumerate(VALUES):
        for kind, times in (("late", {"deadline": 0.001}), ("due", {"not_before": 1}), ("out", {})):
            await queue.submit(job_id=f"{kind}{place}", **times)
            await queue.redis.hset(queue.keys.job(f"{kind}{place}"), field, value)
        await queue.client.cancel(f"out{place}")
    await worker.heartbeat(WorkerStatus(worker_id="w1"))
    fresh = await queue.submit(job_id="fresh")
    claimed = {delivery.job_id for _ in range(8) for delivery in await worker.claim(credits=100)}
    assert fresh in claimed


@pytest.mark.parametrize("state", ["", "paused", "succeeded", "\xff", "dead"])
async def test_an_unknown_state_sets_a_job_aside_or_leaves_it(queue, state, allowed_keys):
    allowed_keys.append("*")
    worker = queue.worker("w1")
    odd = await queue.submit(job_id="odd")
    await queue.redis.hset(queue.keys.job(odd), "state", state)
    good = await queue.submit(job_id="good")
    claimed = {delivery.job_id: delivery for delivery in await worker.claim(credits=9)}
    assert claimed[good].verdict == "run"
    assert [info.job_id for info in await queue.client.list()] == [good]
