"""Processes claimed jobs, each until it may enter the engine or has ended.

A job with little to read is processed at once. A job with much to read would stop the event loop,
so a thread processes such jobs one after the other: those that have ended, then the most urgent
class, each in the order of their claims. Jobs with very much to read have a thread of their own, so
that others wait for none of them.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Final, TypeAlias

import msgspec

from tokenmill_schemas.job import Priority
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import Delivery
from tokenmill_worker.service.entrance import Entrance, Outcome
from tokenmill_worker.service.owned_jobs import OwnedJobs

log = logging.getLogger(__name__)

AT_ONCE_BYTES: Final = 4_000  # request and log together: a millisecond or two
LONG_BYTES: Final = 256_000  # from here on a job has very much to read

GiveBack: TypeAlias = Callable[[list[Delivery], Exception], Awaitable[None]]


class _Urgency(msgspec.Struct):
    """The field of a request that is read before the others."""

    priority: Priority = Priority.STANDARD


_read_urgency: Final = msgspec.msgpack.Decoder(_Urgency).decode


class Preparation:
    """Processes the jobs of one worker.

    Args:
        owned: The worker's jobs. One that has left them is not processed, or its outcome dropped.
        entrance: Admits the outcomes of jobs that were processed together.
        give_back: Called with jobs that could not be processed or passed on after `start` had
            returned.
    """

    def __init__(
        self,
        owned: OwnedJobs,
        entrance: Entrance,
        give_back: GiveBack,
    ) -> None:
        self._owned = owned
        self._entrance = entrance
        self._give_back = give_back
        self._threads = _InputThread(self._prepare), _InputThread(self._prepare)

    async def start(self, deliveries: Sequence[Delivery]) -> None:
        """Process jobs. Returns when those with little to read have been passed on."""
        processor = self._processor()
        short: list[Outcome] = []
        for delivery in deliveries:
            num_bytes = len(delivery.payload) + sum(map(len, delivery.log))
            if num_bytes <= AT_ONCE_BYTES:
                short.append(processor.process(self._as_known(delivery)))
                continue
            rank = _rank_of(delivery)
            if delivery.outcome == "run":  # others never enter the engine
                self._owned.prepare(delivery, is_urgent=not rank)
            self._threads[num_bytes > LONG_BYTES].put(rank, delivery)
        if short:
            await self._entrance.admit(short)

    def close(self) -> None:
        """Process nothing more, and let no job in that is being admitted."""
        for thread in self._threads:
            thread.close()
        self._entrance.close()

    def _processor(self) -> InputProcessor:
        if self._entrance.processor is None:
            raise RuntimeError("jobs were claimed before the engine was there")
        return self._entrance.processor

    def _as_known(self, delivery: Delivery) -> Delivery:
        """Return the delivery; as cancelled if it was cancelled since its claim."""
        is_cancelled = delivery.request_id in self._owned.cancelled
        return replace(delivery, outcome="cancelled") if is_cancelled else delivery

    async def _prepare(self, delivery: Delivery) -> None:
        if delivery not in self._owned:
            return
        try:
            outcome = await _in_thread(self._processor().process, self._as_known(delivery))
            if delivery in self._owned:
                await self._entrance.admit([outcome])
        except Exception as error:
            await self._give_back([delivery], error)


class _InputThread:
    """Jobs that are processed one after the other."""

    def __init__(self, work: Callable[[Delivery], Awaitable[None]]) -> None:
        self._work = work
        self._waiting: list[tuple[int, int, Delivery]] = []  # a heap by class and claim
        self._numbers = count()
        self._task: asyncio.Task[None] | None = None

    def put(self, rank: int, delivery: Delivery) -> None:
        heapq.heappush(self._waiting, (rank, next(self._numbers), delivery))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._waiting:
            delivery = heapq.heappop(self._waiting)[-1]
            try:
                await self._work(delivery)
            except Exception:  # the jobs behind it must not wait for ever
                log.exception("Job %s could be neither started nor given back", delivery.job_id)

    def close(self) -> None:
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()


def _rank_of(delivery: Delivery) -> int:
    """Return the rank of the job's class without decoding its request; 0 is the most urgent. A job
    that has ended only has to be recorded, and ranks before all others.
    """
    if delivery.outcome != "run":
        return -1
    try:
        return _read_urgency(delivery.payload).priority.rank
    except (ValueError, RecursionError):  # bytes that are no request; msgspec's are ValueErrors
        return Priority.STANDARD.rank


async def _in_thread(process: Callable[[Delivery], Outcome], delivery: Delivery) -> Outcome:
    """Process a job in a thread of its own. A worker that ends does not wait for it. Raises
    RuntimeError if no thread can be started, or if `process` raises anything.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome] = loop.create_future()

    def settle(outcome: Outcome | RuntimeError) -> None:
        if future.done():
            return
        if isinstance(outcome, RuntimeError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def run() -> None:
        outcome: Outcome | RuntimeError
        try:
            outcome = process(delivery)
        except BaseException as error:  # SystemExit, raised in a task, would end the event loop
            outcome = RuntimeError(f"processing it raised {type(error).__name__}")
            outcome.__cause__ = error
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:  # the loop has ended meanwhile
            log.debug("Job %s was processed after the worker's end", delivery.job_id)

    threading.Thread(target=run, name="input", daemon=True).start()
    return await future
