"""submit: accepted once, refused clearly, whatever is repeated."""

import math
import time
from typing import Any

import msgpack
import pytest

from tests.support.queue import QUEUE, Queue, end_of
from tokenmill import (
    AsyncClient,
    Client,
    ClientOptions,
    IdempotencyConflict,
    InvalidRequest,
    QueueFull,
    RateLimited,
)
from tokenmill.operations.io_requests import Operation, RunScript
from tokenmill.operations.submit import build_request
from tokenmill.transport.scripts import SUBMIT
from tokenmill_schemas.keys import GROUP

pytestmark = pytest.mark.redis


async def test_a_stored_request_is_read_by_an_independent_decoder(queue: Queue) -> None:
    job = await queue.submit(
        prompt="Grüße", priority="bulk", tenant="acme", stop=["a", "b"], seed=7, metadata={"k": "v"}
    )
    raw = await queue.redis.hget(queue.keys.job(job), "request")
    fields = msgpack.unpackb(raw)
    assert fields["job_id"] == job
    assert fields["prompt"] == "Grüße"
    assert fields["priority"] == "bulk"
    assert fields["params"] == {"max_tokens": 10, "stop": ["a", "b"], "seed": 7}
    assert fields["metadata"] == {"k": "v"}


async def test_every_tenant_stream_is_created_with_its_group(queue: Queue) -> None:
    await queue.submit(priority="bulk", tenant="acme")
    groups = await queue.redis.xinfo_groups(f"{queue.keys.base}jobs:bulk:acme")
    assert [(group["name"], group["last-delivered-id"]) for group in groups] == [
        (GROUP.encode(), b"0-0")
    ]


async def test_a_repeated_idempotency_key_gives_the_same_job(queue: Queue) -> None:
    first = await queue.client.submit(prompt="x", idempotency_key="k", deadline=60)
    again = await queue.client.submit(prompt="x", idempotency_key="k", deadline=61)
    other_tenant = await queue.client.submit(prompt="x", idempotency_key="k", tenant="t")
    assert (first.is_new, again.is_new) == (True, False)
    assert again == first != other_tenant
    assert (await queue.client.depth()).num_queued == 2


async def test_a_repeated_idempotency_key_with_another_request_is_a_conflict(queue: Queue) -> None:
    first = await queue.submit(prompt="x", idempotency_key="k")
    with pytest.raises(IdempotencyConflict) as caught:
        await queue.submit(prompt="y", idempotency_key="k")
    assert caught.value.job_id == first


async def test_an_idempotency_key_is_kept_after_the_job_s_record_expired(queue: Queue) -> None:
    first = await queue.submit(prompt="x", idempotency_key="k")
    worker = queue.worker()
    await worker.finish([end_of(delivery) for delivery in await worker.claim(1)])
    await queue.redis.delete(queue.keys.job(first))  # as after the result's time to live
    assert await queue.submit(prompt="x", idempotency_key="k") == first


async def test_a_submit_repeated_after_a_lost_reply_stores_each_job_once(queue: Queue) -> None:
    requests = [build_request({"prompt": f"p{i}"}) for i in range(5)]
    first = await queue.client.submit_many(requests)
    again = await queue.client.submit_many(requests)
    assert first == again == [request.job_id for request in requests]
    assert (await queue.client.depth()).num_queued == 5
    assert len(await queue.worker().claim(10)) == 5


async def test_a_repeated_job_id_with_another_request_is_a_conflict(queue: Queue) -> None:
    job = await queue.submit(prompt="x")
    with pytest.raises(IdempotencyConflict):
        await queue.submit(prompt="y", job_id=job)


async def test_equal_idempotency_keys_within_one_call_make_one_job(queue: Queue) -> None:
    handles = await queue.client.submit_many([{"prompt": "x", "idempotency_key": "k"}] * 3)
    assert len(set(handles)) == 1
    assert [handle.is_new for handle in handles] == [True, False, False]


async def test_a_full_queue_refuses_the_whole_call_with_its_depth(
    queue: Queue, redis_url: str
) -> None:
    limited = AsyncClient(redis_url, queue=QUEUE, options=ClientOptions(queue_limit=3))
    await limited.submit_many([{"prompt": "x"}] * 2)
    with pytest.raises(
        QueueFull, match="holds 2 waiting standard jobs and its limit is 3"
    ) as caught:
        await limited.submit_many([{"prompt": "x"}] * 2)
    assert (caught.value.depth, caught.value.limit) == (2, 3)
    assert (await limited.depth()).num_queued == 2
    await queue.client.set_queue_limit(2)  # the queue's own limit binds every producer
    for client in (queue.client, limited):
        with pytest.raises(QueueFull, match="its limit is 2"):
            await client.submit(prompt="x")
    await limited.close()


async def test_the_queue_s_limit_applies_to_each_priority_separately(queue: Queue) -> None:
    await queue.client.set_queue_limit(3)
    for priority in ("bulk", "standard", "interactive"):
        await queue.client.submit_many([{"prompt": "x", "priority": priority}] * 3)
        with pytest.raises(QueueFull, match=f"holds 3 waiting {priority} jobs") as caught:
            await queue.submit(priority=priority)
        refusal = caught.value
        assert (refusal.depth, refusal.limit, refusal.priority) == (3, 3, priority)
        assert str(type(refusal)(*refusal.args)) == str(refusal), "as pickle makes it"
    assert (await queue.client.depth()).queued == {"bulk": 3, "standard": 3, "interactive": 3}


