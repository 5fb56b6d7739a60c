"""Runs the gateway's batches, each by one process at a time.

`batches.due_ms` says when a task goes on with a batch. A task holds it by a lease: the time moves
into the future again and again. When its process dies the lease ends, and the next sweep finds the
batch due.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from celery.worker import state as worker_state
from sqlalchemy import Engine, func, select, update

from tokenmill.bulk import BatchProgress, BatchStore, RunLimits, open_store
from tokenmill.bulk.hosted import HostedBatches
from tokenmill.client import Client
from tokenmill.errors import QueueUnavailable
from tokenmill.files.file_table import FileTable
from tokenmill.files.object_store import ObjectStore
from tokenmill.files.removal import remove_old
from tokenmill_schemas.tables import batches
from tokenmill_worker.settings import Settings
from tokenmill_worker.tasks.bulk_files import NoFreeThread

TIME_SLICE_S: Final = 60.0
LEASE_MS: Final = 30_000
_RENEW_S: Final = 5.0
_CLAIMED: Final = 16  # at a sweep
_AGAIN_MS: Final = 500
_UNAVAILABLE_MS: Final = 5_000
_OPEN: Final = ("validating", "in_progress", "finalizing", "cancelling")


class _SliceOver(Exception):
    pass


class LeaseLost(Exception):
    """Another task may run the batch: this one ends."""


@dataclass(frozen=True, slots=True)
class BatchLease:
    """The right to run a batch until a time."""

    batch_id: str
    queue: str
    until_ms: int


@dataclass(frozen=True, slots=True)
class OpenBatches:
    """The gateway's batches that are not over, by state, and their lines."""

    counts: dict[str, int]
    lines: dict[str, int]


def open_batches(engine: Engine) -> OpenBatches:
    """Count the gateway's batches that are not over, and their lines by outcome."""
    total, *outcomes = (
        func.coalesce(func.sum(batches.c[name]), 0) for name in ("total", "completed", "failed")
    )
    statement = select(batches.c.state, func.count(), total, *outcomes)
    statement = statement.where(batches.c.due_ms.is_not(None)).group_by(batches.c.state)
    with engine.connect() as connection:
        rows = connection.execute(statement).all()
    counts = dict.fromkeys(_OPEN, 0) | {str(row[0]): int(row[1]) for row in rows}
    lines, completed, failed = (sum(int(row[place]) for row in rows) for place in (2, 3, 4))
    waiting = max(0, lines - completed - failed)
    return OpenBatches(counts, {"completed": completed, "failed": failed, "waiting": waiting})


class BatchRuns:
    """Claims due batches and runs them, a slice of time each. `thread` holds one of the threads for
    files, or raises NoFreeThread.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        clock: Callable[[], float],
        thread: Callable[[], contextlib.AbstractContextManager[None]],
        time_slice_s: float = TIME_SLICE_S,
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._clock = clock
        self._thread = thread
        self._time_slice_s = time_slice_s
        self._objects = ObjectStore(settings.files)
        self._files = FileTable(settings.database_url)

    def claim(self) -> list[BatchLease]:
        """Take the batches that are due, the longest waiting first."""
        now_ms = self._now_ms()
        due = select(batches.c.id, batches.c.queue, batches.c.due_ms)
        due = due.where(batches.c.due_ms <= now_ms).order_by(batches.c.due_ms).limit(_CLAIMED)
        with self._engine.connect() as connection:
            found = connection.execute(due).all()
        until_ms = now_ms + LEASE_MS
        return [
            BatchLease(batch_id, queue, until_ms)
            for batch_id, queue, due_ms in found
            if self._change(batch_id, due_ms, until_ms)
        ]

    def run(self, lease: BatchLease) -> None:
        """Run a batch for one time slice. It is due again after a pause, unless it is over."""
        held = _Held(lease, self._change, self._now_ms)
        try:
            held.renew()
            with self._thread(), self._opened(lease.queue) as (client, store):
                places = HostedBatches(client, store, self._files, self._objects, held.renew)
                limits = RunLimits(on_progress=self._tick(held))
                is_over = places.advance(lease.batch_id, limits).state.is_final
        except LeaseLost:
            return
        except (_SliceOver, NoFreeThread):
            held.release(_AGAIN_MS)
        except QueueUnavailable:
            held.release(_UNAVAILABLE_MS)
            raise
        else:
            held.release(None if is_over else _AGAIN_MS)

    def remove_files(self) -> int:
        """Remove files that are deleted, expired or abandoned; return their number."""
        return remove_old(self._files, self._objects, self._now_ms())

    def close(self) -> None:
        """Close the connections to the table of files."""
        self._files.close()

    def _tick(self, held: _Held) -> Callable[[BatchProgress], None]:
        until = time.monotonic() + self._time_slice_s

        def tick(_: BatchProgress) -> None:
            held.renew()
            if time.monotonic() > until or worker_state.should_stop is not None:
                raise _SliceOver

        return tick

    @contextlib.contextmanager
    def _opened(self, queue: str) -> Iterator[tuple[Client, BatchStore]]:
        settings = self._settings
        client = Client(
            settings.redis_url,
            queue=queue,
            database=settings.database_url,
            prefix=settings.key_prefix,
        )
        with client, contextlib.closing(open_store(client)) as store:
            yield client, store

    def _change(self, batch_id: str, before_ms: int, due_ms: int | None) -> bool:
        """Set when a batch is due, if nobody else has changed it."""
        change = update(batches).where(batches.c.id == batch_id, batches.c.due_ms == before_ms)
        with self._engine.begin() as connection:
            return bool(connection.execute(change.values(due_ms=due_ms)).rowcount)

    def _now_ms(self) -> int:
        return round(self._clock() * 1000)


class _Held:
    """A lease that is held, and renewed."""

    def __init__(
        self,
        lease: BatchLease,
        change: Callable[[str, int, int | None], bool],
        now_ms: Callable[[], int],
    ) -> None:
        self._lease = lease
        self._until_ms = lease.until_ms
        self._change = change
        self._now_ms = now_ms
        self._renewed_at = 0.0

    def renew(self) -> None:
        """Hold the batch for longer. Raises LeaseLost."""
        if time.monotonic() - self._renewed_at < _RENEW_S:
            return
        until_ms = max(self._now_ms() + LEASE_MS, self._until_ms + 1)
        if not self._change(self._lease.batch_id, self._until_ms, until_ms):
            raise LeaseLost
        self._until_ms, self._renewed_at = until_ms, time.monotonic()

    def release(self, pause_ms: int | None) -> None:
        """Make the batch due after a pause; None: it is over."""
        due_ms = None if pause_ms is None else self._now_ms() + pause_ms
        self._change(self._lease.batch_id, self._until_ms, due_ms)
