"""Decides what a finished job becomes when SQL has a row of its id already.

The row always wins: Redis gets the recorded result, so that both give one answer for ever. If the
row belongs to another job, the later job fails and is not billed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final

import msgspec

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.result import JobError, JobResult, JobStatus, Usage
from tokenmill_worker.errors import StoreUnavailable
from tokenmill_worker.jobs import AdmittedJob, FinishedJob, set_aside
from tokenmill_worker.record.result_store import RecordReport

log = logging.getLogger(__name__)

PAUSE_S: Final = 30.0
SLOW_S: Final = 1.0
Find = Callable[[Sequence[str]], Awaitable[dict[str, JobResult]]]


def recorded_by_us(group: list[FinishedJob], report: RecordReport) -> list[FinishedJob]:
    """Return the jobs whose rows this worker wrote, each once: in this call, or in an earlier one
    that committed after its time limit. Such a row is recognised by its result, which names when
    and where the job ended.
    """
    latest = {item.result.job_id: item for item in sorted(group, key=lambda item: item.token)}
    return [
        item
        for job_id, item in latest.items()
        if job_id in report.written or report.existing.get(job_id) == item.result
    ]


def without_content(group: list[FinishedJob], report: RecordReport) -> list[FinishedJob]:
    """Return the jobs of which no row could be made, as failed and without their answers."""
    found = [item for item in group if item.job_id in report.broken]
    for item in found:
        error = report.broken[item.job_id]
        log.error("Job %s fails: it could not be recorded", item.job_id, exc_info=error)
    return [set_aside(item, "record", report.broken[item.job_id]) for item in found]


class RecordedEnds:
    """The ends that SQL has of redelivered jobs. `find` returns results by job id.

    At a frozen server a look-up takes its whole time limit. So after one that took SLOW_S or more
    and failed, none is made for PAUSE_S, or until `resume`: jobs do not wait for the server one
    after the other.
    """

    def __init__(self, find: Find) -> None:
        self._find = find
        self._paused_until = 0.0  # by the monotonic clock, as the next
        self._answered_s = 0.0

    def resume(self) -> None:
        """Note that SQL answers."""
        self._paused_until, self._answered_s = 0.0, time.monotonic()

    async def skip_recorded(
        self, outcomes: Sequence[AdmittedJob | FinishedJob]
    ) -> list[AdmittedJob | FinishedJob]:
        """Replace redelivered jobs by the end that SQL has for them, written by a worker that died
        before it could acknowledge. Such a job is not generated again: its subscribers would get
        other chunks than the readers of the result.
        """
        again = {
            job.job_id
            for job in outcomes
            if isinstance(job, AdmittedJob) and job.delivery.deliveries > 1
        }
        if not again or time.monotonic() < self._paused_until:
            return list(outcomes)
        started = time.monotonic()
        try:
            known = await self._find(sorted(again))
        except StoreUnavailable as error:
            # The jobs are generated again. Where a row exists, it decides.
            now = time.monotonic()
            pause_s = PAUSE_S if now - started >= SLOW_S and started >= self._answered_s else 0.0
            self._paused_until = now + pause_s
            log.warning(
                "SQL does not answer; %d redelivered jobs run again, ended or not, and all others "
                "for %g s: %s",
                len(again),
                pause_s,
                error,
            )
            return list(outcomes)
        return [
            unless_recorded(job, known) if isinstance(job, AdmittedJob) else job for job in outcomes
        ]


def unless_recorded(job: AdmittedJob, known: dict[str, JobResult]) -> AdmittedJob | FinishedJob:
    """Return the recorded end of an admitted job. Returns the job itself if SQL has no row of it,
    or one of another job.
    """
    result = known.get(job.job_id)
    if result is None or (result.tenant, result.created_ms) != (
        job.request.tenant,
        job.delivery.created_ms,
    ):
        return job
    chunk = Chunk(job_id=job.job_id, index=0, attempt=result.attempt)
    return FinishedJob(
        job.delivery.token, result, _last_chunk(chunk, result), job.request, is_recorded=True
    )


def as_recorded(finished: FinishedJob, existing: dict[str, JobResult]) -> FinishedJob:
    """Return the job with the result that SQL has, if it has one, so that Redis and SQL give one
    answer for ever. Its last chunk stands behind all tokens of that answer: a reader that has fewer
    sees a gap, and reads the result.
    """
    result = existing.get(finished.result.job_id)
    if result is None or result == finished.result:
        return finished
    return replace(finished, result=result, final_chunk=_last_chunk(finished.final_chunk, result))


def ended_without_id(finished: FinishedJob) -> FinishedJob:
    """Return the end of a job whose id belongs to another job in SQL: failed, without an answer,
    and not billed.
    """
    words = (
        f"the job id {finished.result.job_id!r} stands for an earlier job in the database: "
        "use a new id"
    )
    error, used = JobError("job_id_taken", words), finished.result.usage
    usage = Usage(queue_ms=used.queue_ms, ttft_ms=used.ttft_ms, total_ms=used.total_ms)
    ended = {"status": JobStatus.FAILED, "error": error, "usage": usage}
    result = msgspec.structs.replace(finished.result, choices=(), **ended)
    chunk = msgspec.structs.replace(finished.final_chunk, text="", finish_reason=None, **ended)
    return replace(finished, result=result, final_chunk=chunk)


def _last_chunk(chunk: Chunk, result: JobResult) -> Chunk:
    choices = result.choices
    ends = choices[0].text_ends if len(choices) == 1 else ()
    return msgspec.structs.replace(
        chunk,
        index=len(result.token_ids),
        text=choices[0].text[ends[-1] if ends else 0 :] if len(choices) == 1 else "",
        finish_reason=result.finish_reason,
        status=result.status,
        usage=result.usage,
        error=result.error,
        n=max(1, len(choices)),
    )
