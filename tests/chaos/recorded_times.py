"""Verifies recorded times from outside: all are times of the run, by the server's clock, whatever
the wall clocks of workers and producers showed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import sqlalchemy

from tests.chaos.checker import Violation

ERROR_MS = 10_000  # a reading of the server's clock whose reply took long


def wrong_times(database: str, began_ms: float) -> list[Violation]:
    """Return the rows whose times are not between the run's begin and now, or are not in order."""
    engine = sqlalchemy.create_engine(database)
    with engine.connect() as connection:
        columns = "select id, created_ms, coalesce(started_ms, 0), finished_ms from jobs"
        jobs = [tuple(row) for row in connection.execute(sqlalchemy.text(columns))]
        columns = "select job_id, queue_ms, ttft_ms, total_ms from usage"
        usage = [tuple(row) for row in connection.execute(sqlalchemy.text(columns))]
    engine.dispose()
    now_ms = time.time() * 1000
    return [*_wrong_moments(jobs, began_ms, now_ms), *_wrong_spans(usage, now_ms - began_ms)]


def _wrong_moments(
    jobs: list[tuple[str, int, int, int]], began_ms: float, now_ms: float
) -> Iterator[Violation]:
    for job, *moments in jobs:
        known = [began_ms, *(moment for moment in moments if moment), now_ms]
        if any(later < earlier - ERROR_MS for earlier, later in itertools.pairwise(known)):
            seconds = ", ".join(f"{(moment - began_ms) / 1000:.1f}" for moment in moments)
            words = f"job {job} was created, started and finished {seconds} s after the begin"
            yield Violation("wrong", words)


def _wrong_spans(usage: list[tuple[str, int, int, int]], most_ms: float) -> Iterator[Violation]:
    for job, *spans in usage:
        if not all(0 <= span <= most_ms + ERROR_MS for span in spans):
            yield Violation("wrong", f"job {job} took {spans} ms in the queue, to a token, in all")
