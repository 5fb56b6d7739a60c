"""Client and AsyncClient on a real server: the same calls, the same answers."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.client.testing.players import assert_chunks, playing
from tests.support.queue import QUEUE, Queue, end_of, token
from tests.support.waiting import LONG_S, until
from tokenmill import (
    AsyncClient,
    Client,
    ClientClosed,
    ClientOptions,
    ConfigurationError,
    JobFailed,
    JobNotFound,
    ResultTimeout,
)
from tokenmill.base import ClientBase
from tokenmill.errors import QueueUnavailable
from tokenmill.transport.connect import Link
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.result import JobError, JobResult, JobStatus
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.local.valkey_server import free_port

pytestmark = pytest.mark.redis


class Threaded:
    """A Client with AsyncClient's interface: each call runs in a thread."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda *args, **kwargs: asyncio.to_thread(method, *args, **kwargs)

    async def stream(self, job: str, **options: Any) -> AsyncIterator[Chunk]:
        chunks = self._client.stream(job, **options)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk


@pytest.fixture(params=["sync", "async"])
async def client(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Any]:
    options = ClientOptions(idle_s=0.5)
    if request.param == "sync":
        with Client(redis_url, queue=QUEUE, options=options) as client:
            yield Threaded(client)
    else:
        async with AsyncClient(redis_url, queue=QUEUE, options=options) as aclient:
            yield aclient


async def collect(client: Any, job: str, **options: Any) -> list[Chunk]:
    return [chunk async for chunk in client.stream(job, timeout=60, **options)]


def test_both_clients_have_the_same_calls() -> None:
    def calls(kind: type[ClientBase]) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(member).parameters)
            for name, member in inspect.getmembers(kind, callable)
            if not name.startswith("_")
        }

    of_async = calls(AsyncClient)
    del of_async["batches"]  # saves the loop a switch per chunk; threads have none
    assert calls(Client) == of_async


async def test_early_late_and_second_subscribers_get_every_token_once(
    client: Any, queue: Queue
) -> None:
    job = await client.submit(prompt="x", max_tokens=40)
    async with queue.followed(readers=2):
        early = [asyncio.create_task(collect(client, job)) for _ in range(2)]
    async with playing(queue):
        await asyncio.sleep(0.1)
        in_the_middle = await collect(client, job)
        for received in (*await asyncio.gather(*early), in_the_middle, await collect(client, job)):
            assert_chunks(received, 40)
    result = await client.result(job)
    assert (result.status, result.token_ids) == (JobStatus.SUCCEEDED, tuple(range(40)))


@pytest.mark.parametrize(
    ("options", "idle_s"), [("health_check_interval=1", 1.1), ("protocol=2", 0), ("protocol=3", 0)]
)
async def test_streams_work_with_every_setting_of_the_library_s_connections(
    queue: Queue, redis_url: str, options: str, idle_s: float
) -> None:
    """No chunk is read from the log: a reader looks there only after a long silence."""
    patient = ClientOptions(idle_s=600)
    async with AsyncClient(f"{redis_url}?{options}", queue=QUEUE, options=patient) as client:
        job = await client.submit(prompt="x", max_tokens=30)
        await asyncio.sleep(idle_s)
        async with queue.followed():
            reading = asyncio.create_task(collect(client, job))
        async with playing(queue), asyncio.timeout(LONG_S):
            assert_chunks(await reading, 30)


@pytest.mark.parametrize("moment", ["before", "during", "after"])
async def test_a_reader_with_a_position_gets_the_rest(
    client: Any, queue: Queue, moment: str
) -> None:
    job = await client.submit(prompt="x", max_tokens=30)
    if moment == "before":
        reading = asyncio.create_task(collect(client, job, starting_after=12))
    async with playing(queue):
        if moment == "during":
            await asyncio.sleep(0.1)
        if moment == "after":
            await client.result(job)
        received = await (
            reading if moment == "before" else collect(client, job, starting_after=12)
        )
    assert_chunks(received, 30, first=12)


