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

from tokenmill.bulk.batch import HOSTED, Batch, BatchNotFound, BatchState, Totals
from tokenmill.bulk.formats.input_file import BadLine
from tokenmill.bulk.formats.output_line import EXPIRED
from tokenmill.bulk.pages import PAGE, paged
from tokenmill.bulk.rows import bad_line_of, batch_of, columns_of, item_of, result_of
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError
from tokenmill.files.stored_file import READY, StoredFile
from tokenmill.sql.database import Database
from tokenmill.sql.storable import storable
from tokenmill.sql.webhooks import announce
from tokenmill.transport.server_clock import ServerClock
from tokenmill_schemas.result import JobResult, JobStatus

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
_MOMENTS: Final = {
    BatchState.IN_PROGRESS: "started_ms",
    BatchState.FINALIZING: "finalizing_ms",
    BatchState.CANCELLING: "cancelling_ms",
}


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
        self._jobs, self._usage, self._files = tables.jobs, tables.usage, tables.files

    def _select(self, table: Any, columns: Sequence[str]) -> Any:
        return self._sql.select(*(table.c[name] for name in columns))

    def _rows(self, statement: Any) -> Sequence[Any]:
        with self._database.connection() as connection:
            return connection.execute(statement).mappings().all()

    # ── the batch ──

    def create(self, batch: Batch, **more: Any) -> None:
        """Store a batch that is not there yet, with further columns."""
        first = {"state": batch.state.value, "completed": 0, "failed": 0, "submitted": 0}
        with self._database.connection() as connection:
            known = connection.execute(
                self._sql.select(self._batches.c.id).where(self._batches.c.id == batch.id)
            )
            if known.first() is None:
                connection.execute(
                    self._batches.insert().values(**columns_of(batch), **first, **more)
                )

    def get(self, batch_id: str) -> Batch:
        """Return a batch. Raises BatchNotFound."""
        table = self._batches
        found = self._rows(self._select(table, _COLUMNS).where(table.c.id == batch_id))
        if not found:
            raise BatchNotFound(batch_id)
        return batch_of(dict(found[0]))

    def newest(
        self, limit: int = 20, after: str | None = None, *, hosted_for: str | None = None
    ) -> Sequence[Batch]:
        """List batches, the newest first. `after`: list only batches older than this one.
        `hosted_for`: list only those that a tenant has at the gateway.
        """
        table = self._batches
        statement = (
            self._select(table, _COLUMNS)
            .order_by(table.c.created_ms.desc(), table.c.id.desc())
            .limit(limit)
        )
        if hosted_for is not None:
            is_hosted = table.c.input_file.startswith(HOSTED, autoescape=True)
            statement = statement.where(table.c.tenant == hosted_for, is_hosted)
        if after is not None:
            last = self.get(after)
            pair = self._sql.tuple_(table.c.created_ms, table.c.id)
            statement = statement.where(pair < self._sql.tuple_(last.created_ms, last.id))
        return [batch_of(dict(row)) for row in self._rows(statement)]

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

    def end_hosted(
        self, batch: Batch, state: BatchState, totals: Totals, outputs: Sequence[StoredFile]
    ) -> bool:
        """End a batch of the gateway, name and show the files of its answers, and announce the end,
        all at once. Return False if its state has changed.
        """
        now_ms = self._clock.now_ms()
        values = {"state": state.value, "finished_ms": now_ms, "due_ms": None} | {
            "output_file": batch.output_file,
            "error_file": batch.error_file,
            "completed": totals.completed,
            "failed": totals.failed,
            "usage": msgspec.to_builtins(totals) | {"over_line": batch.last_line},
            "errors": storable(msgspec.to_builtins(batch.errors)) or None,
        }
        table, files = self._batches, self._files
        change = table.update().where(table.c.id == batch.id, table.c.state == batch.state.value)
        with self._database.connection() as connection:
            if not connection.execute(change.values(**values)).rowcount:
                return False
            for file in outputs:
                shown = msgspec.to_builtins(file) | {"state": READY}
                connection.execute(files.update().where(files.c.id == file.id).values(**shown))
            event = f"batch.{state.value}"
            announce(
                connection,
                batch.id,
                event,
                queue=batch.queue,
                tenant=batch.tenant,
                ended_ms=now_ms,
            )
        return True

    def describe(self, batch: Batch) -> None:
        """Write everything but the state and the progress."""
        values = columns_of(batch)
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
                        items.insert(), [item_of(batch_id, bad) for bad in page.values()]
                    )

    def rejected(self, batch_id: str) -> Iterator[BadLine]:
        last, items = 0, self._items
        while True:
            statement = self._select(items, _ITEMS).where(
                items.c.batch_id == batch_id, items.c.line > last
            )
            rows = self._rows(statement.order_by(items.c.line).limit(PAGE))
            for row in rows:
                yield bad_line_of(row)
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
            yield from map(result_of, rows)
            if len(rows) < PAGE:
                return
            last = (rows[-1]["finished_ms"], rows[-1]["id"])

    def recorded(self, job_ids: Sequence[str]) -> dict[str, JobResult]:
        found: dict[str, JobResult] = {}
        for page in paged(job_ids):
            statement = self._select(self._jobs, _JOBS).where(self._jobs.c.id.in_(page))
            found |= {row["id"]: result_of(row) for row in self._rows(statement)}
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