async def test_a_call_refused_for_a_full_priority_stores_none_of_its_jobs(queue: Queue) -> None:
    await queue.client.set_queue_limit(2)
    await queue.client.submit_many([{"prompt": "x", "priority": "bulk"}] * 2)
    with pytest.raises(QueueFull, match="waiting bulk jobs"):
        await queue.client.submit_many(
            [{"prompt": "x", "priority": priority} for priority in ("interactive", "bulk")]
        )
    assert (await queue.client.depth()).num_queued == 2


async def test_a_known_idempotency_key_is_accepted_by_a_full_queue(queue: Queue) -> None:
    first = await queue.submit(idempotency_key="k")
    await queue.client.set_queue_limit(1)
    assert await queue.submit(idempotency_key="k") == first


async def test_a_refused_call_names_the_jobs_that_earlier_calls_stored(queue: Queue) -> None:
    await queue.client.set_queue_limit(300)
    with pytest.raises(QueueFull) as caught:
        await queue.client.submit_many([{"prompt": "x"}] * 400)  # two calls of 256 and 144
    assert len(caught.value.accepted) == 256 == (await queue.client.depth()).num_queued


async def test_a_tenant_is_limited_to_its_rate_and_others_are_not(queue: Queue) -> None:
    await queue.client.set_limits("t", rate=0.05, burst=2)
    await queue.submit(tenant="t")
    await queue.submit(tenant="t")
    with pytest.raises(RateLimited) as caught:
        await queue.submit(tenant="t")
    await queue.submit(tenant="other")
    assert 0 < caught.value.retry_after <= 20
    passed_ms = math.ceil(caught.value.retry_after * 1000)
    # as if it had been waited for
    await queue.redis.hincrby(queue.keys.tenant("t"), "bucket_ms", -passed_ms)
    await queue.submit(tenant="t")


async def test_a_tenant_s_own_limits_replace_those_of_all_tenants(queue: Queue) -> None:
    await queue.client.set_limits("*", rate=0.001, burst=1)
    await queue.client.set_limits("vip", rate=1000, burst=1000)
    for _ in range(5):
        await queue.submit(tenant="vip")
    await queue.submit(tenant="t")
    with pytest.raises(RateLimited):
        await queue.submit(tenant="t")


async def test_a_job_with_not_before_is_scheduled(queue: Queue) -> None:
    job = await queue.submit(not_before=time.time() + 60)
    worker = queue.worker()
    assert await worker.claim(1) == []
    assert (await queue.client.status(job)).status == "scheduled"
    await queue.pass_delay(job)
    assert [delivery.job_id for delivery in await worker.claim(1)] == [job]


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"prompt": ""},
        {"prompt": "x", "messages": [{"role": "user", "content": "y"}]},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "priority": "urgent"},
        {"prompt": "x", "wishes": 3},
        {"prompt": "x", "deadline": "tomorrow"},
        {"prompt": "x" * (9 * 1024 * 1024)},
        {"messages": [{"role": "robot", "content": "y"}]},
        {"prompt_ids": [1, "two"]},
    ],
)
async def test_an_impossible_request_is_refused_at_submit(
    queue: Queue, bad: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await queue.client.submit(**bad)
    assert all(caught.value.problems)
    assert (await queue.client.depth()).num_queued == 0


async def test_more_jobs_than_a_burst_need_a_full_bucket_and_leave_a_debt(
    queue: Queue,
) -> None:
    await queue.client.set_limits("t", rate=10, burst=5)
    jobs = [{"prompt": "x", "tenant": "t"}] * 25
    assert len(await queue.client.submit_many(jobs)) == 25
    with pytest.raises(RateLimited) as refused:
        await queue.client.submit_many(jobs)
    assert 2.3 < refused.value.retry_after <= 2.5  # from -20 to 5, at 10 a second
    with pytest.raises(RateLimited):
        await queue.submit(tenant="t")


@pytest.mark.parametrize(
    ("argument", "value"),
    [("class", "urgent"), ("cost", "inf"), ("cost", ""), ("cost", "-1"), ("due", "soon")],
)
async def test_an_argument_refused_by_the_script_is_an_invalid_request(
    redis_url: str, argument: str, value: str
) -> None:
    """The script refuses a wrong argument, as of a producer in another language.

    The repeated call is refused too, and no job is stored.
    """
    fields = dict.fromkeys(
        ("id", "class", "tenant", "fingerprint", "key", "request", "created", "deadline"), "1"
    )
    values = fields | {"class": "bulk", "due": "0", "cost": "1", "session": ""} | {argument: value}

    def submitting() -> Operation[Any]:
        return (yield RunScript(SUBMIT, (0, 0, *values.values())))

    with Client(redis_url, queue=QUEUE) as client:
        for _ in range(2):
            with pytest.raises(
                InvalidRequest, match=rf"^{argument} of job 0 must be .*, not '{value}'$"
            ):
                client.perform(submitting())
        assert client.depth().num_queued == 0
    async with AsyncClient(redis_url, queue=QUEUE) as aclient:
        with pytest.raises(InvalidRequest, match=f"^{argument} of job 0"):
            await aclient.perform(submitting())
