"""Defines a job on its way through the worker: the values that one stage passes to the next.

`queue`, `input`, `publish` and `record` share these values and do not import one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal, Protocol, TypeAlias

import msgspec

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobError, JobResult, JobStatus, Usage
from tokenmill_worker.contract.messages import Frame
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.text.job_output import JobOutput

INTERNAL_ERROR: Final = "internal_error"  # the worker's own fault, with this job alone

# ── a job on its way ──


@dataclass(frozen=True, slots=True)
class Delivery:
    """A claimed job. `token` is the fencing token: every write for the job must carry it.

    An `outcome` other than "run" means that the claim script found the job ended (cancelled while
    queued, past its deadline, crashed too often). It only has to be recorded.
    """

    job_id: str
    token: int
    payload: bytes  # an encoded JobRequest, not yet trusted
    deliveries: int  # this one included
    crashes: int
    outcome: Literal["run", "cancelled", "expired", "dead"]
    log: tuple[bytes, ...]  # encoded chunks of earlier attempts, in order
    created_ms: int
    started_ms: int  # first claim ever
    attempt: int
    alone: bool = False  # suspected of crashing the engine: must run alone
    is_redriven: bool = False  # it was a dead letter: its deadline no longer counts
    log_end: int = 0  # the number of the log's last entry; see ChunkAppend

    @property
    def request_id(self) -> str:
        """The request's id in the engine. A job that was lost and claimed again is another request,
        so late events of the first delivery do not reach the second.
        """
        return f"{self.job_id}/{self.token}"


@dataclass(frozen=True, slots=True)
class AdmittedJob:
    """A job that may run: the request for the engine, and the answer so far, with the log of
    earlier attempts in it.

    From here on the publisher owns `answer`.
    """

    delivery: Delivery
    request: JobRequest
    generation: GenerationRequest
    answer: JobOutput

    @property
    def job_id(self) -> str:
        return self.delivery.job_id

    @property
    def request_id(self) -> str:
        return self.generation.request_id


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that has ended: to be committed to SQL, then acknowledged."""

    token: int
    result: JobResult
    final_chunk: Chunk
    request: JobRequest | None = None  # recorded beside the result; None if it could not be decoded
    is_recorded: bool = False  # SQL has its end already: it only has to be acknowledged

    @property
    def job_id(self) -> str:
        return self.result.job_id

    @property
    def is_batch_line(self) -> bool:
        """Return whether this is a line of a batch, whose end no caller waits for alone."""
        request = self.request
        return request is not None and bool(request.batch_id) and not request.stream

    @classmethod
    def build(
        cls,
        delivery: Delivery,
        status: JobStatus,
        *,
        worker_id: str,
        now_ms: int,
        request: JobRequest | None = None,
        answer: JobOutput | None = None,
        error: JobError | None = None,
        model: str = "",
    ) -> FinishedJob:
        """Build the result and the final chunk from what is known when the job ends. A job may end
        before it has a request (undecodable bytes), before it has an answer (refused), or with one.
        Partial answers are kept. An expired job always carries its error.

        `model`: the served model, for requests that name none.
        """
        if status is JobStatus.EXPIRED and error is None:
            error = _deadline_error(request)
        generated = answer is not None and answer.num_tokens > 0
        result = JobResult(
            job_id=delivery.job_id,
            status=status,
            model=(request.model if request is not None else "") or model,
            tenant=request.tenant if request is not None else "",
            choices=answer.results()
            if answer is not None and (generated or answer.is_finished)
            else (),
            usage=_usage(delivery, answer, now_ms),
            error=error,
            attempt=delivery.attempt,
            worker_id=worker_id,
            created_ms=delivery.created_ms,
            started_ms=delivery.started_ms,
            finished_ms=now_ms,
            metadata=request.metadata if request is not None else {},
            params=answer.params if answer is not None and generated else None,
            prompt=answer.prompt if answer is not None and generated else None,
        )
        return cls(delivery.token, result, _final_chunk(result, answer), request)


def set_aside(finished: FinishedJob, doing: str, error: Exception) -> FinishedJob:
    """Return the end of a job whose content makes a stage raise: failed, without the answer. Its
    usage stays, because readers may have its tokens. A job that was set aside before loses its
    request too.

    Args:
        doing: what the worker could not do with the job.
    """
    before = finished.result.error
    words = f"the worker could not {doing} this job: {type(error).__name__}"
    ended = {"status": JobStatus.FAILED, "error": JobError(INTERNAL_ERROR, words)}
    result = msgspec.structs.replace(finished.result, choices=(), params=None, prompt=None, **ended)
    chunk = msgspec.structs.replace(
        finished.final_chunk, text="", reasoning="", tool_calls=(), finish_reason=None, **ended
    )
    request = finished.request
    if before is not None and before.code == INTERNAL_ERROR:
        request, result = None, msgspec.structs.replace(result, metadata={})
    return FinishedJob(finished.token, result, chunk, request)


def _deadline_error(request: JobRequest | None) -> JobError:
    """Return the error of a job whose deadline passed after a worker had claimed it."""
    deadline_ms = None if request is None else request.deadline_ms
    when = "" if deadline_ms is None else f" ({deadline_ms} ms)"
    return JobError(
        "deadline_exceeded", f"the deadline{when} passed before the answer was complete"
    )