async def test_a_stream_left_early_does_not_disturb_the_next_reader(
    client: Any, queue: Queue
) -> None:
    job = await client.submit(prompt="x", max_tokens=5)
    async with playing(queue):
        stream = client.stream(job)
        async for _ in stream:
            break
        await stream.aclose()
        assert_chunks(await collect(client, job), 5)
        assert await client.result(job, timeout=60)
    channels = await queue.redis.pubsub_channels("*chunks*")
    # a thread's generator closes with the garbage
    assert channels == [] or isinstance(client, Threaded)


async def test_status_follows_a_job_from_queued_to_its_end(client: Any, queue: Queue) -> None:
    job = await client.submit(prompt="x", priority="bulk", tenant="t")
    waiting = await client.status(job)
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    await worker.append([token(delivery, 0), token(delivery, 1)])
    running = await client.status(job)
    await client.cancel(job)
    cancelling = await client.status(job)
    await worker.finish([end_of(delivery, 2, JobStatus.CANCELLED)])
    over = await client.status(job)
    assert (waiting.status, waiting.priority, waiting.tenant) == (JobStatus.QUEUED, "bulk", "t")
    assert (running.status, running.tokens, running.worker_id) == (JobStatus.RUNNING, 2, "w1")
    assert (running.cancelling, cancelling.cancelling) == (False, True)
    assert over.status is JobStatus.CANCELLED
    assert waiting.created_ms <= running.started_ms <= over.finished_ms


async def test_the_request_of_a_job_can_be_read_until_its_end(client: Any, queue: Queue) -> None:
    job = await client.submit(prompt="x", envelope=b"shown", previous_id="before", seed=7)
    waiting = await client.request(job)
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    running = await client.request(job)
    await worker.finish([end_of(delivery, 0)])
    assert waiting == running
    assert (waiting.prompt, waiting.params.seed) == ("x", 7)
    assert (waiting.envelope, waiting.previous_id) == (b"shown", "before")
    assert (await client.request(job), await client.request("unknown")) == (None, None)


async def test_waiting_for_a_result_returns_it_or_times_out(client: Any, queue: Queue) -> None:
    job = await client.submit(prompt="x", max_tokens=10)
    with pytest.raises(ResultTimeout, match=r"not ended within 0\.2 s"):
        await client.result(job, timeout=0.2)
    with pytest.raises(ResultTimeout):
        await collect_within(client, job, 0.2)
    async with playing(queue):
        assert (await client.result(job, timeout=60)).text == "0 1 2 3 4 5 6 7 8 9 "


async def collect_within(client: Any, job: str, timeout: float) -> list[Chunk]:
    return [chunk async for chunk in client.stream(job, timeout=timeout)]


async def test_a_failed_job_is_a_result_and_raises_only_on_request(
    client: Any, queue: Queue
) -> None:
    job = await client.submit(prompt="x")
    worker = queue.worker()
    (delivery,) = await worker.claim(1)
    error = JobError("context_length_exceeded", "the prompt is too long")
    result = JobResult(job_id=job, status=JobStatus.FAILED, error=error)
    final = Chunk(job_id=job, index=0, status=JobStatus.FAILED, error=error)
    await worker.finish([FinishedJob(delivery.token, result, final)])
    assert (await client.result(job)).error == error
    (chunk,) = await collect(client, job)
    assert (chunk.status, chunk.error) == (JobStatus.FAILED, error)
    with pytest.raises(JobFailed, match="the prompt is too long"):
        await client.result(job, check=True)


async def test_calls_on_an_unknown_job_raise_job_not_found(client: Any) -> None:
    for call in (client.status, client.result, client.cancel):
        with pytest.raises(JobNotFound, match="no job nope"):
            await call("nope")
    with pytest.raises(JobNotFound):
        await collect(client, "nope")
    with pytest.raises(ConfigurationError):
        await collect(client, "nope", starting_after=-1)


