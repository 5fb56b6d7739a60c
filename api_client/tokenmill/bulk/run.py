"""Runs bulk files. The commands and the tasks call these two functions:

    run_batch      file in, files out, in this process; called again, it continues where it stopped
    import_batch   file in; export_batch of lifecycle.py fetches the answers later, from anywhere

Both may be interrupted at any time and called again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

import msgspec

from tokenmill.bulk.batch import (
    DEFAULT_WINDOW,
    Batch,
    BatchState,
    Totals,
    check_metadata,
    new_batch_id,
    window_ms,
)
from tokenmill.bulk.collector import Collector
from tokenmill.bulk.feeder import BatchFeeder
from tokenmill.bulk.formats.input_file import FileSummary, check_readable, summarise
from tokenmill.bulk.formats.output_files import Done, OutputFiles, Paths
from tokenmill.bulk.formats.output_line import CANCELLED, EXPIRED
from tokenmill.bulk.lifecycle import REASONS, end_batch, fill, refresh
from tokenmill.bulk.progress import BatchProgress, RunLimits
from tokenmill.bulk.store import BatchStore
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError, InvalidRequest
from tokenmill.operations.io_requests import server_time
from tokenmill.operations.submit import build_request
from tokenmill_schemas.openai_batch import BatchError


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Options of a whole batch. `any_model`: use the model that the queue serves instead of those
    that the lines name.
    """

    completion_window: str = DEFAULT_WINDOW
    tenant: str = ""
    any_model: bool = False
    metadata: dict[str, str] = field(default_factory=dict)


def new_batch(client: Client, path: Path, options: BatchOptions | None = None) -> Batch:
    """Build a batch that is not stored yet. Raises ConfigurationError, also for a file that cannot
    be read.
    """
    options = options or BatchOptions()
    check_readable(path)
    now = client.perform(server_time())
    return Batch(
        id=new_batch_id(),
        queue=client.queue,
        tenant=_checked_tenant(options.tenant),
        any_model=options.any_model,
        input_file=str(path.resolve()),
        completion_window=options.completion_window,
        metadata=check_metadata(options.metadata),
        created_ms=now,
        expires_ms=now + window_ms(options.completion_window),
    )


def _checked_tenant(tenant: str) -> str:
    """Return the tenant's name. A name that no job may have is an error of the whole batch, not of
    its lines. Raises ConfigurationError.
    """
    try:
        return build_request({"prompt": "x", "tenant": tenant}).tenant
    except InvalidRequest as error:
        raise ConfigurationError(str(error)) from None


def run_batch(
    client: Client,
    store: BatchStore,
    path: Path,
    paths: Paths,
    *,
    options: BatchOptions | None = None,
    limits: RunLimits | None = None,
) -> Batch:
    """Run a file to its end and return the batch.

    Raises ConfigurationError if the output belongs to another input, or was begun with other
    options.
    """
    limits = limits or RunLimits()
    client.depth()  # fail at once if the queue is unreachable now; later failures are retried
    with OutputFiles(paths) as files:
        before = files.load_record()
        if before is None:
            _check_unused(paths)
        batch = before or new_batch(client, path, options)
        found = summarise(path, summarising(limits))
        if before is not None:
            _check_same_batch(before, found, options, paths)
            if before.state.is_final:
                return before
        files.save_record(described(batch, found))
        batch = stored(store, described(batch, found))
        if batch.state is BatchState.FINALIZING:  # another process was interrupted while ending it
            batch = refresh(client, store, batch.id)
        collector = Collector(batch.id, files, files.resume(), client.clock.now_ms())
        feeder = BatchFeeder(
            client,
            store,
            batch,
            collector,
            repeated_lines=found.repeated,
            limits=limits,
            is_resumed=before is not None,
        )
        # collect the jobs that ended since the last run
        if batch.state is not BatchState.IN_PROGRESS or feeder.is_late:
            fill(client, store, batch, collector)
        if batch.state.is_final:  # another process ended it
            feeder.reject_rest(path, REASONS[batch.state])
        else:
            _feed_to_the_end(feeder, path)
        return _ended(store, files, batch.id, collector.totals)


