"""Reads results and usage from the SQL store, after Redis has dropped them. It never writes.

    results = SqlResults("postgresql://localhost/tokenmill")
    result = results.get(job_id)
    page = results.jobs(tenant="acme", limit=50)
    more = results.jobs(tenant="acme", limit=50, after=page[-1].cursor)

Needs the extra `sql` (SQLAlchemy). Works on a database whose schema is one revision ahead or
behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, Literal

import msgspec

from tokenmill.errors import ConfigurationError, readable
from tokenmill.sql.database import Database
from tokenmill_schemas.codec import decode_result
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import ChoiceResult, JobError, JobResult, JobStatus, Usage

Grouping = Literal["tenant", "model", "day", "queue", "state"]
GROUPINGS: Final = ("tenant", "model", "day", "queue", "state")


class JobRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished job in a list. `SqlResults.get` returns its answer."""

    job_id: str
    status: str
    queue: str
    model: str
    tenant: str
    priority: str
    finish_reason: str | None
    error: JobError | None
    attempts: int
    worker_id: str
    created_ms: int
    started_ms: int
    finished_ms: int
    batch_id: str | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    metadata: dict[str, str] = {}

    @property
    def cursor(self) -> str:
        """The position after this row: pass it as `after` to get the next page."""
        return f"{self.finished_ms}.{self.job_id}"


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a group of jobs. `group` has the values of the columns that were grouped by, in
    order.
    """

    group: tuple[str, ...]
    jobs: int
    succeeded: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    mean_ttft_ms: float
    mean_total_ms: float
    reasoning_tokens: int = 0  # of the completion's tokens


class SqlResults:
    """The results in one database; may be shared between threads."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._database = Database(url)
        from tokenmill.sql import queries  # imports SQLAlchemy

        self._queries = queries
        self._has_sums: bool | None = None

    def get(self, job_id: str) -> JobResult | None:
        """Return a job's result, equal to the one that Redis had; None if it is unknown.

        After its payload was purged, text and tokens are missing. Raises UnreadableRecord for a
        result that is damaged or that a newer version wrote.
        """
        with self._database.connection() as connection:
            row = connection.execute(self._queries.one_job(job_id)).mappings().first()
            if row is None:
                return None
            if row["result"] is not None:
                with readable(f"the recorded result of job {job_id}"):
                    return decode_result(bytes(row["result"]))
            used = connection.execute(self._queries.usage_of(job_id)).mappings().first()
        return _rebuilt(dict(row), dict(used) if used is not None else {})

    def jobs(
        self,
        *,
        status: str | None = None,
        tenant: str | None = None,
        queue: str | None = None,
        model: str | None = None,
        batch_id: str | None = None,
        since_ms: int | None = None,
        until_ms: int | None = None,
        after: str | None = None,
        limit: int = 100,
        offset: int = 0,
    ) -> Sequence[JobRow]:
        """List finished jobs, the newest first.

        Args:
            since_ms, until_ms: list jobs that ended at or after the first, and before the second;
                Unix milliseconds.
            after: the `cursor` of the last row of the previous page.
            offset: rows to skip. They are read all the same; prefer `after`.
        """
        statement = self._queries.job_page(
            {
                "state": status,
                "tenant": tenant,
                "queue": queue,
                "model": model,
                "batch_id": batch_id,
            },
            since_ms=since_ms,
            until_ms=until_ms,
            after=self._queries.PageToken.parse(after) if after is not None else None,
            limit=limit,
            offset=offset,
        )
        with self._database.connection() as connection:
            return [_job_row(dict(row)) for row in connection.execute(statement).mappings()]

    def usage(
        self,
        *,
        by: Sequence[Grouping] = ("tenant", "model", "day"),
        tenant: str | None = None,
        model: str | None = None,
        queue: str | None = None,
        since_day: str | None = None,
        until_day: str | None = None,
    ) -> Sequence[UsageRow]:
        """Sum up the usage of finished jobs, ordered by group.

        Days are UTC, such as "2026-01-31"; `until_day` is included. If `tokenmill tasks` keeps
        daily sums, all days but the last two come from these.
        """
        unknown = [name for name in by if name not in GROUPINGS]
        if unknown:
            raise ConfigurationError(
                f"usage cannot be grouped by {', '.join(unknown)}, only by {', '.join(GROUPINGS)}"
            )
        statement = self._queries.usage_sums(
            by,
            {"tenant": tenant, "model": model, "queue": queue},
            since_day=since_day,
            until_day=until_day,
            summed_before=self._summed_before(),
        )
        with self._database.connection() as connection:
            rows = connection.execute(statement).all()
        return [_usage_row(tuple(row), len(by)) for row in rows if row[len(by)]]

    def _summed_before(self) -> str | None:
        """Return the first day whose usage is not taken from the daily sums: the day before the
        newest summed one. Returns None without daily sums.
        """
        if not self._has_sums:
            self._has_sums = self._database.has_table("usage_days")
        if not self._has_sums:
            return None
        with self._database.connection() as connection:
            newest = connection.scalar(
                self._queries.newest_summed_day(datetime.now(UTC).date().isoformat())
            )
        try:
            return (
                (date.fromisoformat(newest) - timedelta(days=1)).isoformat()
                if newest is not None
                else None
            )
        except (ValueError, OverflowError):  # days before year 1 come from broken clocks
            return None

    def close(self) -> None:
        self._database.close()


def _error(row: dict[str, Any]) -> JobError | None:
    return JobError(row["error_code"], row["error_message"] or "") if row["error_code"] else None


def _job_row(row: dict[str, Any]) -> JobRow:
    names = set(JobRow.__struct_fields__) & set(row)
    values = {
        name: row[name]
        for name in names
        if row[name] is not None or name in ("finish_reason", "batch_id")
    }
    return JobRow(job_id=row["id"], status=row["state"], error=_error(row), **values)


def _usage_row(row: tuple[Any, ...], num_keys: int) -> UsageRow:
    jobs, succeeded, prompt, cached, completion, ttft, total, reasoning = (
        int(value) for value in row[num_keys:]
    )
    return UsageRow(
        group=tuple(str(value) for value in row[:num_keys]),
        jobs=jobs,
        succeeded=succeeded,
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        mean_ttft_ms=round(ttft / jobs, 1),
        mean_total_ms=round(total / jobs, 1),
        reasoning_tokens=reasoning,
    )


def _rebuilt(row: dict[str, Any], used: dict[str, Any]) -> JobResult:
    """Build a result from the columns of a job whose encoded result was purged."""
    reason = FinishReason(row["finish_reason"]) if row["finish_reason"] else None
    return JobResult(
        job_id=row["id"],
        status=JobStatus(row["state"]),
        model=row["model"],
        tenant=row["tenant"],
        choices=(ChoiceResult(text=row["text"] or "", finish_reason=reason),) if reason else (),
        usage=Usage(**used),
        error=_error(row),
        attempt=row["attempts"],
        worker_id=row["worker_id"],
        created_ms=row["created_ms"],
        started_ms=row["started_ms"],
        finished_ms=row["finished_ms"],
    )
