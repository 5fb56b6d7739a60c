"""Jobs whose hash is gone: reported as lost by the server, each once, and counted nowhere else."""

import logging

import pytest

from tests.support.queue import Queue, appended, end_of, token
from tokenmill.errors import JobNotFound
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import Priority
from tokenmill_worker.jobs import AppendReply, JobObserver
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = pytest.mark.redis


class Losses(JobObserver):
    """A worker's reports: the log lines, and the numbers that its metric gets."""

    def __init__(self, worker: JobStream, log: pytest.LogCaptureFixture) -> None:
        self.counted: list[int] = []
        self.refusals: list[tuple[str, int]] = []
        self._log = log
        worker.observer = self

    def lost_by_server(self, count: int) -> None:
        self.counted.append(count)

    def refused(self, call: str, count: int) -> None:
        self.refusals.append((call, count))

    @property
    def jobs(self) -> list[str]:
        lines = [record.getMessage() for record in self._log.records]
        return [line.split()[1] for line in lines if "is lost by the server" in line]


@pytest.fixture
def worker(queue: Queue) -> JobStream:
    return queue.worker()


@pytest.fixture
def losses(worker: JobStream, caplog: pytest.LogCaptureFixture) -> Losses:
    caplog.set_level(logging.INFO)
    return Losses(worker, caplog)


def beat() -> WorkerStatus:
    return WorkerStatus(worker_id="w1")


async def running(queue: Queue, tenant: str = "t") -> tuple[int, int]:
    """Return the jobs that run, of the queue and of a tenant, as the server counts them."""
    return (await queue.client.depth()).running, int(
        await queue.redis.hget(queue.keys.tenant(tenant), "running") or 0
    )


async def test_a_running_job_whose_hash_is_deleted_is_lost_and_no_longer_counted(
    queue: Queue, worker: JobStream, losses: Losses
) -> None:
    gone, kept = [await queue.submit(tenant="t") for _ in range(2)]
    await worker.claim(2)
    assert await running(queue) == (2, 2)
    await queue.redis.delete(queue.keys.job(gone))
    reply = await worker.heartbeat(beat())
    assert reply.lost == (gone,)
    assert (losses.jobs, losses.counted) == ([gone], [1])
    assert await running(queue) == (1, 1)
    assert set(worker.owned) == {kept}
    assert (await worker.heartbeat(beat())).lost == ()
    assert losses.counted == [1], "once"


async def test_a_tenant_at_its_limit_runs_again_after_its_job_was_lost(
    queue: Queue, worker: JobStream, losses: Losses
) -> None:
    await queue.client.set_limits("t", concurrency=1)
    lost = await queue.submit(tenant="t")
    await worker.claim(1)
    await queue.redis.delete(queue.keys.job(lost))
    await worker.heartbeat(beat())
    waiting = await queue.submit(tenant="t")
    assert [each.job_id for each in await worker.claim(1)] == [waiting]


@pytest.mark.parametrize("how", ["finish", "release", "retry"])
async def test_a_tenant_at_its_limit_runs_again_after_its_lost_job_left_the_worker(
    queue: Queue, worker: JobStream, how: str
) -> None:
    """The worker forgets the job, so no heartbeat names it or its tenant."""
    await queue.client.set_limits("t", concurrency=1)
    await queue.submit(tenant="t")
    (delivery,) = await worker.claim(1)
    await queue.redis.delete(queue.keys.job(delivery.job_id))
    for _ in range(2):  # a call whose reply was lost is repeated
        if how == "finish":
            assert await worker.finish([end_of(delivery)]) == [True]
        elif how == "release":
            assert await worker.release([(delivery.job_id, delivery.token, True)]) == [False]
        else:
            assert not await worker.retry(delivery.job_id, delivery.token, 0)
    assert await running(queue) == (0, 0)
    await worker.heartbeat(beat())
    waiting = await queue.submit(tenant="t")
    assert [each.job_id for each in await worker.claim(1)] == [waiting]
    assert await running(queue) == (1, 1)


async def test_a_deleted_job_found_by_an_append_is_reported_by_the_next_heartbeat(
    queue: Queue, worker: JobStream, losses: Losses
) -> None:
    await queue.submit(tenant="t")
    (delivery,) = await worker.claim(1)
    await appended(worker, [token(delivery, 0)])
    await queue.redis.delete(queue.keys.job(delivery.job_id), queue.keys.log(delivery.job_id))
    ((word, _),) = await appended(worker, [token(delivery, 1)])
    assert word is AppendReply.GONE
    await worker.heartbeat(beat())
    assert (losses.jobs, losses.counted, losses.refusals) == ([delivery.job_id], [1], [])
    assert await running(queue) == (0, 0)


async def test_another_workers_job_is_not_reported_as_lost_by_the_server(
    queue: Queue, worker: JobStream, losses: Losses
) -> None:
    await queue.submit()
    (delivery,) = await worker.claim(1)
    await queue.redis.delete(queue.keys.worker("w1"))
    other = queue.worker("w2")
    (again,) = await other.claim(1)
    ((word, _),) = await appended(worker, [token(delivery, 0)])
    assert word is AppendReply.LOST
    await worker.heartbeat(beat())
    assert (losses.jobs, losses.counted, losses.refusals) == ([], [], [("append", 1)])
    await other.finish([end_of(again)])


async def test_every_running_job_is_reported_after_a_flushall(
    queue: Queue, worker: JobStream, losses: Losses
) -> None:
    jobs = [await queue.submit(tenant="t") for _ in range(3)]
    await worker.claim(3)
    await queue.redis.flushall()
    assert set((await worker.heartbeat(beat())).lost) == set(jobs)
    assert sorted(losses.jobs) == sorted(jobs)
    assert losses.counted == [3]
    assert await running(queue) == (0, 0)
    with pytest.raises(JobNotFound):
        await queue.client.status(jobs[0])


