"""Bulk files through the tasks: one task imports a file, another fetches its answers into a file.

    celery -A tokenmill_worker.tasks call tokenmill.bulk.import --serializer msgpack \\
        --kwargs '{"source": "/data/in.jsonl", "output": "/data/out.jsonl"}'

Progress is stored with the batch, so a task may stop anywhere. A task works for some minutes, then
queues itself again behind the others; a task whose process died is run again. Paths are those of
the machine that runs the tasks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import msgspec

from tokenmill.bulk import (
    Batch,
    BatchNotFound,
    BatchOptions,
    BatchProgress,
    BatchStore,
    Paths,
    RunLimits,
    export_batch,
    import_batch,
    new_batch,
    open_store,
    refresh,
)
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError
from tokenmill_worker.settings import Settings

log = logging.getLogger(__name__)

# well below the broker's visibility timeout, after which another process starts the task
TIME_SLICE_S: Final = 300.0
THREADS: Final = 8  # of the process; more tasks at once need a second process


class Reschedule(Exception):
    """Raised when there is more to do. The task runs again after `pause_s`."""

    pause_s = 1


class NoFreeThread(Reschedule):
    """Raised when other files already occupy half of the process's threads."""

    pause_s = 10


class _TimeSliceOver(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportRequest:
    """A request to import one file. `batch_id` is made from the task's id, so that a repeated task
    finds its batch.
    """

    batch_id: str
    source: str
    queue: str = ""
    completion_window: str = "24h"
    tenant: str = ""
    any_model: bool = False
    metadata: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, batch_id: str, /, **given: Any) -> ImportRequest:
        """Build a request. Raises ConfigurationError for unknown or invalid terms."""
        terms = {term.name for term in fields(cls)} - {"batch_id"}
        unknown = sorted(set(given) - terms)
        if unknown:
            raise ConfigurationError(f"an import of a bulk file has no {', '.join(unknown)}")
        try:
            return msgspec.convert({"batch_id": batch_id, **given}, cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"an import of a bulk file: {error}") from None


class BulkFiles:
    """Imports and exports files. Calls block, for one time slice at most. Safe to share between
    threads. Half of the process's threads stay free for webhooks and upkeep: if files occupy the
    other half, a call raises NoFreeThread at once.
    """

    def __init__(self, settings: Settings, time_slice_s: float = TIME_SLICE_S) -> None:
        self._settings = settings
        self._time_slice_s = time_slice_s
        self._threads = threading.BoundedSemaphore(THREADS // 2)

    def import_file(self, request: ImportRequest) -> Batch:
        """Import the file; returns when every line is submitted. Raises Reschedule;
        ConfigurationError and OSError for a bad request.
        """
        until = time.monotonic() + self._time_slice_s

        def on_progress(_: BatchProgress) -> None:
            if time.monotonic() > until:
                raise _TimeSliceOver

        with self._open(request.queue) as (client, store):
            batch = _known(store, request.batch_id) or _new(client, request)
            try:
                return import_batch(
                    client,
                    store,
                    Path(request.source),
                    batch=batch,
                    limits=RunLimits(on_progress=on_progress),
                )
            except _TimeSliceOver:
                raise Reschedule from None

    def export_file(self, batch_id: str, queue: str, output: str, errors: str | None) -> Batch:
        """Write the answers when the batch is over. Raises Reschedule before."""
        with self._open(queue) as (client, store):
            batch = refresh(client, store, batch_id)
            if not batch.state.is_final:
                raise Reschedule
            paths = Paths.of(Path(output), Path(errors) if errors else None)
            ended, _missing = export_batch(
                client, store, batch_id, paths, source=Path(batch.input_file)
            )
            log.info("Batch %s is %s; its answers are in %s", batch_id, ended.state.value, output)
            return ended

    @contextlib.contextmanager
    def thread(self) -> Iterator[None]:
        """Hold one of the threads for files. Raises NoFreeThread if none is free."""
        if not self._threads.acquire(blocking=False):
            raise NoFreeThread
        try:
            yield
        finally:
            self._threads.release()

    @contextlib.contextmanager
    def _open(self, queue: str) -> Iterator[tuple[Client, BatchStore]]:
        settings = self._settings
        client = Client(
            settings.redis_url,
            queue=queue or settings.queue_name,
            database=settings.database_url,
            prefix=settings.key_prefix,
        )
        with self.thread(), client, contextlib.closing(open_store(client)) as store:
            yield client, store


def _known(store: BatchStore, batch_id: str) -> Batch | None:
    try:
        return store.get(batch_id)
    except BatchNotFound:
        return None


def _new(client: Client, request: ImportRequest) -> Batch:
    terms = BatchOptions(
        request.completion_window, request.tenant, request.any_model, request.metadata
    )
    return msgspec.structs.replace(
        new_batch(client, Path(request.source), terms), id=request.batch_id
    )
