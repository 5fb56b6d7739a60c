"""Processes claimed jobs, and lets each into the engine, or ends it.

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
from tokenmill_schemas.result import JobError
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import INTERNAL_ERROR, AdmittedJob, Delivery, FinishedJob, JobObserver
from tokenmill_worker.publish.publisher import Publisher
from tokenmill_worker.record.finalizer import Finalizer
from tokenmill_worker.service.early_ends import EarlyEnds
from tokenmill_worker.service.owned_jobs import OwnedJobs
from tokenmill_worker.supervisor import EngineSupervisor

log = logging.getLogger(__name__)

Outcome: TypeAlias = AdmittedJob | FinishedJob


class Entrance:
    """Submits the jobs of one worker to its engine. `finish` is called with each that ends."""

    def __init__(
        self,
        owned: OwnedJobs,
        ends: EarlyEnds,
        publisher: Publisher,
        finalizer: Finalizer,
        supervisor: EngineSupervisor,
        observer: JobObserver,
        finish: Callable[[FinishedJob], Awaitable[None]],
    ) -> None:
        self.processor: InputProcessor | None = None  # since the first engine is ready
        self._owned = owned
        self._ends = ends
        self._publisher = publisher
        self._finalizer = finalizer
        self._supervisor = supervisor
        self._observer = observer
        self._finish = finish
        self._is_closed = False

    async def admit(self, outcomes: Sequence[Outcome]) -> None:
        """Submit the jobs that can run, and end the others. A job that cannot be submitted fails
        alone. After `close`, all stay owned as they are.
        """
        ready: list[AdmittedJob] = []
        outcomes = await self._finalizer.skip_recorded(outcomes)
        if self._is_closed:  # perhaps only since this call began
            return
        for outcome in outcomes:
            if isinstance(outcome, FinishedJob):
                await self._finish(outcome)
            elif outcome.delivery in self._owned:
                ready.append(outcome)
        if not self._supervisor.health.engine_ready:  # it died and never had these jobs
            await self._ends.release([job.delivery for job in ready], crash=False)
            return
        admitted = [job for job in ready if await self._may_enter(job)]
        if admitted:
            self._observer.started(admitted)
            await self._submit(admitted)

    def close(self) -> None:
        """Submit and end nothing more."""
        self._is_closed = True

    async def _may_enter(self, job: AdmittedJob) -> bool:
        """Open the job's answer. A cancelled job ends instead."""
        try:
            if job.request_id in self._owned.cancelled:
                assert self.processor is not None
                await self._finish(self.processor.cancelled(job))
                return False
            self._publisher.open(job)
        except Exception as error:
            await self._fail(job, error)
            return False
        self._owned.enter_engine(job)
        return True

    async def _submit(self, jobs: list[AdmittedJob]) -> None:
        """Submit all jobs together, so that they share the engine's next step."""
        host = self._supervisor.host
        assert host is not None
        try:
            host.submit(job.generation for job in jobs)
        except Exception as error:  # a request that cannot be encoded; nothing was sent
            if len(jobs) == 1:
                await self._fail(jobs[0], error)
                return
            for job in jobs:
                await self._submit([job])

    async def _fail(self, job: AdmittedJob, error: Exception) -> None:
        log.error("Job %s fails: it could not be started", job.job_id, exc_info=error)
        self._publisher.close(job.request_id)
        words = f"the worker could not start this job: {type(error).__name__}"
        assert self.processor is not None
        failure = JobError(INTERNAL_ERROR, words)
        await self._finish(self.processor.failed(job.delivery, job.request, failure))


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
