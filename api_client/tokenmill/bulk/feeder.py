"""Keeps a bounded number of a batch's jobs in the queue: submits lines, collects ended jobs,
submits more.

    pending ── submit ───▶ open ── ended ──────────────▶ answered
       │                    │ ▲                             ▲
       │          not there ▼ │ submitted again             │
       │                    lost ── recorded, or too late ──┤
       ├─ bad, or recorded by an earlier run ───────────────┤
       └─ cancelled or too late: `reject_rest` ─────────────┘

These are the states of a line. `submit` ends when no line is pending, or when the batch is
cancelled or late; `drain` ends when no job is open or lost. At most `window` jobs and WINDOW_BYTES
of requests are open.

A job's id is derived from its line, so a group that is submitted twice is in the queue once. A job
that the queue has lost is looked up in the database, and submitted again if it is not there either.
Callers start and end the batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from tokenmill.bulk import job_queries
from tokenmill.bulk.batch import Batch, BatchState
from tokenmill.bulk.collector import Collector
from tokenmill.bulk.formats import input_file
from tokenmill.bulk.formats.input_file import job_id, line_of
from tokenmill.bulk.formats.output_line import CANCELLED, EXPIRED, UNREADABLE, unanswered
from tokenmill.bulk.pending_lines import PendingLines
from tokenmill.bulk.progress import WINDOW, BatchProgress, CallRetries, RunLimits
from tokenmill.bulk.store import BatchStore
from tokenmill.client import Client
from tokenmill.errors import IdempotencyConflict, InvalidRequest, QueueRefusal
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.openai_batch import LineError
from tokenmill_schemas.result import JobResult, JobStatus

WINDOW_BYTES: Final = 64 * 1024 * 1024
GROUP: Final = 250
IDLE_SYNCS: Final = 3
POLL_S: Final = 0.2  # between two polls of the oldest open jobs
SWEEP_S: Final = 2.0  # between two polls of all open jobs
SYNC_S: Final = 1.0  # how often the batch's record is written and read


class BatchFeeder:
    """One run over one file. `is_resumed`: part of the file may have been submitted before.

    If answers are kept in files, these show which lines are done. Otherwise every line after
    `over_line` is submitted again; this changes nothing if the queue has its job, and lets this run
    observe the job's end."""

    def __init__(
        self,
        client: Client,
        store: BatchStore,
        batch: Batch,
        collector: Collector,
        *,
        repeated_lines: input_file.LineSet,
        limits: RunLimits,
        is_resumed: bool,
    ) -> None:
        self._client = client
        self._store = store
        self._batch = batch
        self._collector = collector
        self._lines = PendingLines(batch, collector, repeated_lines, min(GROUP, limits.window))
        self._limits = limits
        self._is_resumed = is_resumed
        self._retries = CallRetries(limits.retry_for_s, self._report)
        # this run has handled all lines up to `_reached`
        self._reached = 0 if collector.keeps_answers else batch.over_line
        self._noted = batch.submitted
        self.state = BatchState.IN_PROGRESS
        self._synced_at = 0.0
        self._polled_at = 0.0
        self._swept_at = 0.0
        self._written: list[str] = []  # jobs in the files that the queue may drop
        self._waiting_for = ""
        self._group_size = GROUP  # jobs per call; fewer if the queue never has room for so many
        self._has_given_up = False
        self._lost: list[JobRequest] = []
        self._num_ended = -1
        self._num_idle_syncs = 0

    @property
    def may_submit(self) -> bool:
        """True while more lines may be submitted."""
        return self.state is BatchState.IN_PROGRESS and not self.is_late

    @property
    def is_late(self) -> bool:
        return self._is_late_by(0)

    def _is_late_by(self, seconds: float) -> bool:
        return 0 < self._batch.expires_ms <= self._client.clock.now_ms() - seconds * 1000

    def submit(self, path: Path) -> None:
        """Submit every line that is not done, until all are in the queue or the batch is cancelled
        or late."""
        self._sync_record(force=True)
        for jobs, bad, reached in self._lines.groups(path, self._reached):
            if not self._has_room():
                break
            self._answer_bad(bad)
            self._submit_lost()
            self._submit(self._unrecorded(jobs))
            if not self.may_submit:  # perhaps not all of them were submitted
                break
            self._reached = reached
            # readers expect no open job further behind than WINDOW and a part of the file
            self._sync_record(force=reached - self._noted > WINDOW)
        if self.may_submit:
            self._reached = self._batch.last_line
        self._sync_record(force=True)

    def drain(self) -> None:
        """Return when every open job has ended. Cancel them if the batch is cancelled or long past
        its deadline."""
        while self._collector.jobs or self._lost:
            self._submit_lost()
            self._poll()
            if self._is_late_by(self._limits.late_s) and not self._has_given_up:
                self._has_given_up = True  # no live worker has expired the jobs
                self._cancel_open()
        self._drop_written()
        self._sync_record(force=True)
        self._report()

    def reject_rest(self, path: Path, why: LineError) -> None:
        """Answer every line that was never submitted with the error `why`."""
        rest: list[input_file.BadLine] = []
        for line in self._lines.pending(path, self._reached):
            rest.append(unanswered(line.line, line.custom_id, why))
            if len(rest) >= GROUP:
                self._answer_bad(self._unsubmitted(rest))
                rest = []
        self._answer_bad(self._unsubmitted(rest))
        if self._reached >= self._batch.submitted:
            self._reached = self._batch.last_line
        self._noted = self._batch.last_line
        self._sync_record(force=True)
        self._report()

    # ── lines in ──

    def _answer_bad(self, bad: Sequence[input_file.BadLine]) -> None:
        if bad:
            self._retries.run(lambda: self._store.reject(self._batch.id, bad))
            self._collector.take_bad(bad)

    def _unrecorded(self, jobs: list[JobRequest]) -> list[JobRequest]:
        """Return the jobs without a recorded result. After an interruption, jobs may have ended
        long ago: the database still has them, the queue does not."""
        if not self._is_resumed:
            return jobs
        known = self._retries.run(lambda: self._store.recorded([job.job_id for job in jobs]))
        self._collector.take(list(known.values()))
        return [job for job in jobs if job.job_id not in known]

    def _unsubmitted(self, lines: list[input_file.BadLine]) -> list[input_file.BadLine]:
        """Return the lines without a job. An earlier run may have submitted some; those jobs end
        alone."""
        if not self._is_resumed or self._collector.keeps_answers:
            return lines
        names = [job_id(self._batch.id, bad.line) for bad in lines]
        known = self._retries.run(
            lambda: {*job_queries.is_over(self._client, names), *self._store.recorded(names)}
        )
        return [bad for name, bad in zip(names, lines, strict=True) if name not in known]

    def _submit(self, jobs: Sequence[JobRequest]) -> None:
        """Submit jobs and open them. The queue takes all jobs of a call or none; if it never has
        room for so many, half as many are tried."""
        while jobs:
            part, rest = jobs[: self._group_size], jobs[self._group_size :]
            try:
                self._retries.run(partial(job_queries.submit_jobs, self._client, part))
            except QueueRefusal as refusal:  # the queue is full, or the tenant's rate is exceeded
                self._open([job for job in part if job.job_id in refusal.accepted])
                jobs = [job for job in jobs if job.job_id not in refusal.accepted]
                if not refusal.accepted:
                    self._group_size = max(1, len(part) // 2)
                self._waiting_for = str(refusal)
                self._poll()
                if not self.may_submit:
                    return
            except (IdempotencyConflict, InvalidRequest) as error:
                if len(part) == 1:
                    self._reject(part[0], error)
                else:
                    for job in part:  # one of them made their call fail
                        self._submit([job])
                jobs = rest
            else:
                self._open(part)
                self._group_size = min(GROUP, 2 * self._group_size)
                jobs = rest

    def _open(self, jobs: Sequence[JobRequest]) -> None:
        for job in jobs:
            self._collector.open(job)

    def _reject(self, job: JobRequest, error: Exception) -> None:
        line, name = self._line_of(job), job.metadata["custom_id"]
        self._answer_bad([input_file.BadLine(line, name, "invalid_value", str(error), None, 400)])

    # ── ends ──

    def _has_room(self) -> bool:
        """Wait until the window has room. Return False if nothing more may be submitted."""
        if time.monotonic() - self._polled_at >= POLL_S:
            self._poll()
        while self.may_submit and self._is_full():
            self._poll()
        return self.may_submit

    def _is_full(self) -> bool:
        group = min(GROUP, self._limits.window)
        return (
            len(self._collector.jobs) > self._limits.window - group
            or self._collector.num_bytes > WINDOW_BYTES
        )

    def _poll(self) -> None:
        time.sleep(max(0.0, self._polled_at + POLL_S - time.monotonic()))
        self._polled_at = time.monotonic()
        self._collect()
        self._sync_record()
        self._report()

    def _collect(self) -> None:
        """Collect ended jobs, oldest group first, up to a mostly open group; every SWEEP_S look at
        all."""
        is_sweep = time.monotonic() - self._swept_at >= SWEEP_S
        if is_sweep:
            self._swept_at = time.monotonic()
        lines = list(self._collector.jobs)
        for start in range(0, len(lines), GROUP):
            names = [job_id(self._batch.id, line) for line in lines[start : start + GROUP]]
            ends = self._retries.run(
                partial(job_queries.collect, self._client, names, self._written)
            )
            self._collector.take([self._in_time(result) for result in ends.results])
            self._written = (
                [result.job_id for result in ends.results] if self._collector.keeps_answers else []
            )
            for job in self._not_recorded(ends.unknown):
                self._collector.drop(job)
                self._lost.append(job)
            self._answer_bad(self._as_bad(self._not_recorded(ends.unreadable), UNREADABLE))
            if 2 * len(ends.results) < len(names) and not is_sweep:
                return

    def _drop_written(self) -> None:
        if self._written:
            self._retries.run(partial(job_queries.collect, self._client, (), self._written))
            self._written = []

    def _in_time(self, result: JobResult) -> JobResult:
        """Return the result, as expired if this run cancelled the job because its deadline had
        passed."""
        if (
            self._has_given_up
            and result.status is JobStatus.CANCELLED
            and self.state is not BatchState.CANCELLING
        ):
            return msgspec.structs.replace(result, status=JobStatus.EXPIRED)
        return result

    def _not_recorded(self, names: Sequence[str]) -> list[JobRequest]:
        """Collect the recorded results of these open jobs; return the other jobs."""
        if not names:
            return []
        known = self._retries.run(lambda: self._store.recorded(names))
        self._collector.take(list(known.values()))
        return [
            self._collector.jobs[line_of(self._batch.id, name)]
            for name in names
            if name not in known
        ]

    def _as_bad(self, jobs: Sequence[JobRequest], why: LineError) -> list[input_file.BadLine]:
        return [unanswered(self._line_of(job), job.metadata["custom_id"], why) for job in jobs]

    def _line_of(self, job: JobRequest) -> int:
        return line_of(self._batch.id, job.job_id)

    def _submit_lost(self) -> None:
        lost, self._lost = self._lost, []
        if self.may_submit:
            self._submit(lost)
        else:
            why = CANCELLED if self.state is BatchState.CANCELLING else EXPIRED
            self._answer_bad(self._as_bad(lost, why))

    # ── the batch's record ──

    def _sync_record(self, *, force: bool = False) -> None:
        """Write the progress, and read whether the batch was cancelled."""
        if not force and time.monotonic() - self._synced_at < SYNC_S:
            return
        self._synced_at = time.monotonic()
        self._noted = max(self._noted, self._reached)
        lost = map(self._line_of, self._lost)
        over_line = min([self._reached + 1, *self._collector.jobs, *lost]) - 1
        totals = self._collector.up_to(over_line)
        self._retries.run(
            lambda: self._store.progress(
                self._batch.id, submitted=self._noted, over_line=over_line, totals=totals
            )
        )
        before = self.state
        self.state = self._retries.run(lambda: self._store.get(self._batch.id)).state
        if self.state is BatchState.CANCELLING and before is not BatchState.CANCELLING:
            self._cancel_open()
        self._check_idle()

    def _cancel_open(self) -> None:
        names = [job_id(self._batch.id, line) for line in self._collector.jobs]
        self._retries.run(lambda: job_queries.cancel(self._client, names))

    def _check_idle(self) -> None:
        """Report a queue without a worker; otherwise it looks like a queue with a slow one."""
        ended = self._collector.totals.ended
        is_idle = ended == self._num_ended and bool(self._collector.jobs)
        self._num_ended, self._num_idle_syncs = ended, self._num_idle_syncs + 1 if is_idle else 0
        if self._num_idle_syncs >= IDLE_SYNCS:
            self._waiting_for = (
                "" if self._retries.run(self._client.workers) else "no worker serves this queue"
            )
        elif not is_idle:
            self._waiting_for = ""

    def _report(self) -> None:
        note = self._retries.note or self._waiting_for
        jobs, totals = self._collector.jobs, self._collector.totals
        self._limits.on_progress(
            BatchProgress(self._batch.total, len(jobs), totals, note, self._collector.generated)
        )
