"""A job that is being published, and how the engine's events change its answer."""

from __future__ import annotations

import logging

from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobError, JobStatus
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.jobs import (
    INTERNAL_ERROR,
    AdmittedJob,
    CancelOrder,
    ChunkAppend,
    FinishedJob,
    RetryOrder,
    retry_order,
)
from tokenmill_worker.publish.chunker import Chunker

log = logging.getLogger(__name__)


class RunningJob:
    """A job that is being published. Its plain attributes are what every token needs."""

    __slots__ = (
        "answer",
        "chunker",
        "error",
        "first",
        "is_cancelled",
        "is_open",
        "job",
        "request_id",
    )

    def __init__(self, job: AdmittedJob, chunker: Chunker) -> None:
        self.job = job
        self.request_id = job.request_id
        self.answer = job.answer
        self.first = job.answer.choices[0]
        self.chunker = chunker
        self.error: JobError | None = None
        self.is_cancelled = False
        self.is_open = True  # not given back, lost or finished

    def fast_chunk(self, event: TokenEvent) -> ChunkAppend | None:
        """Apply an event that is one plain token of a stream, and return its chunk; None, with
        nothing applied, for other events.
        """
        if event.finish_reason is not None or len(event.token_ids) != 1:
            return None
        return (
            self.chunker.fast_chunk(event.token_ids[0])
            if event.preemptions == self.first.preemptions
            else None
        )

    def apply(self, event: TokenEvent, now_ms: int, cancel: list[CancelOrder]) -> RetryOrder | None:
        """Apply an event to the answer; add to `cancel` what the engine must stop.

        Returns:
            The retry of a job that failed and may run again; it ends here.
        """
        if event.finish_reason is FinishReason.ERROR and self._is_affected_by(event):
            return self._fail(event, cancel)
        answer = self.answer
        choice = answer.choices[event.choice]
        if choice.finish_reason is not None:
            return None
        if not answer.num_tokens:
            answer.cached_tokens = min(event.num_cached_tokens, answer.prompt_tokens)
            if event.token_ids:
                answer.ttft_ms = max(0, now_ms - self.job.delivery.created_ms)
        if event.prompt_logprobs:
            answer.score_prompt(event.prompt_logprobs)
        if event.preemptions > choice.preemptions:
            choice.preemptions = event.preemptions
        if answer.push(event.choice, event.token_ids, event.logprobs):
            if event.finish_reason is None:
                cancel.append(CancelOrder(self.request_id, FinishReason.STOP, event.choice))
        elif event.finish_reason is not None:
            answer.end(event.choice, event.finish_reason, with_last_token=bool(event.token_ids))
        return None

    def _is_affected_by(self, event: TokenEvent) -> bool:
        """Return whether an error ends the job. It does not if a stop string has already ended its
        choice. A refusal of the whole request names choice 0, even if an earlier attempt finished
        that choice.
        """
        is_running = self.answer.choices[event.choice].finish_reason is None
        return is_running or event.choice in self.job.generation.done

    def _fail(self, event: TokenEvent, cancel: list[CancelOrder]) -> RetryOrder | None:
        code = event.error_code or "engine_error"
        self.error = JobError(
            code, event.error or "the engine failed", retryable=code == "engine_error"
        )
        if len(self.answer.choices) > 1:
            cancel.append(CancelOrder(self.request_id, FinishReason.ERROR))
        order = retry_order(self.job, self.error)
        if order is None:
            self.answer.end_all(FinishReason.ERROR)
        return order

    # ── the end ──

    def finished(self, worker_id: str, model: str, now_ms: int) -> FinishedJob:
        """Return the job's end, by its answer, which is finished."""
        status = JobStatus.FAILED if self.error else self.answer.status
        return FinishedJob.build(
            self.job.delivery,
            status,
            worker_id=worker_id,
            now_ms=now_ms,
            request=self.job.request,
            answer=self.answer,
            error=self.error,
            model=model,
        )

    def broken(self, error: Exception, worker_id: str, model: str, now_ms: int) -> FinishedJob:
        """Return the end of a job whose answer makes the publisher raise: failed, with the answer
        if it can be encoded. Never raises.
        """
        log.error("Job %s fails: it could not be published", self.job.job_id, exc_info=error)
        words = f"the worker could not publish this job: {type(error).__name__}"
        self.error = JobError(INTERNAL_ERROR, words)
        try:
            self.answer.end_all(FinishReason.ERROR)
            found = self.finished(worker_id, model, now_ms)
            encode(found.result), encode(found.final_chunk)
            return found
        except Exception:
            log.exception("Job %s ends without its answer: it is unreadable", self.job.job_id)
        return FinishedJob.build(
            self.job.delivery,
            JobStatus.FAILED,
            worker_id=worker_id,
            now_ms=now_ms,
            request=self.job.request,
            error=self.error,
            model=model,
        )
