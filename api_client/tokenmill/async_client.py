"""The client for an event loop: the methods of Client as coroutines. All streams share one
connection.

async with AsyncClient("redis://localhost:6379/0", queue="smollm2-135m-instruct") as client:
    job = await client.submit(prompt="Once upon a time", max_tokens=64)
    async for chunk in client.stream(job):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import redis.asyncio

from tokenmill.base import ClientBase, ClientOptions, check_open, translate
from tokenmill.errors import JobFailed, TokenmillError
from tokenmill.operations import jobs as programs
from tokenmill.operations import overview as queue_state
from tokenmill.operations import queue as queue_programs
from tokenmill.operations.io_requests import (
    Commands,
    Effect,
    Follow,
    Listen,
    LookUp,
    Program,
    Receive,
    RunScript,
    Sleep,
    Tell,
)
from tokenmill.operations.job_request import JobHandle
from tokenmill.operations.overview import QueueState
from tokenmill.operations.queue import DeadJob
from tokenmill.operations.records import JobInfo, QueueDepth
from tokenmill.operations.retry_window import is_served
from tokenmill.operations.submit import submit
from tokenmill.operations.tracing import producing
from tokenmill.transport import scripts
from tokenmill.transport.async_pubsub import ChannelHub, HubSubscription
from tokenmill.transport.cancellation import heeding_cancellation
from tokenmill.transport.connect import SERVER_TROUBLE, connect_async
from tokenmill.transport.sync_pubsub import Signal
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult, JobStatus

T = TypeVar("T")

_COMMANDS_AT_ONCE = 32  # limits the connections too: thousands of tasks may wait or stream at once


class AsyncClient(ClientBase):
    """A client of one queue, for one event loop: the loop in which it is first used. Client
    describes the arguments.
    """

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        queue: str,
        database: str | None = None,
        prefix: str = "tm:",
        options: ClientOptions | None = None,
        redis_client: redis.asyncio.Redis | None = None,
    ) -> None:
        super().__init__(url, queue, database, prefix, options or ClientOptions())
        self._redis = redis_client or connect_async(url, self._options.link)
        self._hub = ChannelHub(self._redis)
        self._turns = asyncio.Semaphore(_COMMANDS_AT_ONCE)

    # ── jobs ──

    async def submit(self, request: JobRequest | None = None, **arguments: Any) -> JobHandle:
        """Submit one job and return its id; see Client.submit."""
        return (await self.submit_many([self._request(request, arguments)]))[0]

    async def submit_many(self, jobs: Iterable[JobRequest | Mapping[str, Any]]) -> list[JobHandle]:
        """Submit many jobs in few round trips; see Client.submit_many."""
        with producing(self.queue, self._requests(jobs)) as requests:
            return self._noted(await self._run(submit(self._view, requests)))

    def stream(
        self, job: str, *, starting_after: str | int = 0, timeout: float | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Yield every chunk of a job once and in order; see Client.stream.

        If you leave the stream early, call `aclose` on it to end its subscription at once.
        """
        starting_after = programs.check_starting_after(starting_after)
        return self._tell(programs.follow(self._view, str(job), starting_after, timeout))

    async def result(
        self, job: str, timeout: float | None = None, *, check: bool = False
    ) -> JobResult:
        """Wait until a job has ended and return its result; see Client.result."""
        result = await self._run(programs.wait(self._view, str(job), timeout))
        if check and result.status is not JobStatus.SUCCEEDED:
            raise JobFailed(result)
        return result

    async def status(self, job: str) -> JobInfo:
        return await self._run(programs.status(self._view, str(job)))

    async def cancel(self, job: str) -> str:
        """Cancel a job; see Client.cancel."""
        return await self._run(programs.cancel(self._view, str(job)))

    # ── the queue ──

    async def list(
        self, status: JobStatus | str | None = None, limit: int = 100
    ) -> Sequence[JobInfo]:
        """List the jobs that have not ended, and dead jobs; see Client.list."""
        wanted = JobStatus(status) if status is not None else None
        return await self._run(queue_programs.jobs(self._view, wanted, limit))

    async def depth(self) -> QueueDepth:
        return await self._run(queue_programs.depth(self._view))

    async def overview(self) -> QueueState:
        """Return the state of the queue; see Client.overview."""
        return await self._run(queue_state.overview(self._view))

    async def is_served(self) -> bool:
        """Return whether a worker has ever served this queue; it may be away now."""
        return await self._run(is_served(self._view))

    async def workers(self) -> Sequence[WorkerStatus]:
        return await self._run(queue_programs.workers(self._view))

    async def dead(self, limit: int = 100) -> Sequence[DeadJob]:
        return await self._run(queue_programs.dead(self._view, limit))

    async def redrive(self, jobs: Sequence[str] | None = None, limit: int = 100) -> Sequence[str]:
        """Return dead jobs to the queue; see Client.redrive."""
        return await self._run(queue_programs.redrive(self._view, jobs, limit))

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
        await self._run(queue_programs.set_limits(self._view, tenant, limits))

    async def set_queue_limit(self, limit: int) -> None:
        await self._run(queue_programs.set_queue_limit(self._view, limit))

    async def close(self) -> None:
        """Close the client for good. Calls and streams in progress end with ClientClosed."""
        self.is_closed = True
        await self._hub.close()
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

    # ── performing programs ──

    async def perform(self, program: Program[T]) -> T:
        """Run a program over effects. Modules that extend the client beyond its own methods use
        this.
        """
        return await self._run(program)

    async def _run(self, program: Program[T]) -> T:
        """Run a program that yields no values to the caller; return its result."""
        performer = _Performer(self, self._redis, self._hub, self._turns)
        try:
            effect = performer.step(program)
            while effect is not None:
                await performer.perform(effect)
                effect = performer.step(program)
            value: T = performer.value
            return value
        finally:
            program.close()
            await performer.close()

    async def _tell(self, program: Program[None]) -> AsyncGenerator[Any, None]:
        performer = _Performer(self, self._redis, self._hub, self._turns)
        try:
            while (effect := performer.step(program)) is not None:
                if isinstance(effect, Tell):
                    yield effect.value
                elif isinstance(effect, Follow):
                    receive, timeout = performer.receiver(), effect.timeout
                    told_by, taken = effect.told_by, effect.taken
                    while (values := told_by(message := await receive(timeout))) is not None:
                        for value in values:
                            yield value
                        taken()
                    performer.answer = message
                else:
                    await performer.perform(effect)
        finally:
            program.close()
            await performer.close()