async def test_a_deleted_waiting_job_is_reported_by_the_claim(
    queue: Queue, worker: JobStream, losses: Losses
) -> None:
    gone, kept = await queue.submit(), await queue.submit()
    await queue.redis.delete(queue.keys.job(gone))
    assert [each.job_id for each in await worker.claim(5)] == [kept]
    assert (losses.jobs, losses.counted) == ([gone], [1])
    await worker.claim(5)
    assert losses.counted == [1]


async def test_a_deleted_returned_job_is_reported_by_the_claim(
    queue: Queue, worker: JobStream, losses: Losses
) -> None:
    job = await queue.submit()
    (delivery,) = await worker.claim(1)
    await worker.release([(job, delivery.token, False)])
    await queue.redis.delete(queue.keys.job(job))
    assert await worker.claim(5) == []
    assert (losses.jobs, losses.counted) == ([job], [1])


async def test_a_job_deleted_before_its_release_is_reported(
    queue: Queue, worker: JobStream, losses: Losses
) -> None:
    await queue.submit()
    (delivery,) = await worker.claim(1)
    await queue.redis.delete(queue.keys.job(delivery.job_id))
    assert await worker.release([(delivery.job_id, delivery.token, False)]) == [False]
    assert (losses.jobs, losses.counted, losses.refusals) == ([delivery.job_id], [1], [])


async def test_a_deleted_recorded_job_needs_no_acknowledgement(
    queue: Queue, worker: JobStream, losses: Losses
) -> None:
    """SQL has its result: nothing is lost, and no other worker owns it."""
    await queue.submit()
    (delivery,) = await worker.claim(1)
    await queue.redis.delete(queue.keys.job(delivery.job_id))
    assert await worker.finish([end_of(delivery)]) == [True]
    await worker.heartbeat(beat())
    await worker.claim(1)
    assert (losses.jobs, losses.refusals) == ([], [])
    assert (await queue.client.depth()).running == 0


@pytest.mark.parametrize("how", ["resign", "die", "lose the reply of the claim", "start again"])
async def test_a_tenant_at_its_limit_runs_again_after_its_job_was_lost_behind_its_worker(
    queue: Queue, worker: JobStream, how: str
) -> None:
    """No process knows the job, so no call names it."""
    await queue.client.set_limits("t", concurrency=1)
    gone = await queue.submit(tenant="t")
    await worker.claim(1)
    assert await running(queue) == (1, 1)
    await queue.redis.delete(queue.keys.job(gone))
    match how:
        case "resign":
            await worker.resign()
        case "die":
            await queue.redis.delete(queue.keys.worker("w1"))
            await queue.worker("w2").claim(0)  # sweeps
        case "lose the reply of the claim":
            worker._owned.clear()
            await worker.heartbeat(beat())
            await worker.claim(0)
        case "start again":
            await queue.worker("w1").open()
    assert await running(queue) == (0, 0)
    assert not await queue.redis.exists(f"{queue.keys.base}tenants")
    stream = queue.keys.tenant_stream(Priority.STANDARD, "t")
    assert await queue.redis.xlen(stream) == 1, "its entry"
    waiting = await queue.submit(tenant="t")
    assert [each.job_id for each in await queue.worker("w3").claim(1)] == [waiting]


async def test_a_released_job_is_counted_for_its_tenant_without_the_tenants_key(
    queue: Queue, worker: JobStream
) -> None:
    """Its hash names the tenant."""
    await queue.submit(tenant="t")
    (delivery,) = await worker.claim(1)
    await queue.redis.delete(f"{queue.keys.base}tenants")
    await worker.release([(delivery.job_id, delivery.token, False)])
    assert await running(queue) == (0, 0)


async def test_a_job_runs_and_ends_if_another_program_overwrote_the_tenants_key(
    queue: Queue, worker: JobStream
) -> None:
    await queue.redis.set(f"{queue.keys.base}tenants", "no hash", ex=600)
    await queue.submit(tenant="t")
    (delivery,) = await worker.claim(1)
    assert await running(queue) == (1, 1)
    assert await worker.finish([end_of(delivery)]) == [True]
    assert await running(queue) == (0, 0)


@pytest.mark.parametrize("how", ["heartbeat", "redelivery", "death", "resign"])
async def test_a_lost_job_submitted_again_under_its_id_belongs_only_to_its_new_worker(
    queue: Queue, worker: JobStream, how: str
) -> None:
    job = await queue.submit(job_id="again", tenant="t")
    await worker.claim(1)
    await queue.redis.delete(queue.keys.job(job))
    await queue.submit(job_id="again", tenant="t")
    other = queue.worker("w2")
    (delivery,) = await other.claim(1)
    match how:
        case "heartbeat":
            await worker.heartbeat(beat())
        case "redelivery":
            worker._owned.clear()
            await worker.heartbeat(beat())
            assert await worker.claim(1) == []
        case "death":
            await queue.redis.delete(queue.keys.worker("w1"))
            await queue.worker("w3").claim(0)  # sweeps
        case "resign":
            await worker.resign()
    assert await running(queue) == (1, 1)
    assert await queue.redis.hget(f"{queue.keys.base}tenants", job) == b"t"
    assert await queue.worker("w4").claim(1) == [], "it was given back"
    assert await other.finish([end_of(delivery)]) == [True]
    assert await running(queue) == (0, 0)
