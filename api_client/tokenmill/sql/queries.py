"""SQL statements for lists of jobs and sums of usage. Each reads one range of one index, however
large the table.

A list is ordered by the time at which its jobs ended, the newest first, then by id. A page begins
after the last row of the page before. So a deep page costs as much as the first, and new rows shift
nothing. Every statement names its columns, so that a database of another version can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from tokenmill.errors import ConfigurationError
from tokenmill_schemas.result import JobStatus
from tokenmill_schemas.tables import jobs, usage, usage_daily, usage_days

JOB_COLUMNS: Final = (
    "id", "queue", "model", "tenant", "priority", "state", "finish_reason", "text", "error_code",
    "error_message", "attempts", "worker_id", "created_ms", "started_ms", "finished_ms",
    "prompt_kind", "batch_id", "metadata", "result",
)  # fmt: skip
NUMBERS: Final = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "queue_ms", "ttft_ms", "total_ms",
    "preemptions", "reasoning_tokens",
)  # fmt: skip
_NOT_LISTED: Final = ("text", "result", "prompt_kind")
_SUMS: Final = (
    "prompt_tokens", "cached_tokens", "completion_tokens", "ttft_ms", "total_ms",
    "reasoning_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageToken:
    """A position in a list: after the row with this time and id."""

    finished_ms: int
    job_id: str

    @classmethod
    def parse(cls, text: str) -> PageToken:
        """Parse the text of JobRow.cursor. Raises ConfigurationError."""
        moment, dot, job_id = text.partition(".")
        if not (dot and job_id and moment.isascii() and moment.isdigit() and len(moment) < 19):
            raise ConfigurationError(
                f"{text!r} is no cursor: it is what the page before ended with"
            )
        return cls(int(moment), job_id)


def one_job(job_id: str) -> sa.Select[Any]:
    return sa.select(*(jobs.c[name] for name in JOB_COLUMNS)).where(jobs.c.id == job_id)


def usage_of(job_id: str) -> sa.Select[Any]:
    return sa.select(*(usage.c[name] for name in NUMBERS)).where(usage.c.job_id == job_id)


def job_page(
    wanted: dict[str, str | None],
    *,
    since_ms: int | None = None,
    until_ms: int | None = None,
    after: PageToken | None = None,
    limit: int,
    offset: int = 0,
) -> sa.Select[Any]:
    """Select one page of jobs. `wanted`: values of columns. The page is cut before usage is joined,
    so that the join covers one page.
    """
    page = sa.select(*(jobs.c[name] for name in JOB_COLUMNS if name not in _NOT_LISTED))
    page = page.where(*_equal(jobs, wanted))
    if since_ms is not None:
        page = page.where(jobs.c.finished_ms >= since_ms)
    if until_ms is not None:
        page = page.where(jobs.c.finished_ms < until_ms)
    if after is not None:
        page = page.where(
            sa.tuple_(jobs.c.finished_ms, jobs.c.id) < (after.finished_ms, after.job_id)
        )
    page = page.order_by(jobs.c.finished_ms.desc(), jobs.c.id.desc()).limit(limit)
    part = (page.offset(offset) if offset else page).subquery("page")
    tokens = [usage.c[name] for name in NUMBERS[:3]]
    joined = sa.select(part, *tokens).outerjoin_from(part, usage, usage.c.job_id == part.c.id)
    return joined.order_by(part.c.finished_ms.desc(), part.c.id.desc())


def newest_summed_day(today: str) -> sa.Select[Any]:
    return sa.select(sa.func.max(usage_days.c.day)).where(usage_days.c.day <= today)


def usage_sums(
    by: Sequence[str],
    wanted: dict[str, str | None],
    *,
    since_day: str | None = None,
    until_day: str | None = None,
    summed_before: str | None = None,
) -> sa.Select[Any]:
    """Sum usage, grouped by `by`. Days before `summed_before` come from the daily sums, later days
    from the usage table.
    """
    parts = []
    for table in (usage, usage_daily) if summed_before is not None else (usage,):
        part = _grouped(table, by).where(*_equal(table, wanted))
        if since_day is not None:
            part = part.where(table.c.day >= since_day)
        if until_day is not None:
            part = part.where(table.c.day <= until_day)
        if summed_before is not None:
            part = part.where(
                table.c.day >= summed_before if table is usage else table.c.day < summed_before
            )
        parts.append(part)
    both = sa.union_all(*parts).subquery("both")
    keys = [both.c[name] for name in by]
    totals = [sa.func.sum(both.c[name]) for name in ("jobs", "succeeded", *_SUMS)]
    return sa.select(*keys, *totals).group_by(*keys).order_by(*keys)


def _grouped(table: sa.Table, by: Sequence[str]) -> sa.Select[Any]:
    keys = [table.c[name] for name in by]
    jobs_of = sa.literal(1) if table is usage else table.c.jobs
    good = sa.case((table.c.state == JobStatus.SUCCEEDED.value, jobs_of), else_=0)
    counts = [sa.func.sum(jobs_of).label("jobs"), sa.func.sum(good).label("succeeded")]
    return sa.select(
        *keys, *counts, *(sa.func.sum(table.c[name]).label(name) for name in _SUMS)
    ).group_by(*keys)


def _equal(table: sa.Table, wanted: dict[str, str | None]) -> list[Any]:
    return [table.c[name] == value for name, value in wanted.items() if value is not None]
