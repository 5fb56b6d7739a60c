"""The client for an event loop: the methods of Client as coroutines. All streams share one
connection.

async with AsyncClient("redis://localhost:6379/0", queue="smollm2-135m-instruct") as client:
    job = await client.submit(prompt="Once upon a time", max_tokens=64)
    async for chunk in client.stream(job):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import redis.asyncio

from tokenmill.base import ClientBase, check_open, one_job
from tokenmill.errors import ConfigurationError, JobFailed, QueueUnavailable
from tokenmill.operations import jobs as job_operations
from tokenmill.operations import overview as queue_overview
from tokenmill.operations import queue as queue_operations
from tokenmill.operations.async_driver import AsyncIODriver
from tokenmill.operations.io_requests import (
    ClientOptions,
    Operation,
)
from tokenmill.operations.overview import QueueState
from tokenmill.operations.queue import DeadJob
from tokenmill.operations.records import JobInfo, QueueDepth
from tokenmill.operations.retry_window import is_served
from tokenmill.operations.submit import JobHandle, as_score, submit
from tokenmill.operations.tracing import producing
from tokenmill.transport import scripts
from tokenmill.transport.async_pubsub import PubSubMultiplexer
from tokenmill.transport.connect import connect_async
from tokenmill.transport.refusals import TRANSLATED
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult, JobStatus

if TYPE_CHECKING:
    from tokenmill.sql import SqlResults

T = TypeVar("T")

_COMMANDS_AT_ONCE = 32  # limits the connections too: thousands of tasks may wait or stream at once


class AsyncClient(ClientBase):
    """A client of one queue, for one event loop: the loop in which it is first used. Client
    describes the arguments. Clients that are given one `SqlResults` share its connections; their
    caller closes it.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        queue: str,
        database: str | SqlResults | None = None,
        prefix: str = "tm:",
        options: ClientOptions | None = None,
        redis_client: redis.asyncio.Redis | None = None,
    ) -> None:
        super().__init__(url, queue, database, prefix, options or ClientOptions())
        self._redis = redis_client or connect_async(url, self._options.link)
        self._multiplexer = PubSubMultiplexer(self._redis, self._look)
        self._limiter = asyncio.Semaphore(_COMMANDS_AT_ONCE)
        self._loop: asyncio.AbstractEventLoop | None = None

    # ── jobs ──

    async def submit(self, request: JobRequest | None = None, **arguments: Any) -> JobHandle:
        """Submit one job and return its id; see Client.submit."""
        return (await self.submit_many([one_job(request, arguments)]))[0]

    async def submit_many(self, jobs: Iterable[JobRequest | Mapping[str, Any]]) -> list[JobHandle]:
        """Submit many jobs in few round trips; see Client.submit_many."""
        with producing(self.queue, await self.perform(self._requests(jobs))) as requests:
            return self._noted(await self.perform(submit(self._context, requests)))

    def stream(
        self, job: str, *, starting_after: str | int = 0, timeout: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yield every chunk of a job once and in order; see Client.stream.

        If you leave the stream early, call `aclose` on it to end its subscription at once.
        """
        return _each(self.batches(job, starting_after=starting_after, timeout=timeout))

    def batches(
        self, job: str, *, starting_after: str | int = 0, timeout: float | None = None
    ) -> AsyncGenerator[Sequence[Chunk], None]:
        """Yield the chunks of a job as `stream` does, each time all that are there, at most
        MOST_AT_ONCE.
        """
        starting_after = job_operations.check_starting_after(starting_after)
        return self._driver().batches(
            job_operations.follow(self._context, str(job), starting_after, timeout)
        )

    async def result(
        self, job: str, timeout: float | None = None, *, check: bool = False
    ) -> JobResult:
        """Wait until a job has ended and return its result; see Client.result."""
        result = await self.perform(job_operations.wait(self._context, str(job), timeout))
        if check and result.status is not JobStatus.SUCCEEDED:
            raise JobFailed(result)
        return result

    async def score(
        self,
        continuations: Sequence[str | Sequence[int]],
        *,
        timeout: float | None = None,
        **arguments: Any,
    ) -> JobResult:
        """Score continuations of one prompt; see Client.score."""
        job = await self.submit(**as_score(continuations, arguments))
        return await self.result(job, timeout, check=True)

    async def status(self, job: str) -> JobInfo:
        return await self.perform(job_operations.status(self._context, str(job)))

    async def request(self, job: str, tenant: str | None = None) -> JobRequest | None:
        """Return the request of a job that has not ended; see Client.request."""
        return await self.perform(job_operations.request(self._context, str(job), tenant))

    async def cancel(self, job: str) -> str:
        """Cancel a job; see Client.cancel."""
        return await self.perform(job_operations.cancel(self._context, str(job)))

    # ── the queue ──

    async def list(
        self, status: JobStatus | str | None = None, limit: int = 100
    ) -> Sequence[JobInfo]:
        """List the jobs that have not ended, and dead jobs; see Client.list."""
        wanted = queue_operations.wanted_status(status)
        return await self.perform(queue_operations.jobs(self._context, wanted, limit))

    async def depth(self) -> QueueDepth:
        return await self.perform(queue_operations.depth(self._context))

    async def overview(self) -> QueueState:
        """Return the state of the queue; see Client.overview."""
        return await self.perform(queue_overview.overview(self._context))

    async def is_served(self) -> bool:
        """Return whether a worker has ever served this queue; it may be away now."""
        return await self.perform(is_served(self._context))

    async def workers(self) -> Sequence[WorkerStatus]:
        return await self.perform(queue_operations.workers(self._context))

    async def dead(self, limit: int = 100) -> Sequence[DeadJob]:
        return await self.perform(queue_operations.dead(self._context, limit))

    async def redrive(self, jobs: Sequence[str] | None = None, limit: int = 100) -> Sequence[str]:
        """Return dead jobs to the queue; see Client.redrive."""
        return await self.perform(queue_operations.redrive(self._context, jobs, limit))

    async def set_limits(
        self,
        tenant: str = "*",
        *,
        rate: float | None = None,
        burst: float | None = None,
        concurrency: int | None = None,
        weight: float | None = None,
    ) -> None:
        """Set the limits of a tenant; see Client.set_limits."""
        limits = {"rate": rate, "burst": burst, "concurrency": concurrency, "weight": weight}
        await self.perform(queue_operations.set_limits(self._context, tenant, limits))

    async def set_queue_limit(self, limit: int) -> None:
        await self.perform(queue_operations.set_queue_limit(self._context, limit))

    async def close(self) -> None:
        """Close the client for good. Calls and streams in progress end with ClientClosed."""
        self._check_loop()
        self.is_closed = True
        await self._multiplexer.close()
        await self._redis.aclose()
        if self.has_database:
            await asyncio.to_thread(self._close_results)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    # ── running operations ──

    def _check(self) -> None:
        """Raise ClientClosed after `close`, and ConfigurationError in another event loop."""
        check_open(self)
        self._check_loop()

    def _check_loop(self) -> None:
        """Raise ConfigurationError in another event loop than the first: the connections belong to
        that one.
        """
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise ConfigurationError(
                "this AsyncClient was used in another event loop: make one in each (asyncio.run "
                "makes a loop)"
            )

    def _driver(self) -> AsyncIODriver:
        return AsyncIODriver(self, self._redis, self._multiplexer, self._limiter, self._check)

    async def perform(self, operation: Operation[T]) -> T:
        """Run an operation that emits no values, and return its result: a generator that yields IO
        requests. Modules that extend the client beyond its own methods use this.
        """
        driver = self._driver()
        try:
            request = driver.step(operation)
            while request is not None:
                await driver.perform(request)
                request = driver.step(operation)
            value: T = driver.value
            return value
        finally:
            operation.close()
            await driver.close()

    async def _look(self, channels: Sequence[bytes]) -> Sequence[bytes]:
        """Return the state of each channel's job; see lua/look.lua. Raises QueueUnavailable."""
        jobs = [channel.rpartition(b":")[2] for channel in channels]
        try:
            async with self._limiter:
                states: Sequence[bytes] = await scripts.call_async(
                    self._redis, scripts.LOOK, *self.script_head, *jobs
                )
        except TRANSLATED as error:
            raise QueueUnavailable(str(error)) from error
        return states


async def _each(batches: AsyncGenerator[Sequence[Chunk], None]) -> AsyncGenerator[Chunk, None]:
    async with aclosing(batches):
        async for batch in batches:
            for chunk in batch:
                yield chunk
