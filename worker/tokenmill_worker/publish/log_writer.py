"""Appends the chunks of running jobs to the log: the longest waiting first, one call at a time.

A job becomes due when its chunk is full, or when the chunk has waited long enough for more tokens.
While the log cannot be reached, jobs stay due and chunks stay unconfirmed; the same bytes are sent
again later.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable

from tokenmill.transport.backoff import Backoff
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.errors import Unavailable
from tokenmill_worker.jobs import (
    AppendFailures,
    AppendReply,
    CancelOrder,
    ChunkAppend,
    ChunkLog,
    PublishReport,
)
from tokenmill_worker.publish.running_job import RunningJob

log = logging.getLogger(__name__)

LOG_ERRORS = (OSError, Unavailable)  # the outcome of the append is unknown: send it again
RETRY_BACKOFF = Backoff(first_s=0.05, longest_s=2.0, spread=(1.0, 1.0))


class LogWriter:
    """Queues jobs that have chunks to append, and appends them. A chunk that is not full waits at
    most `chunk_wait_s` for more tokens. `close` is called with the request id of a job that is
    another worker's now, `set_aside` with a job whose chunks make the call raise.
    """

    def __init__(
        self,
        log: ChunkLog,
        max_appends: int,
        chunk_wait_s: float,
        close: Callable[[str], None],
        set_aside: Callable[[RunningJob, Exception, PublishReport], None],
    ) -> None:
        # Jobs with something to append, by request id, longest waiting first.
        self.due: dict[str, RunningJob] = {}
        # Jobs whose chunk is not full, each with the time since when: oldest first.
        self._partial: dict[str, tuple[RunningJob, float]] = {}
        self._log = log
        self._max_appends = max_appends
        self._chunk_wait_s = chunk_wait_s
        self._close = close
        self._set_aside = set_aside
        self._failures = 0  # consecutive failures of the log
        self._retry_at = 0.0  # monotonic seconds
        self._appending = asyncio.Lock()

    def enqueue(self, jobs: dict[str, RunningJob]) -> None:
        """Queue jobs that got tokens, and jobs whose chunk has waited long enough."""
        due, partial = self.due, self._partial
        for request_id, running in jobs.items():
            if running.chunker.is_due:
                due.setdefault(request_id, running)
                if partial:
                    partial.pop(request_id, None)
            elif (
                request_id not in due and running.job.request.stream and running.chunker.num_waiting
            ):
                partial.setdefault(request_id, (running, time.monotonic()))
        if partial:
            self._end_waits(time.monotonic() - self._chunk_wait_s)

    def _end_waits(self, before: float) -> None:
        """Make chunks due that have waited for more tokens since `before`."""
        while self._partial:
            request_id, (running, since) = next(iter(self._partial.items()))
            if since > before:
                return
            del self._partial[request_id]
            self.due.setdefault(request_id, running)

    def forget(self, request_id: str) -> None:
        """Remove a job with all that it has to append."""
        self.due.pop(request_id, None)
        self._partial.pop(request_id, None)

    @property
    def has_pending(self) -> bool:
        """Return whether chunks wait for the log, or for more tokens."""
        return bool(self.due or self._partial)

    @property
    def is_behind(self) -> bool:
        """Return whether the last append failed."""
        return self._failures > 0

    @property
    def should_append(self) -> bool:
        """Return whether a chunk waits, and the pause after a failure is over."""
        return bool(self.due) and time.monotonic() >= self._retry_at

    @property
    def num_unlogged(self) -> int:
        """The number of tokens that wait for the log."""
        return sum(running.chunker.num_unlogged for running in self.due.values())

    async def hurry(self) -> None:
        """Make all chunks due, and end the pause after a failure once a call under way has
        returned.
        """
        async with self._appending:
            self._retry_at = 0.0
        self._end_waits(math.inf)

    async def append(
        self, report: PublishReport, fast: dict[RunningJob, ChunkAppend], together: bool
    ) -> None:
        """Append the chunks in `fast`, and chunks of due jobs, as many as one call may have.
        `together`: waiting tokens of a choice share chunks.
        """
        async with self._appending:  # order within a job is the order of the calls
            items, owners = list(fast.values()), list(fast)
            self._collect(items, owners, together, report)
            try:
                failures = await self._log.append(items)
            except BaseException as error:
                _requeue(fast)
                if isinstance(error, LOG_ERRORS):
                    self._postpone(error)
                elif isinstance(error, Exception):
                    await self._append_each(items, owners, report)
                else:
                    raise
                self._requeue_served(fast)
                return
            if self._failures:
                log.info(
                    "Chunks are appended to the logs again; %d tokens still wait", self.num_unlogged
                )
            self._failures, self._retry_at = 0, 0.0
            if failures:
                _requeue(fast)
                self._apply(items, owners, failures, report)
            else:  # the usual case; a fast chunk needs no confirmation
                for running in owners[len(fast) :]:
                    running.chunker.confirm()
            if failures or self.due:
                self._requeue_served(owners)

    def _collect(
        self,
        items: list[ChunkAppend],
        owners: list[RunningJob],
        together: bool,
        report: PublishReport,
    ) -> None:
        broken: list[tuple[RunningJob, Exception]] = []
        for running in self.due.values():
            room = self._max_appends - len(items)
            if room <= 0:
                break
            try:
                chunks = running.chunker.appends(room, together)
            except Exception as error:
                broken.append((running, error))
                continue
            items += chunks
            owners += [running] * len(chunks)
        for running, problem in broken:
            self._set_aside(running, problem, report)

    async def _append_each(
        self, items: list[ChunkAppend], owners: list[RunningJob], report: PublishReport
    ) -> None:
        """Append each job's chunks in a call of its own, after a call for all raised. Set aside the
        jobs whose call raises. The others stay due: their next append finds its chunks in the log.
        """
        for running in dict.fromkeys(owners):
            own = [item for owner, item in zip(owners, items, strict=True) if owner is running]
            try:
                await self._log.append(own)
            except LOG_ERRORS as error:
                self._postpone(error)
                return
            except Exception as error:
                if running.is_open:
                    self._set_aside(running, error, report)

    def _apply(
        self,
        items: list[ChunkAppend],
        owners: list[RunningJob],
        failures: AppendFailures,
        report: PublishReport,
    ) -> None:
        """Confirm the chunks that were logged, and act on the other replies. A job that is sent
        again from the log's end ignores its later replies in this call.
        """
        rewound: set[RunningJob] = set()
        for place, (running, item) in enumerate(zip(owners, items, strict=True)):
            reply, end = failures.get(place, (AppendReply.OK, item.end))
            if running in rewound or not running.is_open:
                continue
            if reply in (AppendReply.LOST, AppendReply.GONE):
                self._close(running.request_id)
                report.lost.append(running.job.delivery)
            elif reply is AppendReply.GAP:
                rewound.add(running)
                log.warning(
                    "The log of job %s ends with entry %d, not %d; the rest is appended again",
                    item.chunk.job_id,
                    end,
                    item.start,
                )
                running.chunker.seek(end)
            else:
                running.chunker.confirm()
                if reply is AppendReply.CANCELLED and not running.is_cancelled:
                    running.is_cancelled = True
                    report.cancel.append(CancelOrder(running.request_id, FinishReason.CANCELLED))

    def _requeue_served(self, owners: Iterable[RunningJob]) -> None:
        """Move jobs whose chunks were sent to the end of the queue of due jobs, or out of it."""
        due = self.due
        for running in dict.fromkeys(owners):
            if running.is_open:
                due.pop(running.request_id, None)
                if running.chunker.is_due:
                    due[running.request_id] = running

    def _postpone(self, error: Exception) -> None:
        if not self._failures:
            log.warning(
                "Chunks cannot be appended to the logs; they wait until Redis answers: %s", error
            )
        self._failures += 1
        self._retry_at = time.monotonic() + RETRY_BACKOFF.delay_s(self._failures)


def _requeue(fast: dict[RunningJob, ChunkAppend]) -> None:
    for running, append in fast.items():
        running.chunker.requeue(append)