def _feed_to_the_end(feeder: BatchFeeder, path: Path) -> None:
    feeder.submit(path)
    feeder.drain()
    if feeder.state is BatchState.CANCELLING:
        feeder.reject_rest(path, CANCELLED)
    elif feeder.is_late:
        feeder.reject_rest(path, EXPIRED)


def _ended(store: BatchStore, files: OutputFiles, batch_id: str, totals: Totals) -> Batch:
    paths = files.paths
    errors = str(paths.errors.resolve()) if paths.errors.exists() else None
    named = msgspec.structs.replace(
        store.get(batch_id), output_file=str(paths.output.resolve()), error_file=errors
    )
    store.describe(named)
    ended = end_batch(store, named, totals)
    files.save_record(ended)
    return ended


def _check_same_batch(
    before: Batch, found: FileSummary, options: BatchOptions | None, paths: Paths
) -> None:
    """Raise ConfigurationError if the input or the options differ from those with which the output
    was begun.
    """
    if before.digest != found.digest:
        raise ConfigurationError(
            f"{paths.output} was made from a different input file: choose another output, "
            f"or delete it and {paths.record}"
        )
    names = msgspec.structs.asdict(before)
    changed = [
        option.name
        for option in fields(BatchOptions)
        if options and names[option.name] != getattr(options, option.name)
    ]
    if changed:
        raise ConfigurationError(
            f"{paths.output} belongs to batch {before.id}, "
            f"which was begun with another {' and '.join(changed)}: "
            "say the same again to go on, or name another output"
        )


def _check_unused(paths: Paths) -> None:
    for path in (paths.output, paths.errors):
        if path.exists() and path.stat().st_size:
            raise ConfigurationError(f"{path} is there already and no batch's output: name another")


def import_batch(
    client: Client,
    store: BatchStore,
    path: Path,
    *,
    batch: Batch | None = None,
    options: BatchOptions | None = None,
    limits: RunLimits | None = None,
) -> Batch:
    """Submit every line of a file and return the batch.

    `batch` is one from `new_batch`, or one that was begun with this file. None builds one from
    `options`.
    """
    limits = limits or RunLimits()
    client.depth()
    is_resumed = batch is not None and batch.state is not BatchState.VALIDATING
    batch = batch or new_batch(client, path, options)
    store.create(batch)
    found = summarise(path, summarising(limits))
    if batch.digest and batch.digest != found.digest:
        raise ConfigurationError(f"batch {batch.id} was begun with another file than {path}")
    batch = stored(store, described(batch, found))
    if not batch.state.is_final and not batch.is_submitted:
        feeder = BatchFeeder(
            client,
            store,
            batch,
            Collector(batch.id, done=Done(totals=batch.totals), began_ms=client.clock.now_ms()),
            repeated_lines=found.repeated,
            limits=limits,
            is_resumed=is_resumed,
        )
        feeder.submit(path)
        if feeder.state is BatchState.IN_PROGRESS and feeder.is_late:
            feeder.reject_rest(path, EXPIRED)
    return refresh(client, store, batch.id)


def summarising(limits: RunLimits) -> Callable[[int], object]:
    return lambda lines: limits.on_progress(
        BatchProgress(0, 0, Totals(), f"validating: {lines} lines")
    )


def described(batch: Batch, found: FileSummary) -> Batch:
    listed = [
        BatchError(code=bad.code, message=bad.message, line=bad.line, param=bad.param)
        for bad in found.first_bad
    ]
    if not found.total:
        listed = [BatchError(code="empty_file", message="The input file has no requests.")]
    return msgspec.structs.replace(
        batch,
        endpoint=found.endpoint,
        model=found.model,
        total=found.total,
        last_line=found.last_line,
        digest=found.digest,
        errors=tuple(listed),
    )


def stored(store: BatchStore, batch: Batch) -> Batch:
    """Store the batch, start it (or fail it if the file has no requests), and return it."""
    store.create(batch)
    store.describe(batch)
    store.move(
        batch.id,
        BatchState.IN_PROGRESS if batch.total else BatchState.FAILED,
        [BatchState.VALIDATING],
    )
    return store.get(batch.id)
