"""Builds the end of a job: result and final chunk, from what is known when it ends.

A job may end before it has a request (undecodable bytes), before it has an answer (refused), or
with one. The caller decides the status.
"""

from __future__ import annotations

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobError, JobResult, JobStatus, Usage
from tokenmill_worker.jobs import Delivery, Finished
from tokenmill_worker.text.job_output import Answer


def conclude(
    delivery: Delivery,
    status: JobStatus,
    *,
    worker_id: str,
    now_ms: int,
    request: JobRequest | None = None,
    answer: Answer | None = None,
    error: JobError | None = None,
    model: str = "",
) -> Finished:
    """Build the result and the final chunk. Partial answers are kept, and an expired job always
    carries its error.

    `model` is the served model, for requests that name none.
    """
    if status is JobStatus.EXPIRED and error is None:
        error = _deadline_error(request)
    usage = _usage(delivery, answer, now_ms)
    generated = answer is not None and answer.num_tokens > 0
    result = JobResult(
        job_id=delivery.job_id,
        status=status,
        model=(request.model if request is not None else "") or model,
        tenant=request.tenant if request is not None else "",
        choices=answer.results()
        if answer is not None and (generated or answer.is_finished)
        else (),
        usage=usage,
        error=error,
        attempt=delivery.attempt,
        worker_id=worker_id,
        created_ms=delivery.created_ms,
        started_ms=delivery.started_ms,
        finished_ms=now_ms,
        metadata=request.metadata if request is not None else {},
    )
    return Finished(delivery.token, result, _final_chunk(result, answer), request)


def _deadline_error(request: JobRequest | None) -> JobError:
    """Return the error of a job whose deadline passed after a worker had claimed it."""
    when = (
        f" ({request.deadline_ms} ms)"
        if request is not None and request.deadline_ms is not None
        else ""
    )
    return JobError(
        "deadline_exceeded", f"the deadline{when} passed before the answer was complete"
    )


def _usage(delivery: Delivery, answer: Answer | None, now_ms: int) -> Usage:
    total_ms = max(0, now_ms - delivery.created_ms)
    if answer is not None:
        return answer.usage(total_ms)
    return Usage(queue_ms=max(0, delivery.started_ms - delivery.created_ms), total_ms=total_ms)


def _final_chunk(result: JobResult, answer: Answer | None) -> Chunk:
    return Chunk(
        job_id=result.job_id,
        index=answer.choices[0].num_tokens if answer is not None else 0,
        text=answer.rest if answer is not None else "",
        finish_reason=result.finish_reason,
        attempt=result.attempt,
        status=result.status,
        usage=result.usage,
        error=result.error,
        n=len(answer.choices) if answer is not None else 1,
    )
