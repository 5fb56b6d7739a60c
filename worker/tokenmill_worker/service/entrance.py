"""Lets processed jobs into the engine, and ends those that shall not enter it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from tokenmill_schemas.result import JobError
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import INTERNAL_ERROR, AdmittedJob, FinishedJob, JobObserver
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
