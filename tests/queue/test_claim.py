"""claim: which job is next, with which data, and that none is delivered twice."""

import asyncio
from collections import Counter

import pytest

from tests.support.queue import Queue, end_of, token
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import Priority

pytestmark = pytest.mark.redis


async def test_urgent_classes_are_claimed_first_and_in_order_within_a_class(queue: Queue) -> None:
    jobs = {
        name: [await queue.submit(priority=name) for _ in range(2)]
        for name in ("bulk", "standard", "interactive")
    }
    got = [delivery.job_id for delivery in await queue.worker().claim(6)]
    assert got == jobs["interactive"] + jobs["standard"] + jobs["bulk"]


async def test_a_claim_returns_at_most_its_number_of_credits(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x"}] * 5)
    worker = queue.worker()
    assert await worker.claim(0) == []
    assert len(await worker.claim(3)) == 3
    assert len(await worker.claim(3)) == 2


async def test_urgent_credits_claim_interactive_jobs_only(queue: Queue) -> None:
    jobs = {
        name: [await queue.submit(priority=name) for _ in range(2)]
        for name in ("bulk", "standard", "interactive")
    }
    worker = queue.worker()
    assert [d.job_id for d in await worker.claim(0, urgent=1)] == jobs["interactive"][:1]
    assert [d.job_id for d in await worker.claim(2, urgent=3)] == [
        jobs["interactive"][1],
        jobs["standard"][0],
    ]
    late = [await queue.submit(priority="interactive") for _ in range(3)]
    assert [d.job_id for d in await worker.claim(1, urgent=1)] == late[:2]
    assert await worker.claim(0, urgent=0) == []
    (given_back,) = [d for d in await worker.claim(0, urgent=9) if d.job_id == late[2]]
    await worker.release([(given_back.job_id, given_back.token, False)])
    assert await worker.claim(0, urgent=0) == []
    assert [d.job_id for d in await worker.claim(0, urgent=9)] == [late[2]]
    assert len(await worker.claim(9)) == 3  # what bulk and standard were passed by is not lost


async def test_standard_and_bulk_jobs_get_a_share_beside_interactive_jobs(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x", "priority": "interactive"}] * 100)
    await queue.client.submit_many([{"prompt": "x", "priority": "standard"}] * 50)
    await queue.client.submit_many([{"prompt": "x", "priority": "bulk"}] * 50)
    worker, classes = queue.worker(), Counter[str | None]()
    for _ in range(64):  # one at a time: the share is kept over calls
        (delivery,) = await worker.claim(1)
        classes[await queue.field(delivery.job_id, "class")] += 1
    assert classes == {"bulk": 8, "standard": 15, "interactive": 41}


async def test_tenants_share_by_tokens_not_by_jobs(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x", "tenant": "big", "max_tokens": 400}] * 40)
    await queue.client.submit_many([{"prompt": "x", "tenant": "small", "max_tokens": 100}] * 60)
    worker, jobs = queue.worker(), Counter[str | None]()
    for delivery in await worker.claim(50):
        jobs[await queue.field(delivery.job_id, "tenant")] += 1
    assert jobs == {"big": 10, "small": 40}


async def test_a_late_small_tenant_does_not_wait_for_a_long_backlog(queue: Queue) -> None:
    await queue.client.submit_many([{"prompt": "x", "tenant": "hog"}] * 200)
    worker = queue.worker()
    await worker.claim(50)
    late = await queue.submit(tenant="late")
    assert late in {delivery.job_id for delivery in await worker.claim(2)}


async def test_a_tenant_earns_no_share_while_it_has_no_jobs(queue: Queue) -> None:
    """A tenant that submits one job at a time gets its share and no more."""
    await queue.client.submit_many([{"prompt": "x", "tenant": "steady"}] * 60)
    worker, served = queue.worker(), Counter[str | None]()
    for _ in range(40):
        await queue.client.submit(prompt="x", tenant="drip")
        (delivery,) = await worker.claim(1)
        served[await queue.field(delivery.job_id, "tenant")] += 1
    assert abs(served["steady"] - served["drip"]) <= 3


async def test_a_tenant_returning_to_an_empty_queue_keeps_its_served_tokens(
    queue: Queue,
) -> None:
    worker = queue.worker()
    await queue.submit(tenant="large", max_tokens=400)
    assert len(await worker.claim(2)) == 1
    last = await queue.submit(tenant="large", max_tokens=400)
    first = await queue.client.submit_many([{"prompt": "x", "tenant": "new", "max_tokens": 9}] * 3)
    assert [delivery.job_id for delivery in await worker.claim(4)] == [*first, last]


async def test_unused_tokens_do_not_turn_virtual_time_back(queue: Queue) -> None:
    """A tenant that begins now would else go before those that have waited all the time."""
    await queue.client.submit_many([{"prompt": "x", "tenant": "t", "max_tokens": 400}] * 3)
    worker, times = queue.worker(), []
    for count in (2, 1):
        deliveries = await worker.claim(count)
        times.append(float(await queue.redis.hget(queue.keys.meta, "served:standard")))
        await worker.finish([end_of(delivery, 1) for delivery in deliveries])
    assert times[0] == 400
    assert times[1] == times[0]


async def test_unused_tokens_are_returned_by_weight(queue: Queue) -> None:
    await queue.client.set_limits("gold", weight=4)
    await queue.client.submit_many([{"prompt": "x", "tenant": "gold", "max_tokens": 400}] * 2)
    worker, index = queue.worker(), queue.keys.fair_shares(Priority.STANDARD)
    (delivery,) = await worker.claim(1)
    assert await queue.redis.zscore(index, "gold") == 100
    await worker.finish([end_of(delivery, 5)])
    assert await queue.redis.zscore(index, "gold") == 2, "3 + 5 tokens"


async def test_a_job_entered_by_hand_costs_one_token(queue: Queue) -> None:
    """Their cost is unknown: each counts as one token."""
    stream = queue.keys.tenant_stream(Priority.STANDARD)
    for number in range(20):
        await queue.redis.xadd(stream, {"job": f"by-hand-{number}", "request": b"x"})
    await queue.client.submit_many([{"prompt": "x", "tenant": "t", "max_tokens": 1}] * 9)
    worker, index = queue.worker(), queue.keys.fair_shares(Priority.STANDARD)
    by_hand = [d for d in await worker.claim(20) if d.job_id.startswith("by-hand")]
    assert len(by_hand) <= 15
    charged = await queue.redis.zscore(index, "")
    await worker.finish([end_of(by_hand[0], 5)])
    assert await queue.redis.zscore(index, "") == charged - 1 + 8, "3 + 5 tokens"


async def test_tenants_share_by_their_weights(queue: Queue) -> None:
    await queue.client.set_limits("gold", weight=3)
    for tenant in ("gold", "plain"):
        await queue.client.submit_many([{"prompt": "x", "tenant": tenant}] * 60)
    served = Counter(
        [await queue.field(d.job_id, "tenant") for d in await queue.worker().claim(40)]
    )
    assert 28 <= served["gold"] <= 32


async def test_jobs_pass_a_tenant_at_its_concurrency_limit(queue: Queue) -> None:
    await queue.client.set_limits("t", concurrency=2)
    mine = await queue.client.submit_many([{"prompt": "x", "tenant": "t"}] * 5)
    other = await queue.submit(tenant="u")
    worker = queue.worker()
    got = await worker.claim(10)
    assert [d.job_id in mine for d in got].count(True) == 2
    assert other in {d.job_id for d in got}
    assert await worker.claim(10) == []
    await worker.finish([end_of(d) for d in got if d.job_id in mine][:1])
    assert len(await worker.claim(10)) == 1
    await worker.release([(got[0].job_id, got[0].token, False)])


async def test_an_empty_tenant_stream_is_deleted(queue: Queue) -> None:
    await queue.submit(tenant="acme")
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    await worker.claim(1)  # finds the stream without entries to deliver
    await worker.finish([end_of(delivery)])
    assert not await queue.redis.exists(queue.keys.tenant_stream(Priority.STANDARD, "acme"))
    assert await queue.redis.zcard(queue.keys.fair_shares(Priority.STANDARD)) == 0


async def test_a_delivery_has_payload_log_token_counts_and_times(queue: Queue) -> None:
    job = await queue.submit()
    worker = queue.worker()
    (first,) = await worker.claim(1)
    await worker.append([token(first, 0), token(first, 1)])
    await worker.release([(job, first.token, False)])
    (second,) = await queue.worker("w2").claim(1)
    assert second.token > first.token
    assert (first.deliveries, second.deliveries) == (1, 2)
    assert (second.crashes, second.attempt, second.alone, second.outcome) == (0, 1, False, "run")
    assert len(second.log) == 2
    assert second.payload == first.payload
    assert second.started_ms == first.started_ms >= first.created_ms > 0


async def test_jobs_beyond_a_full_reply_are_claimed_by_the_next_call(queue: Queue) -> None:
    jobs = await queue.client.submit_many([{"prompt": "x" * 40_000} for _ in range(5)])
    worker, stream = (
        queue.worker(max_claim_bytes=100_000),
        queue.keys.tenant_stream(Priority.STANDARD),
    )
    got = [[d.job_id for d in await worker.claim(5)]]
    assert (await queue.redis.xpending(stream, "workers"))["pending"] == 2, "none that stays behind"
    got += [[d.job_id for d in await worker.claim(5)] for _ in range(2)]
    assert [len(part) for part in got] == [2, 2, 1]
    assert sorted(job for part in got for job in part) == sorted(jobs)
    await worker.resign()
    heir = queue.worker("w2", max_claim_bytes=100_000)
    returned = [[d.job_id for d in await heir.claim(5)] for _ in range(3)]
    assert [len(part) for part in returned] == [2, 2, 1]
    restarted = queue.worker("w2", max_claim_bytes=100_000)
    for num_known in (2, 4, 5):  # each heartbeat finds the jobs that it does not know yet
        await restarted.heartbeat(WorkerStatus(worker_id="w2"))
        await restarted.claim(0)
        assert len(restarted.owned) == num_known
    assert set(restarted.owned) == set(jobs)


async def test_a_reply_of_exactly_the_allowed_size_is_returned(queue: Queue) -> None:
    jobs = await queue.client.submit_many([{"prompt": "x"}] * 2)
    sizes = [await queue.redis.hstrlen(queue.keys.job(job), "request") for job in jobs]
    assert len(await queue.worker(max_claim_bytes=sum(sizes)).claim(2)) == 2


async def test_entries_added_by_hand_are_adopted_or_dropped(queue: Queue) -> None:
    stream = queue.keys.tenant_stream(Priority.STANDARD)
    await queue.redis.xadd(stream, {"job": "by-hand", "request": b"\xc1 not msgpack"})
    await queue.redis.xadd(stream, {"job": "no-such-job"})
    await queue.redis.xadd(stream, {"something": "else"})
    await queue.redis.xadd(stream, {"job": b"\xff\xfe", "request": b"x"})
    worker = queue.worker()
    (delivery,) = await worker.claim(5)
    assert (delivery.job_id, delivery.payload) == ("by-hand", b"\xc1 not msgpack")
    assert await worker.finish([end_of(delivery)]) == [True]
    assert await queue.redis.xlen(stream) == 0
    assert (await queue.client.depth()).num_queued == 0


async def test_a_stream_keeps_nothing_of_jobs_that_ended_or_returned(queue: Queue) -> None:
    stream, worker = queue.keys.tenant_stream(Priority.STANDARD), queue.worker()
    for name in ("no-such-job", "early"):  # entries that no submit has made
        await queue.redis.xadd(stream, {"job": name})
    await queue.client.submit_many([{"prompt": "x", "job_id": name} for name in ("early", "b")])
    ended, returned = await worker.claim(2)
    await worker.finish([end_of(ended)])
    await worker.release([(returned.job_id, returned.token, False)])
    assert await queue.redis.xlen(stream) == 0
    assert (await queue.redis.xpending(stream, "workers"))["pending"] == 0


async def test_jobs_of_a_lost_claim_reply_return_with_the_next_heartbeat(queue: Queue) -> None:
    """The reply of a claim is lost: the jobs are neither lost nor another worker's."""
    job = await queue.submit()
    lossy = queue.worker("w1")
    await lossy.claim(1)
    # holds nothing in its memory, as if the reply had been lost
    restarted_view = queue.worker("w1")
    await restarted_view.heartbeat(WorkerStatus(worker_id="w1"))
    await queue.redis.sadd(queue.keys.owned("w1"), "gone")
    (again,) = await restarted_view.claim(0)
    assert (again.job_id, again.deliveries) == (job, 1)
    assert await queue.redis.smembers(queue.keys.owned("w1")) == {job.encode()}
    assert await restarted_view.claim(1) == []


async def test_concurrent_claims_never_return_the_same_job(queue: Queue) -> None:
    jobs = await queue.client.submit_many([{"prompt": "x"}] * 100)
    workers = [queue.worker(f"w{i}") for i in range(4)]
    got: list[str] = []
    while len(got) < 100:
        for part in await asyncio.gather(*(worker.claim(3) for worker in workers)):
            got += [delivery.job_id for delivery in part]
    assert sorted(got) == sorted(jobs)


async def test_workers_that_ended_leave_no_consumer_names_in_the_group(queue: Queue) -> None:
    for number in range(3):
        job = await queue.submit()
        worker = queue.worker(f"worker-{number}")
        assert [delivery.job_id for delivery in await worker.claim(1)] == [job]
    stream = queue.keys.tenant_stream(Priority.STANDARD)
    consumers = await queue.redis.xinfo_consumers(stream, "workers")
    assert [consumer["name"] for consumer in consumers] in (["all"], [b"all"])
