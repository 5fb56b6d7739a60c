"""Ends finished jobs: SQL first, then the acknowledgement. Every job passes through both.

    submit ──▶ to_record ──[ResultStore.record]──▶ to_acknowledge ──[Acknowledger.finish]──▶ done
       │       retried while SQL is down            ▲ retried while Redis is down
       └─────────────── in SQL already ─────────────┘

Both queues take whatever waits as one group, so load makes groups larger and not the wait longer.
Each goes on while the other is stuck. The finalizer never gives a job up. What it still holds
when the process ends is unacknowledged; the next worker that claims the job repeats the rest, which
changes nothing. The caller bounds the memory: it stops claiming while `is_full`, which follows from
an estimate of what each job holds. SQL and Redis are behind the two protocols.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from tokenmill.transport.backoff import Backoff
from tokenmill.transport.repairs import wait_at_most
from tokenmill_schemas.generation import TokenLogprob
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import ChoiceResult, JobResult, ScoredPrompt
from tokenmill_worker.jobs import Acknowledger, AdmittedJob, FinishedJob
from tokenmill_worker.record.already_recorded import (
    RecordedEnds,
    as_recorded,
    ended_without_id,
    recorded_by_us,
    without_content,
)
from tokenmill_worker.record.result_store import RecordReport
from tokenmill_worker.record.retry_queue import RetryQueue

log = logging.getLogger(__name__)


@dataclass(slots=True)
class FinalizerStats:
    """Counters since the start. `record_down_since` and `acknowledge_down_since` are monotonic
    seconds; None while the step works.
    """

    submitted: int = 0
    recorded: int = 0
    recorded_before: int = 0  # another attempt's row was there: a redelivered job
    sanitised: int = 0  # stored after removing what the database cannot hold
    refused: int = 0  # tries in which the database refused a job that was alone
    acknowledged: int = 0
    lost: int = 0  # recorded, but owned by another worker at the acknowledgement
    groups: int = 0
    record_failures: int = 0
    record_down_since: float | None = None
    acknowledge_down_since: float | None = None
    last_error: str = ""
    # of the transactions since they were last taken
    commit_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=1000))

    def take_commit_seconds(self) -> list[float]:
        taken = list(self.commit_seconds)
        self.commit_seconds.clear()
        return taken

    def note_group(self, report: RecordReport, num_ours: int, seconds: float) -> None:
        """Count a committed group, of which `num_ours` rows are this worker's."""
        self.commit_seconds.append(seconds)
        self.record_down_since = None
        self.groups += 1
        self.recorded += num_ours
        self.recorded_before += len(report.written) + len(report.existing) - num_ours
        self.sanitised += len(report.sanitised)
        self.refused += len(report.refused)
        for job_id, reason in report.refused.items():
            self.last_error = reason
            log.error("Job %s was refused by the database and is tried again: %s", job_id, reason)

    def note_acknowledged(self, num_jobs: int, num_lost: int) -> None:
        self.acknowledge_down_since = None
        self.acknowledged += num_jobs - num_lost
        self.lost += num_lost
        if num_lost:
            log.warning(
                "%d recorded jobs belong to other workers now, which acknowledge them", num_lost
            )

    def note_record_failure(self, error: Exception, num_waiting: int) -> None:
        self.record_failures += 1
        self.last_error = str(error)
        if self.record_down_since is None:
            self.record_down_since = time.monotonic()
            log.error("SQL cannot record results; %d jobs wait: %s", num_waiting, error)

    def note_acknowledge_failure(self, error: Exception, num_waiting: int) -> None:
        self.last_error = str(error)
        if self.acknowledge_down_since is None:
            self.acknowledge_down_since = time.monotonic()
            log.error("Redis cannot acknowledge recorded jobs; %d wait: %s", num_waiting, error)


OnRecorded = Callable[[list[FinishedJob]], None]


class ResultRecorder(Protocol):
    """The part of a store that the finalizer uses; implemented by ResultStore."""

    async def record(self, finished: Sequence[FinishedJob]) -> RecordReport: ...

    async def find(self, ids: Sequence[str]) -> dict[str, JobResult]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalizerLimits:
    max_buffered: int = 1024  # jobs in both queues from which on `is_full`
    max_buffered_bytes: int = 512 * 1024 * 1024  # likewise, by `size_of`
    max_group: int = 256
    max_group_bytes: int = 32 * 1024 * 1024
    linger_s: float = 0.25  # how long lines of a batch wait for others to share a transaction
    # a server that is back is noticed within two seconds
    record_backoff: Backoff = field(default_factory=lambda: Backoff(longest_s=2.0))
    acknowledge_backoff: Backoff = field(default_factory=lambda: Backoff(longest_s=2.0))


