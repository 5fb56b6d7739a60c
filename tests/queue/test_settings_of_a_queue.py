"""Settings of a whole queue bind its producers; settings of one worker bind its claims."""

import pytest

from tests.support.queue import Queue, end_of, token
from tokenmill import InvalidRequest
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.redis


async def test_a_request_above_the_queue_s_size_limit_is_refused_before_it_is_stored(
    queue: Queue,
) -> None:
    await queue.worker(max_payload_bytes=2_000).open()
    small = await queue.submit(prompt="x" * 1_000)
    with pytest.raises(
        InvalidRequest, match=r"the request has \d{4} bytes; the queue's limit is 2000"
    ):
        await queue.submit(prompt="x" * 2_000)
    with pytest.raises(InvalidRequest):
        await queue.client.submit_many([{"prompt": "fits"}, {"prompt": "x" * 2_000}])
    assert (await queue.client.depth()).num_queued == 1, "a refused call stores nothing"
    assert [delivery.job_id for delivery in await queue.worker().claim(5)] == [small]


async def test_a_job_beyond_its_delivery_limit_is_dead_lettered(queue: Queue) -> None:
    """The delivery limit also ends a job that progresses at each delivery; no crash count does.

    Drains and retries do not count.
    """
    job = await queue.submit(max_tokens=100)
    for round_ in range(3):
        for how in ("drained", "retried", "vanished"):
            worker = queue.worker(f"{how}-{round_}", max_deliveries=3)
            (delivery,) = await worker.claim(1)
            assert delivery.outcome == "run"
            if how == "drained":
                await worker.resign()
            elif how == "retried":
                await worker.retry(job, delivery.token, 0)
            else:
                await worker.append([token(delivery, len(delivery.log))])
                await queue.redis.delete(queue.keys.worker(worker.worker_id))
    worker = queue.worker(max_deliveries=3)
    (delivery,) = await worker.claim(0)
    assert (delivery.outcome, delivery.crashes, delivery.deliveries) == ("dead", 0, 10)
    await worker.finish([end_of(delivery, 3, JobStatus.DEAD)])
    assert await queue.client.redrive([job]) == [job]
    (again,) = await worker.claim(1)
    assert again.outcome == "run"
