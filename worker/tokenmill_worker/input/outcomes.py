"""Builds the ends of claimed jobs that never reach the engine: refused ones, and those that ended
in the queue or in their log. `Refused` is the refusal that every step of the input may raise.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobError, JobStatus
from tokenmill_schemas.validation import MAX_NAME_CHARS, metadata_problems, problems
from tokenmill_worker.jobs import Delivery, FinishedJob
from tokenmill_worker.text.job_output import JobOutput

INVALID_REQUEST = "invalid_request"
TOO_LONG = "context_length_exceeded"
NOT_FOUND = "model_not_found"


class Refused(Exception):
    """Raised where a request cannot be served; `error` is the job's end."""

    def __init__(self, message: str, code: str = INVALID_REQUEST) -> None:
        super().__init__(message)
        self.error = JobError(code, message)


class Outcomes:
    """Builds ended jobs in the name of one worker. `model`: for requests that name none."""

    def __init__(self, worker_id: str, model: str, now_ms: Callable[[], int]) -> None:
        self._worker_id = worker_id
        self._model = model
        self._now_ms = now_ms

    def failed(
        self, delivery: Delivery, request: JobRequest | None, error: JobError
    ) -> FinishedJob:
        return self._build(delivery, JobStatus.FAILED, request, error=error)

    def expired(self, delivery: Delivery, request: JobRequest) -> FinishedJob:
        return self._build(delivery, JobStatus.EXPIRED, request)

    def complete(self, delivery: Delivery, request: JobRequest, answer: JobOutput) -> FinishedJob:
        """Build the end of a job whose logged answer is complete."""
        error = None
        if answer.status is JobStatus.FAILED:  # an earlier attempt ended before it was recorded
            error = JobError("engine_error", "the engine failed in an earlier attempt")
        return self._build(delivery, answer.status, request, answer, error)

    def ended(
        self, delivery: Delivery, request: JobRequest | None, answer: JobOutput | None
    ) -> FinishedJob:
        """Build the end of a job that the claim script found ended. `answer`: what the log holds;
        None without a readable log. A dead job whose logged answer is complete ends with that
        answer.
        """
        status, reason, error = _end_of(delivery)
        if request is not None and answer is not None:
            if delivery.outcome == "dead" and answer.is_finished:
                return self.complete(delivery, request, answer)
            answer.end_all(reason)
        return self._build(delivery, status, request, answer, error)

    def _build(
        self,
        delivery: Delivery,
        status: JobStatus,
        request: JobRequest | None,
        answer: JobOutput | None = None,
        error: JobError | None = None,
    ) -> FinishedJob:
        return FinishedJob.build(
            delivery,
            status,
            worker_id=self._worker_id,
            now_ms=self._now_ms(),
            request=None if request is None else recordable(request),
            answer=answer,
            error=error,
            model=self._model,
        )


def _end_of(delivery: Delivery) -> tuple[JobStatus, FinishReason, JobError | None]:
    if delivery.outcome == "cancelled":
        return JobStatus.CANCELLED, FinishReason.CANCELLED, None
    if delivery.outcome == "expired":
        return JobStatus.EXPIRED, FinishReason.EXPIRED, None
    message = (
        f"set aside after {delivery.crashes} engine crashes and {delivery.deliveries} deliveries"
    )
    return JobStatus.DEAD, FinishReason.ERROR, JobError("dead", message)


def recordable(request: JobRequest) -> JobRequest:
    """Return the request as a result may hold it. Names and metadata of a refused request need not
    fit the columns, so they are shortened or dropped.
    """
    if not problems(request):
        return request
    metadata = {} if metadata_problems(request.metadata) else request.metadata
    return msgspec.structs.replace(
        request,
        model=_printable(request.model),
        tenant=_printable(request.tenant),
        metadata=metadata,
    )


def _printable(name: str) -> str:
    return "".join(letter for letter in name[:MAX_NAME_CHARS] if letter.isprintable())
