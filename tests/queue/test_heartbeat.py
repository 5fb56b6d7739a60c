"""The reply to a heartbeat: cancelled and lost jobs, of those that the worker believes to own."""

import pytest

from tests.support.queue import Queue, end_of
from tokenmill_schemas.control import WorkerStatus

pytestmark = pytest.mark.redis


def status() -> WorkerStatus:
    return WorkerStatus(worker_id="w1")


async def test_a_heartbeat_replies_with_lost_and_cancelled_jobs(queue: Queue) -> None:
    kept, cancelled, lost = await queue.client.submit_many([{"prompt": "x"}] * 3)
    worker = queue.worker()
    tokens = {d.job_id: d.token for d in await worker.claim(3)}
    await queue.client.cancel(cancelled)
    await queue.redis.hset(queue.keys.job(lost), "token", "9" * 14)
    reply = await worker.heartbeat(status())
    assert (reply.cancelled, reply.lost) == ((cancelled,), (lost,))
    assert (await worker.heartbeat(status())).lost == ()
    assert set(worker.owned) == {kept, cancelled}
    await worker.release([(job, tokens[job], False) for job in (kept, cancelled)])


async def test_a_job_that_was_finished_or_returned_under_its_token_is_lost(queue: Queue) -> None:
    """The replies of finish and release did not reach the worker."""
    await queue.client.submit_many([{"prompt": "x"}] * 2)
    worker, caller = queue.worker(), queue.worker()
    finished, returned = await worker.claim(2)
    await caller.finish([end_of(finished)])
    await caller.release([(returned.job_id, returned.token, False)])
    assert set((await worker.heartbeat(status())).lost) == {finished.job_id, returned.job_id}
