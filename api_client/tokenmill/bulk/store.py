"""Stores batches in SQL: in the database that has the results of their jobs, or in a file of one
run, beside its output.

One process submits a batch's lines, while others may read or cancel it. So the state changes only
from an expected state, and writing progress never changes the state. Every statement names its
columns, so that a database of another version can be used. Needs the extra `sql`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmill.bulk.batch import Batch, BatchNotFound, BatchState, Totals
from tokenmill.bulk.formats.input_file import BadLine
from tokenmill.bulk.formats.output_line import EXPIRED, UNREADABLE
from tokenmill.bulk.pages import PAGE, paged
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError
from tokenmill.sql.database import Database
from tokenmill.sql.storable import storable
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.codec import DecodeError, decode_result
from tokenmill_schemas.openai_batch import BatchError
from tokenmill_schemas.result import JobError, JobResult, JobStatus
from tokenmill_schemas.validation import MAX_NAME_CHARS

log = logging.getLogger(__name__)

_COLUMNS: Final = (
    "id", "queue", "tenant", "model", "state", "endpoint", "input_file", "output_file",
    "error_file", "errors", "metadata", "total", "completed", "failed", "created_ms",
    "started_ms", "finished_ms", "expires_ms", "completion_window", "submitted",
    "finalizing_ms", "cancelling_ms", "usage", "options",
)  # fmt: skip
_ITEMS: Final = (
    "batch_id", "line", "custom_id", "state", "error_code", "error_message", "error_param",
)  # fmt: skip
_JOBS: Final = (
    "id", "batch_id", "state", "finished_ms", "result", "metadata", "error_code", "error_message",
)  # fmt: skip
_TOKENS: Final = ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
_PLAIN: Final = (
    "id", "queue", "tenant", "model", "endpoint", "input_file", "output_file", "error_file",
    "total", "created_ms", "expires_ms", "completion_window",
)  # fmt: skip
_MOMENTS: Final = {
    BatchState.IN_PROGRESS: "started_ms",
    BatchState.FINALIZING: "finalizing_ms",
    BatchState.CANCELLING: "cancelling_ms",
}
_REFUSED = "refused"  # a bad request, as the API would reject it
_INVALID = "invalid"  # no request at all
PURGED: Final = JobError(
    "result_purged", "The answer was removed from the database by its retention rules."
)


def open_store(client: Client, output: Path | None = None) -> BatchStore:
    """Open the batches of the client's database. Without one, the batch of an output is in the
    SQLite file `OUTPUT.batch.db`; the results of its jobs are in the queue.

    Raises ConfigurationError if there is neither database nor output.
    """
    if client.database is not None:
        return BatchStore(client.database, client.clock)
    if output is None:
        raise ConfigurationError(
            "batches are kept in a database: name it with --database-url or "
            "TOKENMILL_DATABASE_URL, in Python with database=…; or use `bulk run`"
        )
    return BatchStore(output.with_name(f"{output.name}.batch.db"), client.clock)


class BatchStore:
    """The batches in one database; may be shared between threads. A path is a file of its own,
    without results. Every call is one transaction and may be repeated."""

    def __init__(self, where: str | Path, clock: ServerClock) -> None:
        self._database = Database(where)
        self._clock = clock
        self._has_results = isinstance(where, str)
        from tokenmill_schemas import tables  # imports SQLAlchemy

        if not self._has_results:
            with self._database.connection() as connection:
                tables.metadata.create_all(connection)
        self._sql = self._database.sql
        self._batches, self._items = tables.batches, tables.batch_items
        self._jobs, self._usage = tables.jobs, tables.usage

    def _select(self, table: Any, columns: Sequence[str]) -> Any:
        return self._sql.select(*(table.c[name] for name in columns))

    def _rows(self, statement: Any) -> Sequence[Any]:
        with self._database.connection() as connection:
            return connection.execute(statement).mappings().all()

    # ── the batch ──

    def create(self, batch: Batch) -> None:
        first = {"state": batch.state.value, "completed": 0, "failed": 0, "submitted": 0}
        with self._database.connection() as connection:
            known = connection.execute(
                self._sql.select(self._batches.c.id).where(self._batches.c.id == batch.id)
            )
            if known.first() is None:
                connection.execute(self._batches.insert().values(**_described(batch), **first))

    def get(self, batch_id: str) -> Batch:
        """Return a batch. Raises BatchNotFound."""
        table = self._batches
        found = self._rows(self._select(table, _COLUMNS).where(table.c.id == batch_id))
        if not found:
            raise BatchNotFound(batch_id)
        return _batch(dict(found[0]))

    def newest(self, limit: int = 20, after: str | None = None) -> Sequence[Batch]:
        """List batches, the newest first. `after`: list only batches older than this one."""
        table = self._batches
        statement = (
            self._select(table, _COLUMNS)
            .order_by(table.c.created_ms.desc(), table.c.id.desc())
            .limit(limit)
        )
        if after is not None:
            last = self.get(after)
            pair = self._sql.tuple_(table.c.created_ms, table.c.id)
            statement = statement.where(pair < self._sql.tuple_(last.created_ms, last.id))
        return [_batch(dict(row)) for row in self._rows(statement)]

    def move(self, batch_id: str, state: BatchState, expected: Sequence[BatchState]) -> bool:
        """Move a batch to another state and record the time. Return False if it is in none of the
        expected states.
        """
        moment = "finished_ms" if state.is_final else _MOMENTS[state]
        table = self._batches
        statement = table.update().where(
            table.c.id == batch_id, table.c.state.in_([word.value for word in expected])
        )
        with self._database.connection() as connection:
            changed = connection.execute(
                statement.values({"state": state.value, moment: self._clock.now_ms()})
            )
            return bool(changed.rowcount)

    def describe(self, batch: Batch) -> None:
        """Write everything but the state and the progress."""
        values = _described(batch)
        del values["id"]
        self._update(batch.id, values)

    def progress(self, batch_id: str, *, submitted: int, over_line: int, totals: Totals) -> None:
        now_ms = self._clock.now_ms()
        known = msgspec.to_builtins(totals) | {"over_line": over_line, "seen_ms": now_ms}
        changes = {
            "submitted": submitted,
            "completed": totals.completed,
            "failed": totals.failed,
            "usage": known,
        }
        self._update(batch_id, changes)

    def _update(self, batch_id: str, changes: dict[str, Any]) -> None:
        with self._database.connection() as connection:
            connection.execute(
                self._batches.update().where(self._batches.c.id == batch_id).values(**changes)
            )

    # ── lines without a job ──

    def reject(self, batch_id: str, lines: Sequence[BadLine]) -> None:
        for part in paged(lines):
            page = {bad.line: bad for bad in part}
            items = self._items
            with self._database.connection() as connection:
                known = self._sql.select(items.c.line).where(
                    items.c.batch_id == batch_id, items.c.line.in_(page)
                )
                for line in connection.execute(known).scalars().all():
                    del page[line]
                if page:
                    connection.execute(
                        items.insert(), [_item(batch_id, bad) for bad in page.values()]
                    )

    def rejected(self, batch_id: str) -> Iterator[BadLine]:
        last, items = 0, self._items
        while True:
            statement = self._select(items, _ITEMS).where(
                items.c.batch_id == batch_id, items.c.line > last
            )
            rows = self._rows(statement.order_by(items.c.line).limit(PAGE))
            for row in rows:
                yield _bad_line(row)
            if len(rows) < PAGE:
                return
            last = rows[-1]["line"]

    # ── results ──

    def results(self, batch_id: str) -> Iterator[JobResult]:
        """Yield results in the order in which the jobs ended, page by page along the index."""
        jobs, last = self._jobs, (-1, "")
        pair = self._sql.tuple_(jobs.c.finished_ms, jobs.c.id)
        while True:
            statement = self._select(jobs, _JOBS).where(
                jobs.c.batch_id == batch_id, pair > self._sql.tuple_(*last)
            )
            rows = self._rows(statement.order_by(jobs.c.finished_ms, jobs.c.id).limit(PAGE))
            yield from map(_result, rows)
            if len(rows) < PAGE:
                return
            last = (rows[-1]["finished_ms"], rows[-1]["id"])

    def recorded(self, job_ids: Sequence[str]) -> dict[str, JobResult]:
        found: dict[str, JobResult] = {}
        for page in paged(job_ids):
            statement = self._select(self._jobs, _JOBS).where(self._jobs.c.id.in_(page))
            found |= {row["id"]: _result(row) for row in self._rows(statement)}
        return found

    def totals(self, batch: Batch, *, with_tokens: bool) -> Totals | None:
        """Count the results again; None if this store has none."""
        if not self._has_results:
            return None
        jobs, items, count = self._jobs, self._items, self._sql.func.count
        states = (
            self._sql.select(jobs.c.state, count())
            .where(jobs.c.batch_id == batch.id)
            .group_by(jobs.c.state)
        )
        code = items.c.error_code
        codes = self._sql.select(code, count()).where(items.c.batch_id == batch.id).group_by(code)
        sums = [
            self._sql.func.coalesce(self._sql.func.sum(self._usage.c[name]), 0) for name in _TOKENS
        ]
        both = jobs.join(self._usage, jobs.c.id == self._usage.c.job_id)
        tokens = self._sql.select(*sums).select_from(both).where(jobs.c.batch_id == batch.id)
        with self._database.connection() as connection:
            counted = {
                str(state): int(number) for state, number in connection.execute(states).all()
            }
            rejected = {str(word): int(number) for word, number in connection.execute(codes).all()}
            used = [0] * len(_TOKENS)
            if with_tokens:
                used = [int(value) for value in connection.execute(tokens).one()]
        good = counted.pop(JobStatus.SUCCEEDED.value, 0)
        return Totals(
            completed=good,
            failed=sum(counted.values()) + sum(rejected.values()),
            expired=counted.get(JobStatus.EXPIRED.value, 0) + rejected.get(EXPIRED.code, 0),
            input_tokens=used[0],
            cached_tokens=used[1],
            output_tokens=used[2],
            reasoning_tokens=used[3],
        )

    def close(self) -> None:
        self._database.close()


def _described(batch: Batch) -> dict[str, Any]:
    """Return the columns of a batch, with names cut to the length of their columns."""
    options = {"any_model": batch.any_model, "last_line": batch.last_line, "digest": batch.digest}
    values = {
        **{name: getattr(batch, name) for name in _PLAIN},
        "model": batch.model[:MAX_NAME_CHARS],
        "completion_window": batch.completion_window.replace(" ", ""),
        "errors": msgspec.to_builtins(batch.errors) or None,
        "metadata": dict(batch.metadata) or None,
        "options": options,
    }
    return {name: storable(value) for name, value in values.items()}


def _batch(row: dict[str, Any]) -> Batch:
    """Build a batch from its row. NULL stands for a default; the counts are those of the last
    progress.
    """
    options, used = row.pop("options") or {}, row.pop("usage") or {}
    over_line, seen_ms = used.pop("over_line", 0), used.pop("seen_ms", 0)
    completed, failed = row.pop("completed"), row.pop("failed")
    values = {name: value for name, value in row.items() if value is not None and name != "errors"}
    return Batch(
        **{**values, "state": BatchState(row["state"])},
        **options,
        over_line=over_line,
        seen_ms=seen_ms,
        totals=msgspec.convert(used | {"completed": completed, "failed": failed}, Totals),
        errors=tuple(msgspec.convert(row["errors"] or [], list[BatchError])),
    )


def _item(batch_id: str, bad: BadLine) -> dict[str, Any]:
    values = {
        "batch_id": batch_id,
        "line": bad.line,
        "custom_id": bad.custom_id,
        "state": _REFUSED if bad.status else _INVALID,
        "error_code": bad.code,
        "error_message": bad.message,
        "error_param": bad.param[:MAX_NAME_CHARS] if bad.param else None,
    }
    return {name: storable(value) for name, value in values.items()}


def _bad_line(row: Any) -> BadLine:
    status = 400 if row["state"] == _REFUSED else 0
    return BadLine(
        row["line"],
        row["custom_id"],
        row["error_code"],
        row["error_message"],
        row["error_param"],
        status,
    )


def _result(row: Any) -> JobResult:
    """Return the recorded result of a job.

    A job whose result was purged or cannot be decoded takes its status from the columns; a
    succeeded one becomes a failure that names the reason.
    """
    missing = PURGED
    if row["result"] is not None:
        try:
            return decode_result(bytes(row["result"]))
        except DecodeError as trouble:
            log.warning(
                "The recorded result of job %s cannot be read; its line goes to the error file: %s",
                row["id"],
                trouble,
            )
            missing = JobError(UNREADABLE.code, UNREADABLE.message)
    state = JobStatus(row["state"])
    error = (
        JobError(row["error_code"], row["error_message"] or "") if row["error_code"] else missing
    )
    return JobResult(
        job_id=row["id"],
        status=JobStatus.FAILED if state is JobStatus.SUCCEEDED else state,
        error=error,
        metadata=row["metadata"] or {},
    )
