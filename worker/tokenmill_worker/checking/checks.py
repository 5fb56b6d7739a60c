"""The answers that are being validated. Each ends as it would have, or with an error that says how
it breaks its schema.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import ChoiceResult, JobError, JobStatus
from tokenmill_worker.checking.checker import VIOLATION, AnswerChecker
from tokenmill_worker.jobs import FinishedJob, set_aside

log = logging.getLogger(__name__)

MAX_WAITING = 256  # from this number on no job should be claimed


class Checks:
    """Validates answers in tasks. `then` is called once with every job that `take` accepted, after
    its check.
    """

    def __init__(
        self, then: Callable[[FinishedJob], Awaitable[None]], checker: AnswerChecker | None = None
    ) -> None:
        self._then = then
        self._checker = checker or AnswerChecker()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_full(self) -> bool:
        return len(self._tasks) >= MAX_WAITING

    def take(self, finished: FinishedJob) -> bool:
        """Start validating a job's answer. Returns False if there is nothing to validate."""
        if not has_schema(finished):
            return False
        task = asyncio.create_task(self._check(finished))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def _check(self, finished: FinishedJob) -> None:
        try:
            finished = await checked(finished, self._checker)
        except Exception as error:
            log.exception("Job %s fails: its answer could not be checked", finished.job_id)
            finished = set_aside(finished, "check the answer of", error)
        await self._then(finished)

    async def close(self, limit_s: float) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=limit_s)
        await self._checker.close()


def has_schema(finished: FinishedJob) -> bool:
    """Return whether the job has a complete answer for which a JSON schema was requested."""
    wanted = None if finished.request is None else finished.request.params.response_format
    if (
        wanted is None
        or wanted.json_schema is None
        or finished.is_recorded
        or finished.result.error is not None
    ):
        return False
    return any(_is_complete(choice) for choice in finished.result.choices)


async def checked(finished: FinishedJob, checker: AnswerChecker) -> FinishedJob:
    """Return the job, with an error if a complete answer breaks its schema: a strict schema makes
    the job fail, any other only adds the error.
    """
    wanted = None if finished.request is None else finished.request.params.response_format
    if wanted is None or wanted.json_schema is None:
        return finished
    schema = wanted.json_schema or {"type": "object"}
    for choice in finished.result.choices:
        if not _is_complete(choice):
            continue
        problem = await checker.violation(schema, choice.text)
        if problem is not None:
            of = f" of choice {choice.index}" if len(finished.result.choices) > 1 else ""
            error = JobError(VIOLATION, f"the answer{of} breaks its JSON schema: {problem}")
            return _with_error(finished, error, fails=wanted.strict)
    return finished


def _is_complete(choice: ChoiceResult) -> bool:
    return choice.finish_reason is FinishReason.STOP


def _with_error(finished: FinishedJob, error: JobError, *, fails: bool) -> FinishedJob:
    status = JobStatus.FAILED if fails else finished.result.status
    return FinishedJob(
        finished.token,
        msgspec.structs.replace(finished.result, status=status, error=error),
        msgspec.structs.replace(finished.final_chunk, status=status, error=error),
        finished.request,
        finished.is_recorded,
    )
