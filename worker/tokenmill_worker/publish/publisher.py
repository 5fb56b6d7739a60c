"""Turns the engine's events of one step into text, and the text into chunks: one append for all
jobs.

The publisher keeps the answers of running jobs. While the log cannot be reached, answers grow on,
and their chunks are sent later. A job that ends meanwhile is reported all the same, because its
result replaces its log. The report says what the engine must stop: the publisher calls neither
engine nor SQL.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobError, JobStatus
from tokenmill_worker.engine.types import TokenEvent
from tokenmill_worker.jobs import (
    AdmittedJob,
    CancelOrder,
    ChunkAppend,
    ChunkLog,
    FinishedJob,
    PublishReport,
    retry_order,
)
from tokenmill_worker.publish.chunker import CHECKPOINT_TOKENS, Chunker
from tokenmill_worker.publish.log_writer import LogWriter, RunningJob


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """Limits of one publisher. Claiming should stop once `max_unlogged` tokens wait for the log.
    One call carries at most `max_appends` chunks. A stream's chunk takes `chunk_tokens` tokens; the
    first waits at most `chunk_wait_s` for the others.
    """

    checkpoint_tokens: int = CHECKPOINT_TOKENS
    chunk_tokens: int = 1
    chunk_wait_s: float = 0.1
    max_unlogged: int = 50_000
    max_appends: int = 2_048


class Publisher:
    """Publishes the jobs of one worker. `handle` is called once per engine step."""

    def __init__(
        self,
        log: ChunkLog,
        *,
        worker_id: str = "",
        model: str = "",
        limits: PublishLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._worker_id = worker_id
        self._model = model
        self._limits = limits or PublishLimits()
        self._clock = clock
        self._writer = LogWriter(log, self._limits.max_appends, self.close)
        # By request id, here and below, because a job may be claimed again.
        self._running: dict[str, RunningJob] = {}
        # Jobs whose chunk is not full: since when, oldest first.
        self._partial: dict[str, float] = {}

    # ── jobs ──

    def open(self, job: AdmittedJob) -> None:
        """Publish the job's events from now on. The publisher owns the job's answer."""
        self.close(job.request_id)
        limits = self._limits
        chunker = Chunker(job, limits.checkpoint_tokens, limits.chunk_tokens)
        self._running[job.request_id] = RunningJob(job, chunker)

    def close(self, request_id: str) -> None:
        """Forget a job that was given back or lost; its further events are ignored."""
        running = self._running.pop(request_id, None)
        if running is not None:
            running.is_open = False
        self._writer.due.pop(request_id, None)
        self._partial.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_pending(self) -> bool:
        """Do chunks wait for the log, or for more tokens? Then `handle` or `flush` must be called
        again.
        """
        return bool(self._writer.due or self._partial)

    @property
    def is_full(self) -> bool:
        return self.num_unlogged >= self._limits.max_unlogged

    @property
    def num_unlogged(self) -> int:
        """The number of tokens that wait for the log."""
        return self._writer.num_unlogged

    # ── one step ──

    async def handle(self, events: Sequence[TokenEvent]) -> PublishReport:
        """Apply a step's events and append their chunks: at most one call to the log, which may
        fail.
        """
        report, writer = PublishReport(), self._writer
        fast, touched = self._apply_events(events, report)
        if touched:
            self._enqueue(touched)
        if self._partial:
            self._end_partial(time.monotonic() - self._limits.chunk_wait_s)
        if fast or writer.should_append:
            together = writer.is_behind or _of_several_steps(events, len(fast) + len(touched))
            await writer.append(report, fast, together)
        if touched:
            self._finish(touched, report)
        return report

    async def flush(self) -> PublishReport:
        """Try to append what waits, full or not, without regard to the pause after a failure."""
        await self._writer.end_pause()
        self._end_partial(math.inf)
        return await self.handle(())

    def _apply_events(
        self, events: Sequence[TokenEvent], report: PublishReport
    ) -> tuple[dict[RunningJob, ChunkAppend], dict[str, RunningJob]]:
        """Split the events: jobs that got exactly one plain token (their chunk is built here), and
        all other jobs.
        """
        writer = self._writer
        fast: dict[RunningJob, ChunkAppend] = {}
        touched: dict[str, RunningJob] = {}
        may_be_fast = (
            not (writer.due or writer.is_behind) and len(events) <= self._limits.max_appends
        )
        for event in events:
            running = self._running.get(event.request_id)
            if running is None:
                continue
            if running in fast:  # by an earlier step of the same call
                del fast[running]
                running.chunker.withdraw()
            elif may_be_fast and (append := _fast_chunk(running, event)) is not None:
                fast[running] = append
                continue
            self._apply(running, event, report)
            touched[event.request_id] = running
        for order in report.retry:  # closed: the next delivery sends the rest
            touched.pop(order.delivery.request_id, None)
        return fast, touched

    def _enqueue(self, touched: dict[str, RunningJob]) -> None:
        due, partial = self._writer.due, self._partial
        for request_id, running in touched.items():
            if running.chunker.is_due:
                due.setdefault(request_id, running)
                if partial:
                    partial.pop(request_id, None)
            elif (
                request_id not in due and running.job.request.stream and running.chunker.num_waiting
            ):
                partial.setdefault(request_id, time.monotonic())

    def _end_partial(self, before: float) -> None:
        """Make chunks due that have waited for more tokens since `before`."""
        while self._partial and (oldest := next(iter(self._partial.items())))[1] <= before:
            del self._partial[oldest[0]]
            self._writer.due.setdefault(oldest[0], self._running[oldest[0]])

    def _apply(self, running: RunningJob, event: TokenEvent, report: PublishReport) -> None:
        answer, request_id = running.answer, event.request_id
        if event.finish_reason is FinishReason.ERROR and self._concerns(running, event):
            code = event.error_code or "engine_error"
            running.error = JobError(
                code, event.error or "the engine failed", retryable=code == "engine_error"
            )
            if len(answer.choices) > 1:
                report.cancel.append(CancelOrder(request_id, FinishReason.ERROR))
            order = retry_order(running.job, running.error)
            if order is not None:
                report.retry.append(order)
                self.close(request_id)
            else:
                answer.end_all(FinishReason.ERROR)
            return
        choice = answer.choices[event.choice]
        if choice.finish_reason is not None:
            return
        if not answer.num_tokens:
            self._note_first(running, event)
        if event.preemptions > choice.preemptions:
            choice.preemptions = event.preemptions
        if answer.push(event.choice, event.token_ids, event.logprobs):
            if event.finish_reason is None:
                report.cancel.append(CancelOrder(request_id, FinishReason.STOP, event.choice))
        elif event.finish_reason is not None:
            answer.end(event.choice, event.finish_reason, with_last_token=bool(event.token_ids))

    def _concerns(self, running: RunningJob, event: TokenEvent) -> bool:
        """Does an error concern the job? It does not if a stop string has already ended its choice.
        A refusal of the whole request names choice 0, even if an earlier attempt finished that
        choice.
        """
        is_running = running.answer.choices[event.choice].finish_reason is None
        return is_running or event.choice in running.job.generation.done

    def _note_first(self, running: RunningJob, event: TokenEvent) -> None:
        answer = running.answer
        answer.cached_tokens = min(event.num_cached_tokens, answer.prompt_tokens)
        if event.token_ids:
            answer.ttft_ms = max(0, self._now_ms() - running.job.delivery.created_ms)

    def _finish(self, touched: dict[str, RunningJob], report: PublishReport) -> None:
        for request_id, running in touched.items():
            if running.answer.is_finished and running.is_open:
                self.close(request_id)
                report.finished.append(
                    FinishedJob.build(
                        running.job.delivery,
                        JobStatus.FAILED if running.error else running.answer.status,
                        worker_id=self._worker_id,
                        now_ms=self._now_ms(),
                        request=running.job.request,
                        answer=running.answer,
                        error=running.error,
                        model=self._model,
                    )
                )

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)


def _fast_chunk(running: RunningJob, event: TokenEvent) -> ChunkAppend | None:
    """Return the chunk of an event that is one plain token of a stream; None for others."""
    if event.finish_reason is not None or len(event.token_ids) != 1:
        return None
    return (
        running.chunker.fast_chunk(event.token_ids[0])
        if event.preemptions == running.first.preemptions
        else None
    )


def _of_several_steps(events: Sequence[TokenEvent], num_jobs: int) -> bool:
    """Do the events come from several steps, which piled up during an append?"""
    return len(events) > num_jobs and len(events) > len(
        {(event.request_id, event.choice) for event in events}
    )
