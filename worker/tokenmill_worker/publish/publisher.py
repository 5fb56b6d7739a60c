"""Turns the engine's events of one step into text, and the text into chunks: one append for all jobs.

The publisher keeps the answers of running jobs. While the log cannot be reached, answers grow on, and chunks are sent
when it is back. A job that ends meanwhile is reported all the same, because its result replaces its log. The report
says what the engine must stop: the publisher calls neither engine nor SQL.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import JobError, JobStatus
from tokenmill_worker.engine.types import TokenEvent
from tokenmill_worker.errors import Unavailable
from tokenmill_worker.jobs import (
    AdmittedJob,
    AppendFailures,
    AppendReply,
    CancelOrder,
    ChunkAppend,
    ChunkLog,
    FinishedJob,
    PublishReport,
    retry_order,
)
from tokenmill_worker.publish.chunker import CHECKPOINT_TOKENS, Chunker

log = logging.getLogger(__name__)

LOG_ERRORS = (OSError, Unavailable)  # the outcome of the append is unknown: send it again
RETRY_PAUSES_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True)
class PublishLimits:
    """Limits: intake should stop once `max_unlogged` tokens wait for the log, and one call carries at most
    `max_appends` chunks. A stream's chunk takes `chunk_tokens`; its first token waits at most `chunk_wait_s` for the
    others.
    """

    checkpoint_tokens: int = CHECKPOINT_TOKENS
    chunk_tokens: int = 1
    chunk_wait_s: float = 0.1
    max_unlogged: int = 50_000
    max_appends: int = 2_048


class _Running:
    """A job that is being published; its plain attributes are what every token needs."""

    __slots__ = ("answer", "chunker", "error", "first", "is_cancelled", "job", "request_id")

    def __init__(self, job: AdmittedJob, limits: PublishLimits) -> None:
        self.job = job
        self.request_id = job.request_id
        self.answer = job.answer
        self.first = job.answer.choices[0]
        self.chunker = Chunker(job, limits.checkpoint_tokens, limits.chunk_tokens)
        self.error: JobError | None = None
        self.is_cancelled = False


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
        self._log = log
        self._worker_id = worker_id
        self._model = model
        self._limits = limits or PublishLimits()
        self._clock = clock
        self._running: dict[
            str, _Running
        ] = {}  # key: request id, here and below, because a job may be claimed again
        self._due: dict[str, _Running] = {}  # jobs with something to append, longest waiting first
        self._gathering: dict[
            str, float
        ] = {}  # jobs whose chunk is not full: since when, oldest first
        self._failures = 0  # consecutive failures of the log
        self._retry_at = 0.0  # monotonic seconds
        self._appending = asyncio.Lock()

    # ── jobs ──

    def open(self, job: AdmittedJob) -> None:
        """Publish the job's events from now on. The publisher owns the job's answer."""
        self._running[job.request_id] = _Running(job, self._limits)

    def close(self, request_id: str) -> None:
        """Forget a job that was given back or lost; its further events are ignored."""
        self._running.pop(request_id, None)
        self._due.pop(request_id, None)
        self._gathering.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_pending(self) -> bool:
        """Do chunks wait for the log, or for more tokens? Then `handle` or `flush` must be called again."""
        return bool(self._due or self._gathering)

    @property
    def is_full(self) -> bool:
        return self.num_unlogged >= self._limits.max_unlogged

    @property
    def num_unlogged(self) -> int:
        """The number of tokens that wait for the log."""
        return sum(running.chunker.num_unlogged for running in self._due.values())

    # ── one step ──

    async def handle(self, events: Sequence[TokenEvent]) -> PublishReport:
        """Apply a step's events and append their chunks: at most one call to the log, which may fail."""
        report = PublishReport()
        passed, touched = self._take_all(events, report)
        if touched:
            self._line_up(touched)
        if self._gathering:
            self._end_gathering(time.monotonic() - self._limits.chunk_wait_s)
        if passed or (self._due and time.monotonic() >= self._retry_at):
            is_behind = self._failures > 0 or _of_several_steps(events, len(passed) + len(touched))
            await self._append(report, passed, together=is_behind)
        if touched:
            self._finish(touched, report)
        return report

    async def flush(self) -> PublishReport:
        """Try to append what waits, full or not, without regard to the pause after a failure."""
        async with self._appending:
            self._retry_at = 0.0
        self._end_gathering(math.inf)
        return await self.handle(())

    def _take_all(
        self, events: Sequence[TokenEvent], report: PublishReport
    ) -> tuple[dict[_Running, ChunkAppend], dict[str, _Running]]:
        """Split the events: jobs that got one plain token, with their chunks, and all other jobs that got something."""
        passed: dict[_Running, ChunkAppend] = {}
        touched: dict[str, _Running] = {}
        may_pass = not (self._due or self._failures) and len(events) <= self._limits.max_appends
        for event in events:
            running = self._running.get(event.request_id)
            if running is None:
                continue
            if running in passed:  # by an earlier step of the same call
                del passed[running]
                running.chunker.take_back()
            elif may_pass and (append := _passed_on(running, event)) is not None:
                passed[running] = append
                continue
            self._take(running, event, report)
            touched[event.request_id] = running
        for order in report.retry:  # closed: the next delivery sends the rest
            touched.pop(order.delivery.request_id, None)
        return passed, touched

    def _line_up(self, touched: dict[str, _Running]) -> None:
        due, gathering = self._due, self._gathering
        for request_id, running in touched.items():
            if running.chunker.is_due:
                due.setdefault(request_id, running)
                if gathering:
                    gathering.pop(request_id, None)
            elif request_id not in due:
                self._gather(running)

    def _gather(self, running: _Running) -> None:
        if running.job.request.stream and running.chunker.num_waiting:
            self._gathering.setdefault(running.request_id, time.monotonic())

    def _end_gathering(self, before: float) -> None:
        """Make chunks due that have waited for more tokens since `before`."""
        while self._gathering and (oldest := next(iter(self._gathering.items())))[1] <= before:
            del self._gathering[oldest[0]]
            self._due.setdefault(oldest[0], self._running[oldest[0]])

    def _take(self, running: _Running, event: TokenEvent, report: PublishReport) -> None:
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

    def _concerns(self, running: _Running, event: TokenEvent) -> bool:
        """Does an error concern the job? Not if a stop string has already ended its choice. A refusal of the whole
        request names choice 0, even if an earlier attempt finished that choice.
        """
        is_running = running.answer.choices[event.choice].finish_reason is None
        return is_running or event.choice in running.job.generation.done

    def _note_first(self, running: _Running, event: TokenEvent) -> None:
        answer = running.answer
        answer.cached_tokens = min(event.num_cached_tokens, answer.prompt_tokens)
        if event.token_ids:
            answer.ttft_ms = max(0, self._now_ms() - running.job.delivery.created_ms)

    def _finish(self, touched: dict[str, _Running], report: PublishReport) -> None:
        for request_id, running in touched.items():
            if running.answer.is_finished and self._running.get(request_id) is running:
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

    # ── the log ──

    async def _append(
        self, report: PublishReport, passed: dict[_Running, ChunkAppend], together: bool
    ) -> None:
        """Append the chunks that `_take_all` passed on, and chunks that wait."""
        async with self._appending:  # order within a job is the order of the calls
            items, owners = list(passed.values()), list(passed)
            self._collect(items, owners, together)
            try:
                exceptions = await self._log.append(items)
            except BaseException as error:
                self._keep(passed)
                if not isinstance(error, LOG_ERRORS):
                    raise
                self._settle_due(passed)
                self._postpone(error)
                return
            if self._failures:
                log.info("the log is back: %d tokens wait for it", self.num_unlogged)
            self._failures, self._retry_at = 0, 0.0
            if exceptions:
                self._keep(passed)
                self._apply(items, owners, exceptions, report)
            else:  # usual; jobs that were passed on need no confirmation
                for running in owners[len(passed) :]:
                    running.chunker.confirm()
            if exceptions or self._due:
                self._settle_due(owners)

    def _keep(self, passed: dict[_Running, ChunkAppend]) -> None:
        for running, append in passed.items():
            running.chunker.keep(append)

    def _collect(self, items: list[ChunkAppend], owners: list[_Running], together: bool) -> None:
        """Add the next chunks of the jobs that have waited longest, as many as the call has room for."""
        for running in self._due.values():
            room = self._limits.max_appends - len(items)
            if room <= 0:
                break
            chunks = running.chunker.appends(room, together)
            items += chunks
            owners += [running] * len(chunks)

    def _apply(
        self,
        items: list[ChunkAppend],
        owners: list[_Running],
        exceptions: AppendFailures,
        report: PublishReport,
    ) -> None:
        rewound: set[_Running] = (
            set()
        )  # jobs sent again from the log's end: skip their other replies
        for place, (running, item) in enumerate(zip(owners, items, strict=True)):
            reply, end = exceptions.get(place, (AppendReply.OK, item.end))
            request_id = running.request_id
            if running in rewound or self._running.get(request_id) is not running:
                continue
            if reply is AppendReply.LOST:
                self.close(request_id)
                report.lost.append(running.job.delivery)
            elif reply is AppendReply.GAP:
                rewound.add(running)
                log.warning(
                    "the log of job %s ends with entry %d, not %d: its tail is sent again",
                    item.chunk.job_id,
                    end,
                    item.start,
                )
                running.chunker.seek(end)
            else:
                running.chunker.confirm()
                if reply is AppendReply.CANCELLED and not running.is_cancelled:
                    running.is_cancelled = True
                    report.cancel.append(CancelOrder(request_id, FinishReason.CANCELLED))

    def _settle_due(self, owners: Iterable[_Running]) -> None:
        """Move jobs whose chunks were sent to the end of the queue of due jobs, or out of it."""
        due = self._due
        for running in dict.fromkeys(owners):
            request_id = running.request_id
            if self._running.get(request_id) is running:
                due.pop(request_id, None)
                if running.chunker.is_due:
                    due[request_id] = running

    def _postpone(self, error: Exception) -> None:
        pause = RETRY_PAUSES_S[min(self._failures, len(RETRY_PAUSES_S) - 1)]
        if not self._failures:
            log.warning("the log cannot be reached (%s): chunks wait", error)
        self._failures += 1
        self._retry_at = time.monotonic() + pause


def _passed_on(running: _Running, event: TokenEvent) -> ChunkAppend | None:
    """Return the chunk of an event that only carries the next token of a plain stream, else None."""
    if event.finish_reason is not None or len(event.token_ids) != 1:
        return None
    return (
        running.chunker.pass_on(event.token_ids[0])
        if event.preemptions == running.first.preemptions
        else None
    )


def _of_several_steps(events: Sequence[TokenEvent], num_jobs: int) -> bool:
    """Do the events come from several steps, which piled up during an append?"""
    return len(events) > num_jobs and len(events) > len(
        {(event.request_id, event.choice) for event in events}
    )
