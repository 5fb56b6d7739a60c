"""Reads results and usage from the SQL store, for when Redis has forgotten: read-only, nothing is ever written.

    results = SqlResults("postgresql://localhost/tokenmill")
    result = results.get(job_id)

Needs the extra `sql` (SQLAlchemy). It knows the tables only by the columns it reads, so that it works on a
database one revision ahead or behind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from api_client.errors import ConfigurationError, QueueUnavailable
from schemas.codec import decode_result
from schemas.generation import FinishReason
from schemas.result import ChoiceResult, JobError, JobResult, JobStatus, Usage

if TYPE_CHECKING:
    import sqlalchemy

Grouping = Literal["tenant", "model", "day", "queue", "state"]
GROUPINGS: Final = ("tenant", "model", "day", "queue", "state")

_JOB: Final = (
    "id", "queue", "model", "tenant", "priority", "state", "finish_reason", "text", "error_code", "error_message",
    "attempts", "worker_id", "created_ms", "started_ms", "finished_ms", "prompt_kind", "batch_id", "metadata", "result",
)  # fmt: skip
_USAGE: Final = (
    "job_id", "queue", "model", "tenant", "state", "day", "prompt_tokens", "cached_tokens", "completion_tokens",
    "queue_ms", "ttft_ms", "total_ms", "preemptions",
)  # fmt: skip
_NUMBERS: Final = _USAGE[6:]


class JobRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One finished job of a list; its answer comes with `get`."""

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


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over a group of jobs; `group` has the value of each column that was grouped by, in order."""

    group: tuple[str, ...]
    jobs: int
    succeeded: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    mean_ttft_ms: float
    mean_total_ms: float


class SqlResults:
    """One database. Safe to share between threads."""

    def __init__(self, url: str) -> None:
        try:
            import sqlalchemy
        except ImportError as error:
            raise ConfigurationError(
                "reading results from SQL needs SQLAlchemy: pip install 'tokenmill[sql]' (and psycopg for PostgreSQL)"
            ) from error
        self._sql = sqlalchemy
        self._jobs = sqlalchemy.table("jobs", *map(sqlalchemy.column, _JOB))
        self._usage = sqlalchemy.table("usage", *map(sqlalchemy.column, _USAGE))
        try:
            self._engine = sqlalchemy.create_engine(_address(url), pool_pre_ping=True, connect_args=_options(url))
        except ImportError as error:
            raise ConfigurationError(f"the database's driver is not installed: {error}") from error
        except sqlalchemy.exc.ArgumentError as error:
            raise ConfigurationError("the database URL is not one: sqlite:///FILE or postgresql://…") from error

    def get(self, job_id: str) -> JobResult | None:
        """Equal to what Redis gave while it knew; without text and tokens once payloads were purged."""
        with self._connection() as connection:
            row = connection.execute(self._sql.select(self._jobs).where(self._jobs.c.id == job_id)).mappings().first()
            if row is None:
                return None
            if row["result"] is not None:
                return decode_result(bytes(row["result"]))
            numbers = self._sql.select(*(self._usage.c[name] for name in _NUMBERS))
            used = connection.execute(numbers.where(self._usage.c.job_id == job_id)).mappings().first()
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
        limit: int = 100,
        offset: int = 0,
    ) -> Sequence[JobRow]:
        """Finished jobs, the newest first."""
        jobs, usage = self._jobs, self._usage
        columns = [jobs.c[name] for name in _JOB if name not in ("text", "result", "prompt_kind")]
        tokens = [usage.c.prompt_tokens, usage.c.cached_tokens, usage.c.completion_tokens]
        statement = self._sql.select(*columns, *tokens).outerjoin(usage, usage.c.job_id == jobs.c.id)
        wanted = {"state": status, "tenant": tenant, "queue": queue, "model": model, "batch_id": batch_id}
        statement = statement.where(*(jobs.c[name] == value for name, value in wanted.items() if value is not None))
        if since_ms is not None:
            statement = statement.where(jobs.c.finished_ms >= since_ms)
        if until_ms is not None:
            statement = statement.where(jobs.c.finished_ms < until_ms)
        statement = statement.order_by(jobs.c.finished_ms.desc(), jobs.c.id).limit(limit).offset(offset)
        with self._connection() as connection:
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
        """Sums, ordered by their group. Days are UTC, as "2026-01-31"; `until_day` is included."""
        sql, usage = self._sql, self._usage
        unknown = [name for name in by if name not in GROUPINGS]
        if unknown:
            raise ConfigurationError(f"usage cannot be grouped by {', '.join(unknown)}, only by {', '.join(GROUPINGS)}")
        keys = [usage.c[name] for name in by]
        count = sql.func.count
        sums = [sql.func.sum(usage.c[name]) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")]
        succeeded = sql.func.sum(sql.case((usage.c.state == JobStatus.SUCCEEDED.value, 1), else_=0))
        means = [sql.func.avg(usage.c[name]) for name in ("ttft_ms", "total_ms")]
        statement = sql.select(*keys, count(), succeeded, *sums, *means).select_from(usage)
        wanted = {"tenant": tenant, "model": model, "queue": queue}
        statement = statement.where(*(usage.c[name] == value for name, value in wanted.items() if value is not None))
        if since_day is not None:
            statement = statement.where(usage.c.day >= since_day)
        if until_day is not None:
            statement = statement.where(usage.c.day <= until_day)
        with self._connection() as connection:
            rows = connection.execute(statement.group_by(*keys).order_by(*keys)).all()
        return [_usage_row(tuple(row), len(by)) for row in rows if row[len(by)]]

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _connection(self) -> Iterator[sqlalchemy.Connection]:
        """Errors of the database become ours, in one sentence without the statement."""
        try:
            with self._engine.connect() as connection:
                yield connection
        except self._sql.exc.SQLAlchemyError as error:
            words = " ".join(str(getattr(error, "orig", None) or error).split())[:300]
            if "unable to open database file" in words:
                raise ConfigurationError(f"there is no database at {self._engine.url.database}") from error
            if re.search(r"no such table|does not exist", words):
                raise ConfigurationError(
                    f"the database has no results table ({words}): `tokenmill db upgrade`"
                ) from error
            raise QueueUnavailable(f"the database cannot be read: {words}") from error


def _address(url: str) -> str:
    """PostgreSQL through psycopg 3; SQLite without making a file that is not there."""
    if url.startswith("sqlite:///") and "?" not in url:
        return "sqlite:///file:" + url.removeprefix("sqlite:///") + "?mode=rw&uri=true"
    return re.sub(r"^postgres(ql)?://", "postgresql+psycopg://", url)


def _options(url: str) -> dict[str, Any]:
    return {"connect_timeout": 5} if url.startswith("postgres") and "connect_timeout" not in url else {}


def _error(row: dict[str, Any]) -> JobError | None:
    return JobError(row["error_code"], row["error_message"] or "") if row["error_code"] else None


def _job_row(row: dict[str, Any]) -> JobRow:
    names = set(JobRow.__struct_fields__) & set(row)
    values = {name: row[name] for name in names if row[name] is not None or name in ("finish_reason", "batch_id")}
    if isinstance(values.get("metadata"), str):  # SQLite keeps JSON as text
        values["metadata"] = msgspec.json.decode(values["metadata"], type=dict[str, str])
    return JobRow(job_id=row["id"], status=row["state"], error=_error(row), **values)


def _usage_row(row: tuple[Any, ...], num_keys: int) -> UsageRow:
    jobs, succeeded, prompt, cached, completion, ttft, total = row[num_keys:]
    return UsageRow(
        group=tuple(str(value) for value in row[:num_keys]),
        jobs=int(jobs),
        succeeded=int(succeeded),
        prompt_tokens=int(prompt),
        cached_tokens=int(cached),
        completion_tokens=int(completion),
        mean_ttft_ms=round(float(ttft), 1),
        mean_total_ms=round(float(total), 1),
    )


def _rebuilt(row: dict[str, Any], used: dict[str, Any]) -> JobResult:
    """From the columns, for a job whose encoded result was purged."""
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