async def test_jobs_and_workers_are_listed(client: Any, queue: Queue) -> None:
    waiting = await client.submit(prompt="x", tenant="t", priority="bulk")
    delayed = await client.submit(prompt="x", not_before=4e9)
    running = await client.submit(prompt="x", priority="interactive")
    cancelled = await client.submit(prompt="x")
    await client.cancel(cancelled)
    worker = queue.worker()
    await worker.heartbeat(WorkerStatus(worker_id="w1", model="m", running=1))
    claimed = [delivery.job_id for delivery in await worker.claim(1)]
    assert claimed == [cancelled, running]
    everything = {info.job_id: info.status for info in await client.list()}
    assert everything == {
        waiting: JobStatus.QUEUED,
        delayed: JobStatus.SCHEDULED,
        running: JobStatus.RUNNING,
        cancelled: JobStatus.CANCELLED,
    }
    assert [info.job_id for info in await client.list("queued")] == [waiting]
    assert [info.job_id for info in await client.list(JobStatus.RUNNING, limit=1)] == [running]
    assert [
        (status.worker_id, status.model, status.running) for status in await client.workers()
    ] == [("w1", "m", 1)]
    depth = await client.depth()
    assert (depth.queued["bulk"], depth.num_queued, depth.running, depth.scheduled) == (1, 1, 2, 1)


async def test_many_streams_of_an_event_loop_share_one_connection(
    queue: Queue, redis_url: str
) -> None:
    async with AsyncClient(redis_url, queue=QUEUE) as client, playing(queue):
        jobs = await client.submit_many([{"prompt": "x", "max_tokens": 20}] * 24)
        streams = [asyncio.create_task(collect(client, job)) for job in jobs]

        async def num_listening() -> int:
            return sum(1 for info in await queue.redis.client_list() if int(info["sub"]))

        async def is_open() -> bool:
            return await num_listening() > 0

        await until(is_open)
        assert await num_listening() == 1
        for received in await asyncio.gather(*streams):
            assert_chunks(received, 20)

        async def is_closed() -> bool:
            return await num_listening() == 0

        await until(is_closed)


async def test_a_stream_of_the_threaded_client_starts_no_thread(
    redis_url: str, queue: Queue
) -> None:
    before = threading.active_count()
    with Client(redis_url, queue=QUEUE) as client:
        job = client.submit(prompt="x")
        stream = client.stream(job, timeout=0.1)
        with pytest.raises(ResultTimeout):
            next(stream)
        assert threading.active_count() == before


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_closing_a_client_ends_calls_in_progress_and_closes_connections(
    queue: Queue, redis_url: str, kind: str
) -> None:
    options = ClientOptions(link=Link(retries=3, client_name="closing"), idle_s=15)
    client: Any = AsyncClient(redis_url, queue=QUEUE, options=options)
    if kind == "sync":
        client = Threaded(Client(redis_url, queue=QUEUE, options=options))
    job = await queue.submit()
    waiting = [
        asyncio.create_task(call(job))
        for call in (lambda job: collect(client, job), client.result) * 2
    ]

    async def num_open() -> int:
        return sum(info["name"] == "closing" for info in await queue.redis.client_list())

    async def is_open() -> bool:
        return bool(await num_open())

    await until(is_open)
    await client.close()
    async with asyncio.timeout(LONG_S):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ClientClosed] * 4
    for call in (client.status(job), client.submit(prompt="x"), collect(client, job)):
        with pytest.raises(ClientClosed, match="has been closed"):
            await call

    async def all_gone() -> bool:
        return not await num_open()

    await until(all_gone)


async def test_closing_a_client_ends_all_calls_that_are_subscribing(
    queue: Queue, redis_url: str
) -> None:
    job = await queue.submit()
    client = AsyncClient(redis_url, queue=QUEUE)
    waiting = [asyncio.create_task(client.result(job)) for _ in range(20)]
    await asyncio.sleep(0.01)
    await client.close()
    async with asyncio.timeout(LONG_S):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {ClientClosed}


async def test_an_unreachable_server_raises_at_once() -> None:
    with Client(f"redis://127.0.0.1:{free_port()}/0", queue=QUEUE) as client:
        for call in (
            lambda: client.submit(prompt="x"),
            lambda: client.result("x"),
            lambda: next(client.stream("x")),
        ):
            with pytest.raises(QueueUnavailable):
                call()
    async with AsyncClient(f"redis://127.0.0.1:{free_port()}/0", queue=QUEUE) as aclient:
        with pytest.raises(QueueUnavailable):
            await aclient.submit(prompt="x")


@pytest.mark.parametrize("name", ["", "a b", "a{b}"])
def test_a_queue_name_that_would_break_keys_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        Client(queue=name)
