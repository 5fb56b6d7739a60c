"""A queue and a worker in memory, for the tests of a backend: the real clients and scripts, without
a server.

    with InMemoryQueue() as queue:
        queue.answer("The sky is blue.", failure("engine_error", "the device is gone"))
        backend = YourBackend(client=queue.client())        # or queue.async_client()
        ...
        assert queue.requests[0].params.max_tokens == 64

The clients are Client and AsyncClient on an in-memory Redis (fakeredis, the extra `testing`). A
thread acts as the worker and gives each job the scripted answer. There is no model, no SQL and no
lease: only scripted failures occur, and answers that break the JSON schema of their request.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, TypeAlias

from tokenmill.async_client import AsyncClient
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError
from tokenmill.operations.io_requests import ClientOptions
from tokenmill.testing.answers import Answer, SimulatedJob, failure
from tokenmill.transport.scripts import COMMON, call, load_script
from tokenmill_schemas.codec import decode_request, encode
from tokenmill_schemas.job import PRIORITY_ORDER, JobRequest
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobResult, JobStatus

IN_MEMORY_WORKER = load_script(COMMON, ("tokenmill", "in_memory_worker"))
WORKER_ID = "in-memory"
_POLL_S = 0.005
_IDLE_S = 0.05

Reply: TypeAlias = str | Answer


class InMemoryQueue:
    """A queue in memory with a worker thread.

    `default` answers jobs without a scripted answer: a text, an Answer, or a function of the
    request. `requests` lists the jobs in the order in which they started. Leaving the context ends
    the thread and closes the clients.
    """

    def __init__(
        self, queue: str = "test", *, default: Reply | Callable[[JobRequest], Reply] = "ok"
    ) -> None:
        try:
            import fakeredis
        except ImportError as error:
            raise ConfigurationError(
                "the in-memory queue needs fakeredis: "
                "pip install '.[testing]' in tokenmill's folder, './api_client[testing]' for the "
                "light client"
            ) from error
        self._fakeredis: Any = fakeredis
        self._server = fakeredis.FakeServer()
        self._redis: Any = fakeredis.FakeRedis(server=self._server, protocol=2)
        self._keys = Keys(queue)
        self._default = default
        self._said: list[Reply] = []
        self._open = threading.Event()
        self._open.set()
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._opened: list[Client] = []
        self._thread = threading.Thread(target=self._run, name="in-memory-worker", daemon=True)
        self.requests: list[JobRequest] = []

    # ── for the test ──

    def client(self, options: ClientOptions | None = None) -> Client:
        connection = self._fakeredis.FakeRedis(server=self._server, protocol=2)
        client = Client(
            queue=self._keys.queue,
            options=options or ClientOptions(idle_s=_IDLE_S),
            redis_client=connection,
        )
        self._opened.append(client)
        return client

    def async_client(self, options: ClientOptions | None = None) -> AsyncClient:
        """Return a client bound to the event loop that uses it; close it in that loop."""
        connection = self._fakeredis.FakeAsyncRedis(server=self._server, protocol=2)
        return AsyncClient(
            queue=self._keys.queue,
            options=options or ClientOptions(idle_s=_IDLE_S),
            redis_client=connection,
        )

    def answer(self, *replies: Reply) -> None:
        """Script the answers of the next jobs, one each, in the order in which the jobs start."""
        self._said += replies

    def hold(self) -> None:
        """Stop starting jobs, and pause answers at their `hold_after`, until `release`."""
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the queue inside the block."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def __enter__(self) -> Self:
        self._redis.hset(self._keys.meta, "served", 1)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        for client in self._opened:
            client.close()
        self._redis.close()
        if self._error is not None and error is None:
            raise self._error

    # ── the worker ──

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        # an error in the test's own function, raised when the context is left
        except BaseException as error:
            self._error = error

    async def _serve(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.TaskGroup() as group:
            while not self._stop.is_set():
                self._call("promote", "")
                self._end_waiting()
                for job_id in self._queued() if self._open.is_set() else ():
                    packed = self._call("take", job_id, WORKER_ID)
                    if packed:
                        tasks.append(group.create_task(self._perform(decode_request(packed))))
                await asyncio.sleep(_POLL_S)
            for task in tasks:
                task.cancel()

    def _queued(self) -> Iterator[str]:
        for priority in PRIORITY_ORDER:
            tenants = [
                name.decode()
                for name in self._redis.zrange(self._keys.fair_shares(priority), 0, -1)
            ]
            for tenant in dict.fromkeys(["", *tenants]):
                for _, fields in self._redis.xrange(self._keys.tenant_stream(priority, tenant)):
                    yield fields[b"job"].decode()

    def _end_waiting(self) -> None:
        """Record the jobs that were cancelled while they waited."""
        for packed in self._redis.zrange(self._keys.unrecorded_ends, 0, -1):
            job_id = packed.decode()
            state = JobStatus(self._redis.hget(self._keys.job(job_id), "state").decode())
            self._finish(JobResult(job_id=job_id, status=state, finished_ms=_now_ms()))

    async def _perform(self, request: JobRequest) -> None:
        self.requests.append(request)
        job = SimulatedJob(request, self._reply_to(request), WORKER_ID, started_ms=_now_ms())
        await asyncio.sleep(job.answer.delay_s)
        for chunk in job.chunks():
            if self._is_over_time(request):
                break
            publishes = "1" if request.stream else "0"
            if self._call(
                "append", request.job_id, str(job.num_generated), encode(chunk), publishes
            ):
                job.cancel()
                break
            if job.is_held:
                await self._until_open(request.job_id, job)
            await asyncio.sleep(job.answer.pause_s)
        if self._is_over_time(request):
            job.expire()
        self._finish(job.result(_now_ms()), job.num_choices)

    async def _until_open(self, job_id: str, job: SimulatedJob) -> None:
        """Return after `release`, or when the job is cancelled."""
        while not self._open.is_set():
            if self._redis.hexists(self._keys.job(job_id), "cancel"):
                job.cancel()
                return
            await asyncio.sleep(_POLL_S)

    def _reply_to(self, request: JobRequest) -> Reply:
        if self._said:
            return self._said.pop(0)
        return self._default(request) if callable(self._default) else self._default

    def _is_over_time(self, request: JobRequest) -> bool:
        return request.deadline_ms is not None and request.deadline_ms <= _now_ms()

    def _finish(self, result: JobResult, num_choices: int = 1) -> None:
        last = SimulatedJob.last_chunk(result, num_choices)
        self._call("finish", result.job_id, result.status.value, encode(result), encode(last))

    def _call(self, *arguments: str | bytes) -> Any:
        return call(
            self._redis, IN_MEMORY_WORKER, self._keys.meta, self._keys.base, "PUBLISH", *arguments
        )


def _now_ms() -> int:
    return round(time.time() * 1000)


__all__ = ["Answer", "InMemoryQueue", "Reply", "failure"]
