"""Counters of the finalizer, and the times since which SQL or Redis fails."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from tokenmill_worker.record.result_store import RecordReport

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
