"""A job whose hash holds what no version wrote: it ends somehow, and never keeps the queue from
serving the others.
"""

import random

import pytest

from tests.fuzz.mutation import BYTES, NUMBERS, TEXTS
from tests.support.queue import end_of, token
from tokenmill.transport.scripts import SUBMIT, call_async
from tokenmill_schemas.codec import encode
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import JobRequest, Priority

pytestmark = pytest.mark.redis

NUMERIC = (
    "token", "deliveries", "crashes", "solo_crashes", "orphaned", "attempt", "created_ms",
    "started_ms", "deadline_ms",
    "due_ms", "mark", "cost",
)  # fmt: skip
OTHER = (
    "class",
    "tenant",
    "entry",
    "request",
    "cancel",
    "worker",
    "history",
    "fingerprint",
    "error",
)
VALUES = [
    *(value for value in BYTES),
    *(str(number) for number in NUMBERS),
    *(text.encode("utf-8", "surrogatepass") for text in TEXTS),
    b"nan", b"inf", b"-inf", b"1e308", b"0x10", b"1.5", b" 7 ", b"-5",
]  # fmt: skip


@pytest.mark.parametrize("field", [*NUMERIC, *OTHER])
async def test_a_damaged_field_of_a_job_does_not_stop_other_jobs(queue, field, allowed_keys):
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
    assert seen[good].outcome == "run"
    for delivery in seen.values():
        await queue.redis.hset(
            queue.keys.job(delivery.job_id), field, random.Random(field).choice(VALUES)
        )
    await worker.append([token(delivery, 0) for delivery in seen.values()])
    await worker.heartbeat(WorkerStatus(worker_id="w1"))
    await worker.release([(delivery.job_id, delivery.token, True) for delivery in seen.values()])
    again = [delivery for _ in range(4) for delivery in await worker.claim(credits=len(VALUES) + 1)]
    await worker.finish([end_of(delivery, 1) for delivery in again])
    assert good in {delivery.job_id for delivery in again}
    fresh = await queue.submit(job_id="fresh")
    assert fresh in {
        delivery.job_id for _ in range(4) for delivery in await worker.claim(credits=100)
    }


@pytest.mark.parametrize("field", [*NUMERIC, *OTHER])
async def test_a_waiting_job_with_a_damaged_field_ends(queue, field, allowed_keys):
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
async def test_a_job_in_an_unknown_state_is_dead_lettered_or_ignored(queue, state, allowed_keys):
    allowed_keys.append("*")
    worker = queue.worker("w1")
    odd = await queue.submit(job_id="odd")
    await queue.redis.hset(queue.keys.job(odd), "state", state)
    good = await queue.submit(job_id="good")
    claimed = {delivery.job_id: delivery for delivery in await worker.claim(credits=9)}
    assert claimed[good].outcome == "run"
    assert [info.job_id for info in await queue.client.list()] == [good]


NO_NAMES = [
    b"\xff\xfe-bad",
    b"a\xc3",
    b"\xe0\x80\x80",
    b"\xed\xa0\x80",
    b"\xf5\x80\x80\x80",
    b"x" * 256,
    b"a\0b",
    b"",
]
NAMES = ["é", "日本", "😀 and a space", "x" * 255, "\u0080\ud7ff\ue000\uffff\U00010000\U0010ffff"]


@pytest.mark.parametrize("name", NO_NAMES)
async def test_an_id_that_is_not_unicode_is_refused_and_other_jobs_are_served(
    queue, name, allowed_keys
):
    allowed_keys.append("*")
    keys, request = queue.keys, encode(JobRequest(job_id="x", prompt="hello"))
    fields = (name, "standard", "", "print", "", request, 1, 0, 0, 10, "")
    reply = await call_async(queue.redis, SUBMIT, keys.meta, keys.base, "PUBLISH", 0, 0, *fields)
    assert reply == [b"name", b"0"]
    hash_key = keys.base.encode() + b"job:" + name  # by hand
    await queue.redis.hset(
        hash_key, mapping={"state": "queued", "request": request, "entry": "1-1"}
    )
    await queue.redis.xadd(keys.tenant_stream(Priority.STANDARD), {"job": name}, id="1-1")
    await queue.redis.zadd(keys.requeued, {name: 0})
    good = await queue.submit(job_id="good")
    worker = queue.worker("w1")
    assert [delivery.job_id for delivery in await worker.claim(9)] == [good]
    assert (await worker.heartbeat(WorkerStatus(worker_id="w1"))).lost == ()


@pytest.mark.parametrize("letter", [chr(code) for code in (*range(1, 32), 127)])
async def test_a_new_id_with_a_control_character_is_refused(queue, letter):
    keys, request = queue.keys, encode(JobRequest(job_id="x", prompt="hello"))
    fields = (f"a{letter}b", "standard", "", "print", "", request, 1, 0, 0, 10, "")
    reply = await call_async(queue.redis, SUBMIT, keys.meta, keys.base, "PUBLISH", 0, 0, *fields)
    assert reply == [b"name", b"0"]
    assert await queue.redis.keys("*") == []


@pytest.mark.parametrize("name", NAMES)
async def test_an_id_may_be_any_text_of_255_bytes(queue, name):
    await queue.submit(job_id=name)
    (delivery,) = await queue.worker("w1").claim(9)
    assert delivery.job_id == name
    assert await queue.worker("w1").finish([end_of(delivery, 1)]) == [True]


async def test_a_job_key_of_another_type_does_not_stop_other_jobs(queue, allowed_keys):
    allowed_keys.append("*")
    bad = await queue.submit(job_id="bad")
    worker = queue.worker("w1")
    (delivery,) = await worker.claim(1)
    await worker.append([token(delivery, 0)])
    await worker.release([(bad, delivery.token, False)])
    await queue.redis.set(queue.keys.job(bad), "what?")
    good = await queue.submit(job_id="good")
    assert [delivery.job_id for delivery in await worker.claim(9)] == [good]
    assert (await queue.client.overview()).entries_dropped == 1