class Finalizer:
    """Records and acknowledges jobs while `run()` runs. Jobs may be submitted concurrently in one
    event loop.
    """

    def __init__(
        self,
        store: ResultRecorder,
        acknowledger: Acknowledger,
        limits: FinalizerLimits = FinalizerLimits(),
        *,
        on_recorded: OnRecorded | None = None,
    ) -> None:
        self.stats = FinalizerStats()
        self._store = store
        self._acknowledger = acknowledger
        self.limits = limits
        self._on_recorded = on_recorded
        self._changed = asyncio.Event()
        self._recorded_ends = RecordedEnds(store.find)
        self._to_record = RetryQueue[FinishedJob](
            self._record,
            limits.max_group,
            limits.record_backoff,
            on_failure=self._record_failed,
            can_wait=lambda finished: finished.is_batch_line,
            linger_s=limits.linger_s,
            size_of=size_of,
            max_group_bytes=limits.max_group_bytes,
        )
        self._to_acknowledge = RetryQueue[FinishedJob](
            self._acknowledge,
            limits.max_group,
            limits.acknowledge_backoff,
            on_failure=self._acknowledge_failed,
            size_of=size_of,
            max_group_bytes=limits.max_group_bytes,
        )

    def __len__(self) -> int:
        """Return the number of jobs that are not done, including those being written right now."""
        return len(self._to_record) + len(self._to_acknowledge)

    @property
    def is_full(self) -> bool:
        """Return whether claiming must stop. Running jobs may still be submitted: they cannot wait
        elsewhere.
        """
        return (
            len(self) >= self.limits.max_buffered
            or self.num_bytes >= self.limits.max_buffered_bytes
        )

    @property
    def num_bytes(self) -> int:
        """The estimated memory of the jobs that are not done."""
        return self._to_record.num_bytes + self._to_acknowledge.num_bytes

    @property
    def held_ids(self) -> list[str]:
        held = (*self._to_record.items, *self._to_acknowledge.items)
        return [item.result.job_id for item in held]

    async def submit(self, finished: FinishedJob) -> None:
        """Take a finished job. Never waits, because token streams must not stall while SQL does."""
        self.stats.submitted += 1
        self.stats.recorded_before += finished.is_recorded
        (self._to_acknowledge if finished.is_recorded else self._to_record).put([finished])

    async def skip_recorded(
        self, outcomes: Sequence[AdmittedJob | FinishedJob]
    ) -> list[AdmittedJob | FinishedJob]:
        """Replace redelivered jobs by the end that SQL has for them; see RecordedEnds."""
        if self.stats.record_down_since is not None:
            return list(outcomes)
        return await self._recorded_ends.skip_recorded(outcomes)

    async def run(self) -> None:
        """Work off both queues until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._to_record.run(), name="record")
            group.create_task(self._to_acknowledge.run(), name="acknowledge")

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything is done or the time is up; the jobs that are not done stay held."""
        deadline = time.monotonic() + timeout_s
        while len(self) and (left := deadline - time.monotonic()) > 0:
            self._changed.clear()
            await wait_at_most(self._changed, left)
        if len(self):
            log.warning(
                "%d finished jobs were not recorded in time; other workers record them", len(self)
            )

    async def _record(self, group: list[FinishedJob]) -> list[FinishedJob]:
        """Record a group. Returns the jobs to try again."""
        started = time.monotonic()
        report = await self._store.record(group)
        self._recorded_ends.resume()
        ours = recorded_by_us(group, report)
        self.stats.note_group(report, len(ours), time.monotonic() - started)
        undone = report.refused.keys() | report.broken.keys()
        done = [item for item in group if item.job_id not in undone]
        taken = [ended_without_id(item) for item in done if item.result.job_id in report.taken]
        kept = [
            as_recorded(item, report.existing)
            for item in done
            if item.result.job_id not in report.taken
        ]
        self._to_acknowledge.put([*kept, *taken])
        self._to_record.put(without_content(group, report))
        # The hook runs after the acknowledgement has started, so that metrics and log lines do not
        # delay the job's end.
        asyncio.get_running_loop().call_soon(_notify, self._on_recorded, [*ours, *taken])
        return [item for item in group if item.result.job_id in report.refused]

    async def _acknowledge(self, group: list[FinishedJob]) -> list[FinishedJob]:
        answers = await self._acknowledger.finish(group)
        lost = [item.result.job_id for item, ours in zip(group, answers, strict=True) if not ours]
        self.stats.note_acknowledged(len(group), len(lost))
        self._changed.set()
        return []

    def _record_failed(self, error: Exception) -> None:
        self.stats.note_record_failure(error, len(self._to_record))

    def _acknowledge_failed(self, error: Exception) -> None:
        self.stats.note_acknowledge_failure(error, len(self._to_acknowledge))


def _notify(hook: OnRecorded | None, group: list[FinishedJob]) -> None:
    """Call a hook. If it fails, its group must not be processed again."""
    if hook is None or not group:
        return
    try:
        hook(group)
    except Exception:
        log.exception(
            "The hook for recorded jobs failed; the jobs are recorded, their metrics are incomplete"
        )


# bytes of CPython objects, on 64 bits
_JOB: Final = 4_096
_TOKEN: Final = 72  # two numbers, and their places in `token_ids` and `text_ends`
_LOGPROB: Final = 168  # the struct, its number, the tuples of alternatives and of their bytes
_ALTERNATIVE: Final = 144  # a pair, its two numbers, its place, and that of its bytes


def size_of(finished: FinishedJob) -> int:
    """Return the estimated bytes of a job. Only lengths are read, so the cost does not grow with
    the tokens.
    """
    request = finished.request
    return (
        _JOB
        + sum(map(_of_choice, finished.result.choices))
        + _of_prompt(finished.result.prompt)
        + (_of_request(request) if request is not None else 0)
    )


def _of_prompt(prompt: ScoredPrompt | None) -> int:
    if prompt is None:
        return 0
    return len(prompt.token_ids) * (_TOKEN + _per_token(prompt.logprobs))


def _per_token(logprobs: tuple[TokenLogprob, ...] | None) -> int:
    return _LOGPROB + _ALTERNATIVE * len(logprobs[-1].top) if logprobs else 0


def _of_choice(choice: ChoiceResult) -> int:
    return (
        len(choice.text)
        + len(choice.reasoning)
        + _TOKEN * len(choice.call_deltas)
        + len(choice.token_ids) * (_TOKEN + _per_token(choice.logprobs))
    )


def _of_request(request: JobRequest) -> int:
    texts = sum(message.num_chars for message in request.messages or ())
    texts += sum(len(text) for document in request.documents for text in document.values())
    texts += len(request.envelope)
    return len(request.prompt or "") + texts + _TOKEN * len(request.prompt_ids or ())
