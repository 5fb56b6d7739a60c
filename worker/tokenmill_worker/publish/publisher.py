"""Turns the engine's events of one step into text, and the text into chunks: one append for all
jobs.

The publisher keeps the answers of running jobs. While the log cannot be reached, answers grow on,
and their chunks are sent later. A job that ends meanwhile is reported all the same, because its
result replaces its log. The report says what the engine must stop: the publisher calls neither
engine nor SQL.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.jobs import AdmittedJob, CancelOrder, ChunkAppend, ChunkLog, PublishReport
from tokenmill_worker.publish.chunker import CHECKPOINT_TOKENS, Chunker
from tokenmill_worker.publish.log_writer import LogWriter
from tokenmill_worker.publish.running_job import RunningJob


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
        clock: ServerClock | None = None,
    ) -> None:
        self._worker_id = worker_id
        self._model = model
        self._limits = limits or PublishLimits()
        self._clock = clock or ServerClock()
        self._writer = LogWriter(
            log, self._limits.max_appends, self._limits.chunk_wait_s, self.close, self._set_aside
        )
        # By request id, because a job may be claimed again.
        self._running: dict[str, RunningJob] = {}

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
        self._writer.forget(request_id)

    @property
    def has_pending(self) -> bool:
        """Return whether chunks wait for the log, or for more tokens. Then `handle` or `flush` must
        be called again.
        """
        return self._writer.has_pending

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
        writer.enqueue(touched)
        if fast or writer.should_append:
            together = writer.is_behind or _of_several_steps(events, len(fast) + len(touched))
            await writer.append(report, fast, together)
        if touched:
            self._finish(touched, report)
        return report

    async def flush(self) -> PublishReport:
        """Try to append what waits, full or not, without regard to the pause after a failure."""
        await self._writer.hurry()
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
        now_ms = self._clock.now_ms()
        may_be_fast = (
            not (writer.due or writer.is_behind) and len(events) <= self._limits.max_appends
        )
        for event in events:
            running = self._running.get(event.request_id)
            if running is None:
                continue
            try:
                if running in fast:  # by an earlier step of the same call
                    del fast[running]
                    running.chunker.withdraw()
                elif may_be_fast and (append := running.fast_chunk(event)) is not None:
                    fast[running] = append
                    continue
                order = running.apply(event, now_ms, report.cancel)
            except Exception as error:
                touched.pop(event.request_id, None)
                self._set_aside(running, error, report)
                continue
            if order is None:
                touched[event.request_id] = running
            else:  # the next delivery sends the rest
                report.retry.append(order)
                touched.pop(event.request_id, None)
                self.close(event.request_id)
        return fast, touched

    def _finish(self, touched: dict[str, RunningJob], report: PublishReport) -> None:
        for request_id, running in touched.items():
            try:
                if not (running.answer.is_finished and running.is_open):
                    continue
                finished = running.finished(self._worker_id, self._model, self._clock.now_ms())
            except Exception as error:
                self._set_aside(running, error, report)
                continue
            self.close(request_id)
            report.finished.append(finished)

    def _set_aside(self, running: RunningJob, error: Exception, report: PublishReport) -> None:
        """End a job whose answer makes a step raise; the others go on."""
        self.close(running.request_id)
        report.cancel.append(CancelOrder(running.request_id, FinishReason.ERROR))
        now_ms = self._clock.now_ms()
        report.finished.append(running.broken(error, self._worker_id, self._model, now_ms))


def _of_several_steps(events: Sequence[TokenEvent], num_jobs: int) -> bool:
    """Return whether the events come from several steps, which piled up during an append."""
    return len(events) > num_jobs and len(events) > len(
        {(event.request_id, event.choice) for event in events}
    )


EVENTS_AT_ONCE = 512  # they take the event loop a millisecond or two


def split_batches(
    events: Sequence[TokenEvent], urgent: Container[str], at_once: int
) -> Iterator[Sequence[TokenEvent]]:
    """Yield the urgent requests' events first, then the others' in parts of at most `at_once`
    events. Between two parts, other tasks of the event loop can run. All events of one request are
    in one part, and so share chunks. At most `at_once` events are yielded as they are.
    """
    if len(events) <= at_once:
        yield events
        return
    first = [event for event in events if event.request_id in urgent]
    if first:
        yield first
    rest = [event for event in events if event.request_id not in urgent] if first else events
    part: list[TokenEvent] = []
    for of_one in _by_request(rest):
        if part and len(part) + len(of_one) > at_once:
            yield part
            part = []
        part += of_one
    if part:
        yield part


def _by_request(events: Iterable[TokenEvent]) -> Iterable[list[TokenEvent]]:
    found: dict[str, list[TokenEvent]] = {}
    for event in events:
        found.setdefault(event.request_id, []).append(event)
    return found.values()