def _usage(delivery: Delivery, answer: JobOutput | None, now_ms: int) -> Usage:
    total_ms = max(0, now_ms - delivery.created_ms)
    if answer is not None:
        return answer.usage(total_ms)
    return Usage(queue_ms=max(0, delivery.started_ms - delivery.created_ms), total_ms=total_ms)


def _final_chunk(result: JobResult, answer: JobOutput | None) -> Chunk:
    return Chunk(
        job_id=result.job_id,
        index=answer.choices[0].num_tokens if answer is not None else 0,
        text=answer.rest if answer is not None else "",
        reasoning=answer.reasoning_rest if answer is not None else "",
        finish_reason=result.finish_reason,
        attempt=result.attempt,
        status=result.status,
        usage=result.usage,
        error=result.error,
        n=len(answer.choices) if answer is not None else 1,
    )


# ── the log ──


class ChunkAppend(msgspec.Struct, frozen=True, gc=False):
    """One chunk to log and publish, under a fencing token. `checkpoint` chunks are logged and not
    published.

    `start` is the number of the log entry before it, 0 at the log's beginning. An entry's number is
    larger by the chunk's tokens, or by one for a chunk that only ends a choice. With one choice it
    is the number of tokens in the log. One is made for every token; a dataclass takes ten times as
    long.
    """

    token: int
    chunk: Chunk
    start: int
    checkpoint: bool = False

    @property
    def end(self) -> int:
        """The number of this chunk's own entry."""
        return self.start + (len(self.chunk.token_ids) or 1)


class AppendReply(StrEnum):
    """The queue's reply to one chunk.

    LOST: another worker owns the job; drop the sequence and write nothing more.
    GONE: the same, because the server has no record of the job any more.
    GAP: the log is shorter than this worker believed, because Redis lost its tail; send again from
    the log's end.
    """

    OK = "ok"
    DUPLICATE = "duplicate"  # a retried call: the chunk is there already
    LOST = "lost"
    GONE = "gone"
    CANCELLED = "cancelled"  # appended, and the user wants it stopped
    GAP = "gap"


# The chunks of one call that were not simply logged: index in the call → reply, and the number of
# the log's last entry after the call. Usually there are none.
AppendFailures: TypeAlias = Mapping[int, tuple[AppendReply, int]]


# ── orders that follow from a step's events ──


@dataclass(frozen=True, slots=True)
class CancelOrder:
    """Orders the engine to stop this choice (None: every choice) of the request."""

    request_id: str
    reason: FinishReason
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class RetryOrder:
    """Orders the queue to run the job again after a pause, from where its log ends. The job failed
    in a way that may not recur.
    """

    delivery: Delivery
    delay_ms: int
    reason: str


def retry_order(job: AdmittedJob, error: JobError) -> RetryOrder | None:
    """Return the retry that the request's policy allows, else None. The pause is the policy's
    backoff × 2^(attempts so far − 1), capped.
    """
    policy, attempt = job.request.retry, job.delivery.attempt
    if not error.retryable or attempt >= policy.max_attempts:
        return None
    delay_ms = min(policy.max_backoff_ms, policy.backoff_ms * 2 ** min(attempt - 1, 30))
    return RetryOrder(job.delivery, delay_ms, error.message)


@dataclass(slots=True)
class PublishReport:
    """The results of publishing one step, besides its chunks: jobs to retry, jobs that ended,
    choices that the engine must stop, and jobs that this worker does not own any more.
    """

    retry: list[RetryOrder] = field(default_factory=list)
    finished: list[FinishedJob] = field(default_factory=list)
    cancel: list[CancelOrder] = field(default_factory=list)
    lost: list[Delivery] = field(default_factory=list)


# ── what the stages need of one another ──


class ChunkLog(Protocol):
    """Writes chunks to the log; implemented by `queue.job_stream`, used by `publish`."""

    async def append(self, items: list[ChunkAppend]) -> AppendFailures:
        """Append all chunks in one round trip."""
        ...


class Acknowledger(Protocol):
    """Acknowledges finished jobs; implemented by `queue.job_stream`, used by `record`."""

    async def finish(self, jobs: list[FinishedJob]) -> list[bool]:
        """Acknowledge jobs whose rows SQL has committed. Returns one flag per job; False if the
        fencing token was outdated, because the job is another worker's now.
        """
        ...


class JobObserver:
    """Observes jobs between claim and record, and the calls of the queue, and does nothing.
    `telemetry.job_telemetry` does something. Must not raise.
    """

    def claimed(self, deliveries: Sequence[Delivery]) -> None: ...

    def started(self, jobs: Sequence[AdmittedJob]) -> None:
        """Note that the jobs were submitted to the engine."""

    def stepped(self, frame: Frame) -> None:
        """Note that the tokens of a frame were published."""

    def left(self, job_ids: Iterable[str], reason: str) -> None:
        """Note that the jobs left this worker to go on elsewhere. `reason`: "handed_over", "crash",
        "retry", "lost".
        """

    def called(self, script: str, seconds: float, round_trips: int, is_done: bool) -> None:
        """Note a call of a script, which the server answered if `is_done`."""

    def refused(self, call: str, count: int) -> None:
        """Note that a call had `count` outdated fencing tokens."""

    def lost_by_server(self, count: int) -> None:
        """Note that the server has no record of so many jobs any more."""
