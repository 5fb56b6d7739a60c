"""Executes IO requests of the client's operations in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Final, Protocol

import redis.asyncio

from tokenmill.errors import ClientClosed, TokenmillError
from tokenmill.operations.io_requests import (
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
from tokenmill.sql.look_ups import LookUps
from tokenmill.transport import scripts
from tokenmill.transport.async_pubsub import MultiplexedSubscription, PubSubMultiplexer
from tokenmill.transport.refusals import TRANSLATED, translate
from tokenmill.transport.repairs import reraise_cancellation
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.keys import Keys

MOST_AT_ONCE: Final = 64  # values of a batch: their reader gives the loop back between two


class DrivenClient(Protocol):
    """The parts of a client that its IO requests need."""

    keys: Keys
    clock: ServerClock
    script_head: tuple[str, str, str]
    look_ups: LookUps
    is_closed: bool

    @property
    def has_database(self) -> bool: ...


class AsyncIODriver:
    """Executes the IO requests of one operation, and owns the subscription that it opens. `check`
    raises ClientClosed after the client's close, and ConfigurationError in another event loop.
    """

    def __init__(
        self,
        client: DrivenClient,
        connection: redis.asyncio.Redis,
        multiplexer: PubSubMultiplexer,
        limiter: asyncio.Semaphore,
        check: Callable[[], None],
    ) -> None:
        self.value: Any = None  # what the operation returned
        self._client = client
        self._redis = connection
        self._multiplexer = multiplexer
        self._limiter = limiter
        self._check = check
        self._subscription: MultiplexedSubscription | None = None
        self.answer: Any = None  # the reply to the last IO request
        self._trouble: TokenmillError | None = None

    def step(self, operation: Operation[Any]) -> IORequest | None:
        """Send the reply to the last IO request into the operation and return its next request;
        None at the end.
        """
        answer, trouble = self.answer, self._trouble
        self.answer, self._trouble = None, None
        try:
            return operation.throw(trouble) if trouble is not None else operation.send(answer)
        except StopIteration as end:
            self.value = end.value
            return None

    async def perform(self, request: IORequest) -> None:
        try:
            with reraise_cancellation():
                self.answer = await self._perform(request)
        except Exception as error:
            # if another task closed the client, redis-py raises arbitrary errors
            if self._client.is_closed:
                raise ClientClosed from error
            if not isinstance(error, TRANSLATED):
                raise
            self._trouble = translate(error)

    async def batches(self, operation: Operation[None]) -> AsyncGenerator[Sequence[Any], None]:
        """Run an operation that emits values, and yield those that are there together."""
        there: list[Any] = []
        try:
            while (request := self.step(operation)) is not None:
                if isinstance(request, Emit):
                    there.append(request.value)
                    if len(there) < MOST_AT_ONCE:
                        continue
                if there:
                    yield there
                    there = []
                if isinstance(request, StreamMessages):
                    while await self._next(request, there):
                        yield there
                        there = []
                        request.on_taken()
                elif not isinstance(request, Emit):
                    await self.perform(request)
            if there:
                yield there
        finally:
            operation.close()
            await self.close()

    async def _next(self, request: StreamMessages, there: list[Any]) -> bool:
        """Wait for a value, and put all that are there into a list. Return False at the message at
        which the operation goes on.
        """
        subscription, values_of = self._subscribed(), request.values_of
        while True:
            message = await subscription.receive(request.timeout, request.limit)
            while message is not None or not there:
                values = values_of(message)
                if values is None:
                    self.answer = message
                    return False
                there += values
                if not there:
                    break
                message = subscription.taken() if len(there) < MOST_AT_ONCE else None
            else:
                return True

    def _subscribed(self) -> MultiplexedSubscription:
        assert self._subscription is not None, "an operation subscribes before it receives"
        return self._subscription

    async def _perform(self, request: IORequest) -> Any:
        self._check()
        match request:
            case RunScript(script, arguments):
                async with self._limiter:
                    return await scripts.call_async(
                        self._redis, script, *self._client.script_head, *arguments
                    )
            case Commands(commands, tolerant):
                async with self._limiter:
                    return await self._commands(commands, tolerant)
            case Subscribe(channel):
                await self.close()
                self._subscription = await self._multiplexer.subscribe(channel)
                return None
            case Receive(timeout, limit):
                return await self._subscribed().receive(timeout, limit)
            case QueryDatabase(job_id):
                look_ups = self._client.look_ups
                return await look_ups.find_async(job_id) if self._client.has_database else None
            case ServerTime():
                clock, key = self._client.clock, self._client.keys.meta
                return await clock.refresh_async(self._redis, key)
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
        raise TypeError(f"no such IO request: {request!r}")

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
        # closed meanwhile: connections returned to the pool since are open
        if self._client.is_closed:
            await self._redis.aclose()
