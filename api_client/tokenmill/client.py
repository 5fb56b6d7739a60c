"""The client for threads and scripts: submits jobs, streams their tokens and fetches results.

    with Client("redis://localhost:6379/0", queue="smollm2-135m-instruct") as client:
        job = client.submit(prompt="Once upon a time", max_tokens=64)
        for chunk in client.stream(job):
            print(chunk.text, end="")

A client may be shared between threads. Its own threads only look results up in SQL.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import redis

from tokenmill.base import ClientBase, check_open, one_job
from tokenmill.errors import JobFailed, TokenmillError
from tokenmill.operations import jobs as job_operations
from tokenmill.operations import overview as queue_overview
from tokenmill.operations import queue as queue_operations
from tokenmill.operations.io_requests import (
    ClientOptions,
    Commands,
    Emit,
    IORequest,
    Operation,
    QueryDatabase,
    Receive,
    RunScript,
    ServerTime,
    Sleep,
    StreamMessages,
    Subscribe,
)
from tokenmill.operations.overview import QueueState
from tokenmill.operations.queue import DeadJob
from tokenmill.operations.records import JobInfo, QueueDepth
from tokenmill.operations.retry_window import is_served
from tokenmill.operations.submit import JobHandle, as_score, submit
from tokenmill.operations.tracing import producing
from tokenmill.transport import scripts
from tokenmill.transport.connect import connect
from tokenmill.transport.refusals import TRANSLATED, translate
from tokenmill.transport.sync_pubsub import Signal, Subscription
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult, JobStatus

T = TypeVar("T")


class Client(ClientBase):
    """A client of one queue, for threads and scripts.

    Args:
        url: of the Redis server: redis://, rediss://, unix://, redis+sentinel:// or
            redis+cluster://. Nothing is sent before the first call.
        queue: name of the queue.
        database: URL of the database in which results are looked up when Redis no longer has them;
            needs the extra `sql`.
        prefix: the prefix of all keys in Redis.
        options: timeouts, retries and limits; see ClientOptions.
        redis_client: a client to use in place of a new connection to `url`.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        queue: str,
        database: str | None = None,
        prefix: str = "tm:",
        options: ClientOptions | None = None,
        redis_client: redis.Redis | None = None,
    ) -> None:
        super().__init__(url, queue, database, prefix, options or ClientOptions())
        self._redis = redis_client or connect(url, self._options.link)

    # ── jobs ──

    def submit(self, request: JobRequest | None = None, **arguments: Any) -> JobHandle:
        """Submit one job and return its id.

        Pass either a JobRequest, or its fields and those of SamplingParams by their names.
        `deadline` and `not_before` replace the `_ms` fields: `deadline` is in seconds from now and
        `not_before` a Unix time; both also accept a datetime or a timedelta from now.

        Raises InvalidRequest with all problems of the request, QueueFull, RateLimited,
        IdempotencyConflict or QueueUnavailable.
        """
        return self.submit_many([one_job(request, arguments)])[0]

    def submit_many(self, jobs: Iterable[JobRequest | Mapping[str, Any]]) -> list[JobHandle]:
        """Submit many jobs in few round trips and return their ids in the same order.

        Each round trip stores all of its jobs or none. If the queue refuses one (QueueFull,
        RateLimited), the exception's `accepted` has the ids of the jobs stored before it.
        """
        with producing(self.queue, self.perform(self._requests(jobs))) as requests:
            return self._noted(self.perform(submit(self._context, requests)))

    def stream(
        self, job: str, *, starting_after: str | int = 0, timeout: float | None = None
    ) -> Iterator[Chunk]:
        """Yield every chunk of a job once and in order, up to its last chunk.

        The job may have started or ended long ago. A broken connection is opened again.

        Args:
            job: id of the job.
            starting_after: `position` of the last chunk that you have; with one choice, a number of
                tokens also works.
            timeout: seconds without a new chunk after which ResultTimeout is raised. Time that the
                caller spends between two chunks does not count. None: no limit.
        """
        starting_after = job_operations.check_starting_after(starting_after)
        return self._drive(job_operations.follow(self._context, str(job), starting_after, timeout))

    def result(self, job: str, timeout: float | None = None, *, check: bool = False) -> JobResult:
        """Wait until a job has ended and return its result.

        Args:
            job: id of the job.
            timeout: seconds after which ResultTimeout is raised. None: no limit.
            check: raise JobFailed unless the job succeeded.
        """
        result = self.perform(job_operations.wait(self._context, str(job), timeout))
        if check and result.status is not JobStatus.SUCCEEDED:
            raise JobFailed(result)
        return result

    def score(
        self, continuations: Sequence[str | Sequence[int]], *, timeout: float | None = None,
        **arguments: Any,
    ) -> JobResult:  # fmt: skip
        """Score continuations (texts, or token ids) of one prompt; wait for the result.

        Its choice i is continuation i, with the log-probability of each token, and their sum
        `total_logprob`. Nothing is drawn. `timeout` is that of `result`, `arguments` are those of
        `submit`. Raises JobFailed, and what these two raise.
        """
        job = self.submit(**as_score(continuations, arguments))
        return self.result(job, timeout, check=True)

    def status(self, job: str) -> JobInfo:
        return self.perform(job_operations.status(self._context, str(job)))

    def request(self, job: str, tenant: str | None = None) -> JobRequest | None:
        """Return what a job was submitted with, while it waits or runs; None after its end, for an
        unknown job, and with `tenant` for another tenant's.
        """
        return self.perform(job_operations.request(self._context, str(job), tenant))

    def cancel(self, job: str) -> str:
        """Cancel a job. Repeating the call is safe.

        Returns "cancelled" if the job was waiting and has ended now; "cancelling" if it is running
        and will stop within a step, or if it ran before and its next worker will end it; else the
        state in which the job had ended already.
        """
        return self.perform(job_operations.cancel(self._context, str(job)))

    # ── the queue ──

    def list(self, status: JobStatus | str | None = None, limit: int = 100) -> Sequence[JobInfo]:
        """List the jobs that have not ended, and dead jobs: running jobs first, then by class and
        age.

        Args:
            status: list only jobs of this state. None: all.
            limit: the largest number of jobs to return.
        """
        wanted = queue_operations.wanted_status(status)
        return self.perform(queue_operations.jobs(self._context, wanted, limit))

    def depth(self) -> QueueDepth:
        return self.perform(queue_operations.depth(self._context))

    def overview(self) -> QueueState:
        """Return the state of the queue: backlog, tenants, counters and live workers."""
        return self.perform(queue_overview.overview(self._context))

    def is_served(self) -> bool:
        """Return whether a worker has ever served this queue; it may be away now."""
        return self.perform(is_served(self._context))

    def workers(self) -> Sequence[WorkerStatus]:
        return self.perform(queue_operations.workers(self._context))

    def dead(self, limit: int = 100) -> Sequence[DeadJob]:
        return self.perform(queue_operations.dead(self._context, limit))

    def redrive(self, jobs: Sequence[str] | None = None, limit: int = 100) -> Sequence[str]:
        """Return dead jobs to the queue, and return the ids of those that were: the given jobs, or
        with None the oldest dead ones. `limit` is the largest number of jobs.
        """
        return self.perform(queue_operations.redrive(self._context, jobs, limit))

    def set_limits(
        self,
        tenant: str = "*",
        *,
        rate: float | None = None,
        burst: float | None = None,
        concurrency: int | None = None,
        weight: float | None = None,
    ) -> None:
        """Set the limits of a tenant. Values that are None stay as they are; 0 removes a limit.

        Args:
            tenant: name of the tenant; "*" sets the limits of every tenant without its own.
            rate: jobs a second that the tenant may submit.
            burst: jobs that the tenant may submit at once before `rate` limits it.
            concurrency: jobs of the tenant that may run at once.
            weight: share of the tenant in relation to the others.
        """
        limits = {"rate": rate, "burst": burst, "concurrency": concurrency, "weight": weight}
        self.perform(queue_operations.set_limits(self._context, tenant, limits))

    def set_queue_limit(self, limit: int) -> None:
        """Set how many jobs of each priority may wait before submit raises QueueFull; 0 removes
        the limit.

        Scheduled jobs do not count before they are due.
        """
        self.perform(queue_operations.set_queue_limit(self._context, limit))

    def close(self) -> None:
        """Close the client for good. Calls and streams in other threads end with ClientClosed."""
        self.is_closed = True
        self._redis.close()
        self._close_results()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── running operations ──

    def perform(self, operation: Operation[T]) -> T:
        """Run an operation that emits no values, and return its result: a generator that yields IO
        requests. Modules that extend the client beyond its own methods use this.
        """
        driver = self._drive(operation)
        while True:
            try:
                next(driver)
            except StopIteration as end:
                value: T = end.value
                return value

    def _drive(self, operation: Operation[T]) -> Generator[Any, None, T]:
        driver = IODriver(self, self._redis)
        answer: Any = None
        trouble: TokenmillError | None = None
        try:
            while True:
                try:
                    request = (
                        operation.throw(trouble) if trouble is not None else operation.send(answer)
                    )
                except StopIteration as end:
                    value: T = end.value
                    return value
                answer, trouble = None, None
                if isinstance(request, Emit):
                    yield request.value
                    continue
                try:
                    if isinstance(request, StreamMessages):
                        while (
                            values := request.values_of(answer := driver.receive(request.timeout))
                        ) is not None:
                            yield from values
                            request.on_taken()
                    else:
                        answer = driver.perform(request)
                except Exception as error:
                    # if another thread closed the client, redis-py raises arbitrary errors
                    check_open(self)
                    if not isinstance(error, TRANSLATED):
                        raise
                    trouble = translate(error)
        finally:
            operation.close()
            driver.close()


