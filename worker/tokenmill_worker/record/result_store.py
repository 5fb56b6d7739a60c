"""Writes finished jobs: many per transaction, each at most once, with result, usage and webhook
message together.

The primary key decides: if a job's row exists, the row stays and its result is returned, so that
Redis gets the same. There is one exception: a row in state "dead" is replaced by the end that a
redrive brought. A row with another creation time belongs to an earlier job of the same id: the
later job is reported as `taken` and gets no row. A row that the database cannot hold is found by
halving, sanitised, and does not block the others. The finalizer retries.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import Engine, Table, and_, or_, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from tokenmill.sql.driver_errors import is_misconfigured, sentence_of
from tokenmill.sql.engine import STATEMENT_TIMEOUT_S, limit_statements, open_engine
from tokenmill_schemas.codec import DecodeError, decode_result
from tokenmill_schemas.result import JobResult, JobStatus
from tokenmill_schemas.tables import jobs, usage, webhooks
from tokenmill_worker.errors import SchemaOutdated, StoreUnavailable
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record.rows import JobRecord
from tokenmill_worker.record.schema_version import SchemaVersion, read_schema_version
from tokenmill_worker.record.sql_errors import ErrorKind, error_kind
from tokenmill_worker.record.threads import BlockingCalls

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S: Final = STATEMENT_TIMEOUT_S + 30
_LOOK_UP_TIMEOUT_S: Final = 5.0
_IDENTITY: Final = ("queue", "tenant", "batch_id", "created_ms")


@dataclass(slots=True)
class RecordReport:
    """The outcome of each job of one call, by job id."""

    written: set[str] = field(default_factory=set)
    # recorded before; the value is the recorded result
    existing: dict[str, JobResult] = field(default_factory=dict)
    # the id belongs to another job: an earlier one, or another tenant's or queue's
    taken: set[str] = field(default_factory=set)
    # stored after a change, with the reason
    sanitised: dict[str, str] = field(default_factory=dict)
    # not stored, with the reason: try again later
    refused: dict[str, str] = field(default_factory=dict)
    # not stored, because no row could be made of the job
    broken: dict[str, Exception] = field(default_factory=dict)

    def merge(self, other: RecordReport) -> None:
        self.written |= other.written
        self.existing |= other.existing
        self.taken |= other.taken
        self.sanitised |= other.sanitised
        self.refused |= other.refused
        self.broken |= other.broken


class ResultStore:
    """Records results in one database. `engine` may be passed instead of being opened from the URL
    (tests inject faults with it).
    """

    def __init__(
        self,
        url: str,
        *,
        queue: str = "",
        with_prompts: bool = False,
        engine: Engine | None = None,
        answer_timeout_s: float = _ANSWER_TIMEOUT_S,
    ) -> None:
        self._engine = engine or open_engine(url)
        self._calls = BlockingCalls()
        self._queue = queue
        self._with_prompts = with_prompts
        self._answer_timeout_s = answer_timeout_s
        dialect = self._engine.dialect.name
        self._insert_jobs = _upsert_job(dialect)  # building statements is slow
        self._insert_usage = _upsert_usage(dialect)
        self._insert_webhooks = _insert(dialect, webhooks).on_conflict_do_nothing()

    async def record(self, finished: Sequence[FinishedJob]) -> RecordReport:
        """Record jobs in one call. Raises StoreUnavailable when nothing, or not everything, could
        be decided: then call again.
        """
        latest = {
            item.result.job_id: item for item in sorted(finished, key=lambda item: item.token)
        }
        # two writers that lock in one order cannot deadlock
        items = [latest[job_id] for job_id in sorted(latest)]
        return await self._calls.run(lambda: self._record_items(items), self._answer_timeout_s)

    async def find(self, ids: Sequence[str]) -> dict[str, JobResult]:
        """Return results of this queue's jobs that are recorded for good (not as dead, which may be
        redriven) and can be read. Raises StoreUnavailable.
        """
        try:
            return await self._calls.run(lambda: self._find(ids), _LOOK_UP_TIMEOUT_S)
        except StoreUnavailable:
            raise
        except Exception as error:
            raise StoreUnavailable(f"the SQL store cannot be read: {sentence_of(error)}") from error

    async def check(self) -> None:
        """Check that the store can be used. Raises StoreUnavailable, or SchemaOutdated when
        `tokenmill db upgrade` has to run first.
        """
        try:
            state = await self._calls.run(self._schema_version, self._answer_timeout_s)
        except StoreUnavailable:
            raise
        except Exception as error:
            words = f"the SQL store cannot be used: {sentence_of(error)}"
            raise StoreUnavailable(words, is_misconfigured=is_misconfigured(error)) from error
        if state.is_behind:
            raise SchemaOutdated(
                f"the database is at revision {state.current or 'none'}, "
                f"this version needs {state.head}: run `tokenmill db upgrade`"
            )

    async def close(self) -> None:
        try:
            await self._calls.run(self._engine.dispose, self._answer_timeout_s)
        finally:
            self._calls.close()

    def _find(self, ids: Sequence[str]) -> dict[str, JobResult]:
        chosen = and_(
            jobs.c.id.in_(ids), jobs.c.queue == self._queue, jobs.c.state != JobStatus.DEAD.value
        )
        with self._engine.connect() as connection:
            rows = connection.execute(select(jobs.c.id, jobs.c.result).where(chosen)).all()
        found = {job_id: _decoded(job_id, encoded) for job_id, encoded in rows}
        return {job_id: result for job_id, result in found.items() if result is not None}

    def _schema_version(self) -> SchemaVersion:
        with self._engine.connect() as connection:
            return read_schema_version(connection)

    def _record_items(self, items: list[FinishedJob]) -> RecordReport:
        rows: list[JobRecord] = []
        broken: dict[str, Exception] = {}
        for item in items:
            try:
                row = JobRecord.of(item, queue=self._queue, with_prompt=self._with_prompts)
            except Exception as error:
                broken[item.job_id] = error
            else:
                rows.append(row)
        report = self._record(rows)
        report.broken |= broken
        return report

    def _record(self, rows: list[JobRecord]) -> RecordReport:
        if not rows:
            return RecordReport()
        try:
            return self._commit(rows)
        except Exception as error:
            kind = error_kind(error)
            if kind is ErrorKind.SCHEMA:
                words = f"the database lacks what this version writes ({sentence_of(error)})"
                words += ": run `tokenmill db upgrade`"
                raise StoreUnavailable(words) from error
            if kind is ErrorKind.LATER:
                raise StoreUnavailable(f"the SQL store failed: {sentence_of(error)}") from error
            if len(rows) == 1:
                return self._record_sanitised(rows[0], sentence_of(error))
        middle = len(rows) // 2
        report = self._record(rows[:middle])
        report.merge(self._record(rows[middle:]))
        return report

    def _record_sanitised(self, row: JobRecord, reason: str) -> RecordReport:
        for changed in (row.sanitised(), row.minimal()):
            try:
                report = self._commit([changed])
            except Exception as error:
                if error_kind(error) is not ErrorKind.ROW:
                    raise StoreUnavailable(f"the SQL store failed: {sentence_of(error)}") from error
                reason = sentence_of(error)
            else:
                report.sanitised[row.job_id] = reason
                log.warning(
                    "Job %s was recorded without what the database cannot store: %s",
                    row.job_id,
                    reason,
                )
                return report
        return RecordReport(refused={row.job_id: reason})

    def _commit(self, rows: list[JobRecord]) -> RecordReport:
        report = RecordReport()
        with self._engine.begin() as connection:
            limit_statements(connection)
            inserted = connection.execute(self._insert_jobs, [row.job for row in rows])
            report.written.update(inserted.scalars())
            new = [row for row in rows if row.job_id in report.written]
            if new:
                connection.execute(self._insert_usage, [row.usage for row in new])
            messages = [row.webhook for row in new if row.webhook is not None]
            if messages:
                connection.execute(self._insert_webhooks, messages)
            self._read_existing(
                connection,
                {row.job_id: row for row in rows if row.job_id not in report.written},
                report,
            )
        return report

    def _read_existing(
        self, connection: Connection, rows: dict[str, JobRecord], report: RecordReport
    ) -> None:
        if not rows:
            return
        found = select(jobs.c.id, jobs.c.result, *(jobs.c[name] for name in _IDENTITY)).where(
            jobs.c.id.in_(rows)
        )
        for job_id, encoded, *identity in connection.execute(found):
            if not _is_same_job(dict(zip(_IDENTITY, identity, strict=True)), rows[job_id].job):
                report.taken.add(job_id)
                log.error(
                    "Job id %s stands for another job: its row stays, the later job ends as failed",
                    job_id,
                )
                continue
            report.existing[job_id] = _decoded(job_id, encoded) or rows[job_id].result


def _is_same_job(recorded: Mapping[str, Any], ours: Mapping[str, Any]) -> bool:
    """Compare what stays the same through redeliveries and redrives. A line of a batch is the same
    job whenever it is submitted, because its id follows from its place in the file.
    """
    if any(recorded[name] != ours[name] for name in ("queue", "tenant")):
        return False
    is_same_line = recorded["batch_id"] is not None and recorded["batch_id"] == ours["batch_id"]
    return is_same_line or bool(recorded["created_ms"] == ours["created_ms"])


def _decoded(job_id: str, encoded: bytes | None) -> JobResult | None:
    """Decode a recorded result. Returns None if it was purged or cannot be decoded; the job counts
    as recorded all the same.
    """
    if encoded is None:
        return None
    try:
        return decode_result(encoded)
    except DecodeError as error:
        log.warning(
            "The recorded result of job %s cannot be read; its row stays as it is: %s",
            job_id,
            error,
        )
        return None


def _insert(dialect: str, table: Table) -> Any:
    return (postgresql if dialect == "postgresql" else sqlite).insert(table)


def _upsert_job(dialect: str) -> Any:
    """Insert or ignore; a dead row is replaced by a later end of the same job. Returns the ids that
    were written.
    """
    statement = _insert(dialect, jobs)
    new = statement.excluded
    changed = {column.name: new[column.name] for column in jobs.c if column.name != "id"}
    replaces = and_(
        jobs.c.state == JobStatus.DEAD.value,
        jobs.c.queue == new.queue,
        jobs.c.tenant == new.tenant,
        or_(jobs.c.created_ms == new.created_ms, jobs.c.batch_id == new.batch_id),
        or_(new.state != JobStatus.DEAD.value, new.started_ms > jobs.c.started_ms),
    )
    return statement.on_conflict_do_update(
        index_elements=["id"], set_=changed, where=replaces
    ).returning(jobs.c.id)


def _upsert_usage(dialect: str) -> Any:
    """Insert or replace the usage row. It runs only for jobs whose row was just written, so a usage
    row that exists belongs to the dead attempt.
    """
    statement = _insert(dialect, usage)
    changed = {
        column.name: statement.excluded[column.name]
        for column in usage.c
        if column.name != "job_id"
    }
    return statement.on_conflict_do_update(index_elements=["job_id"], set_=changed)