class _Performer:
    """Executes the effects of one program, and owns the subscription that it opens."""

    def __init__(
        self,
        client: AsyncClient,
        connection: redis.asyncio.Redis,
        hub: ChannelHub,
        turns: asyncio.Semaphore,
    ) -> None:
        self.value: Any = None  # what the program returned
        self._client = client
        self._redis = connection
        self._hub = hub
        self._turns = turns
        self._subscription: HubSubscription | None = None
        self.answer: Any = None  # the answer to the last effect
        self._trouble: TokenmillError | None = None

    def step(self, program: Program[Any]) -> Effect | None:
        """Send the answer to the last effect into the program and return its next effect; None at
        the end.
        """
        answer, trouble = self.answer, self._trouble
        self.answer, self._trouble = None, None
        try:
            return program.throw(trouble) if trouble is not None else program.send(answer)
        except StopIteration as end:
            self.value = end.value
            return None

    async def perform(self, effect: Effect) -> None:
        try:
            with heeding_cancellation():
                self.answer = await self._perform(effect)
        except Exception as error:
            check_open(
                self._client
            )  # if another task closed the client, redis-py raises arbitrary errors
            if not isinstance(error, SERVER_TROUBLE):
                raise
            self._trouble = translate(error)

    def receiver(self) -> Callable[[float], Awaitable[bytes | Signal | None]]:
        assert self._subscription is not None, "a program listens before it receives"
        return self._subscription.receive

    async def _perform(self, effect: Effect) -> Any:
        check_open(self._client)
        match effect:
            case RunScript(script, arguments):
                async with self._turns:
                    return await scripts.call_async(
                        self._redis, script, *self._client.script_head, *arguments
                    )
            case Commands(commands, tolerant):
                async with self._turns:
                    return await self._commands(commands, tolerant)
            case Listen(channel):
                await self.close()
                self._subscription = await self._hub.subscribe(channel)
                return None
            case Receive(timeout):
                return await self.receiver()(timeout)
            case LookUp(job_id):
                return (
                    await asyncio.to_thread(self._client.look_up, job_id)
                    if self._client.has_database
                    else None
                )
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
        raise TypeError(f"no such effect: {effect!r}")

    async def _commands(
        self, commands: Sequence[tuple[scripts.Argument, ...]], tolerant: bool
    ) -> Sequence[Any]:
        if not commands:
            return []
        if len(commands) == 1 and not tolerant:
            execute: Any = self._redis.execute_command
            return [await execute(*commands[0])]
        pipeline: Any
        async with self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)
            replies: Sequence[Any] = await pipeline.execute(raise_on_error=not tolerant)
        return replies

    async def close(self) -> None:
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await subscription.close()
        if (
            self._client.is_closed
        ):  # closed meanwhile: connections returned to the pool since are open
            await self._redis.aclose()
