"""The interface of stores for batches: SQL if a database is given, else Redis.

One process submits a batch's lines, while others may read or cancel it. So the state changes only
from an expected state, and writing progress never changes the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from tokenmill.bulk.batch import Batch, BatchState, Totals
from tokenmill.bulk.formats.input_file import BadLine
from tokenmill.client import Client
from tokenmill_schemas.result import JobResult


class BatchStore(Protocol):
    """A store for batches. Every call is one transaction and may be repeated."""

    def create(self, batch: Batch) -> None: ...

    def get(self, batch_id: str) -> Batch:
        """Return a batch. Raises BatchNotFound."""
        ...

    def newest(self, limit: int = 20, after: str | None = None) -> Sequence[Batch]:
        """List batches, the newest first. `after`: list only batches older than this one."""
        ...

    def move(self, batch_id: str, state: BatchState, expected: Sequence[BatchState]) -> bool:
        """Move a batch to another state and record the time. Return False if it is in none of the
        expected states.
        """
        ...

    def describe(self, batch: Batch) -> None:
        """Write everything but the state and the progress."""
        ...

    def progress(
        self, batch_id: str, *, submitted: int, over_line: int, totals: Totals
    ) -> None: ...

    def reject(self, batch_id: str, lines: Sequence[BadLine]) -> None:
        """Store the errors of lines that have no job."""
        ...

    def rejected(self, batch_id: str) -> Iterator[BadLine]: ...

    def results(self, batch_id: str) -> Iterator[JobResult]:
        """Yield the results of ended jobs, if this store keeps results."""
        ...

    def recorded(self, job_ids: Sequence[str]) -> dict[str, JobResult]:
        """Return the results that this store has of these jobs, by job id."""
        ...

    def totals(self, batch: Batch, *, with_tokens: bool) -> Totals | None:
        """Count the results again; None if this store keeps no results."""
        ...

    def close(self) -> None: ...


def open_store(client: Client) -> BatchStore:
    """Open the store in SQL if the client has a database, else the one in its Redis."""
    if client.database is not None:
        from tokenmill.bulk.stores.sql import SqlBatchStore

        return SqlBatchStore(client.database, client.clock)
    from tokenmill.bulk.stores.redis import RedisBatchStore

    return RedisBatchStore(client)