class IODriver:
    """Executes the IO requests of one operation, and owns the subscription that it opens."""

    def __init__(self, client: Client, connection: redis.Redis) -> None:
        self._client = client
        self._redis = connection
        self._subscription: Subscription | None = None

    def perform(self, request: IORequest) -> Any:
        check_open(self._client)
        match request:
            case RunScript(script, arguments):
                return scripts.call(self._redis, script, *self._client.script_head, *arguments)
            case Commands(commands, tolerant):
                return self._commands(commands, tolerant)
            case Subscribe(channel):
                self.close()
                self._subscription = Subscription(self._redis, channel)
                return None
            case Receive(timeout, _):
                return self.receive(timeout)
            case QueryDatabase(job_id):
                look_ups = self._client.look_ups
                return look_ups.find(job_id) if self._client.has_database else None
            case ServerTime():
                return self._client.clock.refresh(self._redis, self._client.keys.meta)
            case Sleep(seconds):
                return time.sleep(seconds)
        raise TypeError(f"no such IO request: {request!r}")

    def receive(self, timeout: float) -> bytes | Signal | None:
        assert self._subscription is not None, "an operation subscribes before it receives"
        return self._subscription.receive(timeout)

    def _commands(
        self, commands: Sequence[tuple[scripts.Argument, ...]], tolerant: bool
    ) -> Sequence[Any]:
        if not commands:
            return []
        if len(commands) == 1 and not tolerant:
            execute: Any = self._redis.execute_command
            return [execute(*commands[0])]
        pipeline: Any
        with self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: Sequence[Any] = pipeline.execute(raise_on_error=not tolerant)
        return replies

    def close(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None
        # closed meanwhile: connections returned to the pool since are open
        if self._client.is_closed:
            self._redis.close()
