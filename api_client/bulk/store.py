"""Where batches are written down: SQL when a database is given, else Redis. What both can do, and nothing of how.

One process submits a batch's lines; any other may look at it, or ask for its end. So the state changes only from a
state that is expected, and progress never touches the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from api_client.bulk.batch import Batch, BatchState, Totals
from api_client.bulk.lines import BadLine
from api_client.client import Client
from api_client.errors import TokenmillError
from schemas.result import JobResult


class BatchNotFound(TokenmillError, LookupError):
    def __init__(self, batch_id: str) -> None:
        super().__init__(f"no batch {batch_id}: it was never submitted here, or its record has expired")
        self.batch_id = batch_id


class BatchStore(Protocol):
    """Every call is one transaction and may be repeated."""

    def create(self, batch: Batch) -> None: ...

    def get(self, batch_id: str) -> Batch:
        """Raises BatchNotFound."""
        ...

    def newest(self, limit: int = 20, after: str | None = None) -> Sequence[Batch]:
        """`after`: those older than this one."""
        ...

    def move(self, batch_id: str, state: BatchState, expected: Sequence[BatchState]) -> bool:
        """To another state, noting when; False when it is in none of the expected ones."""
        ...

    def describe(self, batch: Batch) -> None:
        """Write everything but the state and the progress."""
        ...

    def progress(self, batch_id: str, *, submitted: int, over_line: int, totals: Totals) -> None: ...

    def refuse(self, batch_id: str, lines: Sequence[BadLine]) -> None:
        """Keep what is said of lines that become no job."""
        ...

    def refused(self, batch_id: str) -> Iterator[BadLine]: ...

    def results(self, batch_id: str) -> Iterator[JobResult]:
        """Of jobs that have ended, as far as this store keeps results at all."""
        ...

    def recorded(self, job_ids: Sequence[str]) -> dict[str, JobResult]:
        """Those of them that the store has."""
        ...

    def totals(self, batch: Batch, *, with_tokens: bool) -> Totals | None:
        """Counted anew; None when this store keeps no results."""
        ...

    def close(self) -> None: ...


def open_store(client: Client) -> BatchStore:
    """SQL when the client has a database, else its Redis."""
    if client.database is not None:
        from api_client.bulk.sql_store import SqlBatchStore

        return SqlBatchStore(client.database)
    from api_client.bulk.redis_store import RedisBatchStore

    return RedisBatchStore(client)
