"""Runs bulk files. The commands and the tasks call these two functions:

    run_batch      in this process: file in, files out; continues where it stopped when it is called again
    import_batch   file in; export_batch of outcome.py fetches the answers later, from anywhere

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
    now_ms,
    window_ms,
)
from tokenmill.bulk.collector import Collector
from tokenmill.bulk.feeder import Pump
from tokenmill.bulk.formats.input_file import Survey, check_readable, survey
from tokenmill.bulk.formats.output_files import Done, OutputFiles, Paths
from tokenmill.bulk.formats.output_line import CANCELLED, EXPIRED
from tokenmill.bulk.lifecycle import REASONS, conclude, fill, refresh
from tokenmill.bulk.progress import Pacing, Progress
from tokenmill.bulk.stores.store import BatchStore
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError, InvalidRequest
from tokenmill.operations.job_request import build_request
from tokenmill_schemas.openai import BatchError


@dataclass(frozen=True, slots=True)
class Terms:
    """Options of a whole batch. `any_model`: use the model that the queue serves instead of those
    that the lines name.
    """

    completion_window: str = DEFAULT_WINDOW
    tenant: str = ""
    any_model: bool = False
    metadata: dict[str, str] = field(default_factory=dict)


def new_batch(client: Client, path: Path, terms: Terms | None = None) -> Batch:
    """Build a batch that is not stored yet. Raises ConfigurationError, also for a file that cannot
    be read.
    """
    terms = terms or Terms()
    check_readable(path)
    now = now_ms()
    return Batch(
        id=new_batch_id(),
        queue=client.queue,
        tenant=_checked_tenant(terms.tenant),
        any_model=terms.any_model,
        input_file=str(path.resolve()),
        completion_window=terms.completion_window,
        metadata=check_metadata(terms.metadata),
        created_ms=now,
        expires_ms=now + window_ms(terms.completion_window),
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
    terms: Terms | None = None,
    pacing: Pacing | None = None,
) -> Batch:
    """Run a file to its end and return the batch.

    Raises ConfigurationError if the output belongs to another input, or was begun with other terms.
    """
    pacing = pacing or Pacing()
    client.depth()  # fail at once if the queue is unreachable from the start; later failures are retried
    with OutputFiles(paths) as files:
        before = files.load_record()
        if before is None:
            _refuse_foreign(paths)
        batch = before or new_batch(client, path, terms)
        found = survey(path, _surveying(pacing))
        if before is not None:
            _refuse_another(before, found, terms, paths)
            if before.state.is_final:
                return before
        files.save_record(_described(batch, found))
        batch = _stored(store, _described(batch, found))
        if batch.state is BatchState.FINALIZING:  # another process was interrupted while ending it
            batch = refresh(client, store, batch.id)
        collector = Collector(batch.id, files, files.resume())
        pump = Pump(
            client,
            store,
            batch,
            collector,
            repeated_lines=found.repeated,
            pacing=pacing,
            is_resumed=before is not None,
        )
        if (
            batch.state is not BatchState.IN_PROGRESS or pump.is_late
        ):  # collect the jobs that ended since the last run
            fill(client, store, batch, collector)
        if batch.state.is_final:  # another process ended it
            pump.refuse_rest(path, REASONS[batch.state])
        else:
            _pump_to_the_end(pump, path)
        return _ended(store, files, batch.id, collector.totals)


def _pump_to_the_end(pump: Pump, path: Path) -> None:
    pump.hand_in(path)
    pump.drain()
    if pump.state is BatchState.CANCELLING:
        pump.refuse_rest(path, CANCELLED)
    elif pump.is_late:
        pump.refuse_rest(path, EXPIRED)


def _ended(store: BatchStore, files: OutputFiles, batch_id: str, totals: Totals) -> Batch:
    paths = files.paths
    errors = str(paths.errors.resolve()) if paths.errors.exists() else None
    named = msgspec.structs.replace(
        store.get(batch_id), output_file=str(paths.output.resolve()), error_file=errors
    )
    store.describe(named)
    ended = conclude(store, named, totals)
    files.save_record(ended)
    return ended


def _refuse_another(before: Batch, found: Survey, terms: Terms | None, paths: Paths) -> None:
    """Raise ConfigurationError if the input or the terms differ from those with which the output
    was begun.
    """
    if before.digest != found.digest:
        raise ConfigurationError(
            f"{paths.output} belongs to batch {before.id}, whose input was another: name another output, "
            f"or remove it and {paths.record}"
        )
    names = msgspec.structs.asdict(before)
    changed = [
        term.name
        for term in fields(Terms)
        if terms and names[term.name] != getattr(terms, term.name)
    ]
    if changed:
        raise ConfigurationError(
            f"{paths.output} belongs to batch {before.id}, which was begun with another {' and '.join(changed)}: "
            "say the same again to go on, or name another output"
        )


def _refuse_foreign(paths: Paths) -> None:
    for path in (paths.output, paths.errors):
        if path.exists() and path.stat().st_size:
            raise ConfigurationError(f"{path} is there already and no batch's output: name another")


def import_batch(
    client: Client,
    store: BatchStore,
    path: Path,
    *,
    batch: Batch | None = None,
    terms: Terms | None = None,
    pacing: Pacing | None = None,
) -> Batch:
    """Submit every line of a file and return the batch.

    `batch` is one from `new_batch`, or one that was begun with this file. None builds one from
    `terms`.
    """
    pacing = pacing or Pacing()
    client.depth()
    is_resumed = batch is not None and batch.state is not BatchState.VALIDATING
    batch = batch or new_batch(client, path, terms)
    store.create(batch)
    found = survey(path, _surveying(pacing))
    if batch.digest and batch.digest != found.digest:
        raise ConfigurationError(f"batch {batch.id} was begun with another file than {path}")
    batch = _stored(store, _described(batch, found))
    if not batch.state.is_final and not batch.is_handed_in:
        pump = Pump(
            client,
            store,
            batch,
            Collector(batch.id, done=Done(totals=batch.totals)),
            repeated_lines=found.repeated,
            pacing=pacing,
            is_resumed=is_resumed,
        )
        pump.hand_in(path)
        if pump.state is BatchState.IN_PROGRESS and pump.is_late:
            pump.refuse_rest(path, EXPIRED)
    return refresh(client, store, batch.id)


def _surveying(pacing: Pacing) -> Callable[[int], object]:
    return lambda lines: pacing.watch(Progress(0, 0, Totals(), f"validating: {lines} lines"))


def _described(batch: Batch, found: Survey) -> Batch:
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


def _stored(store: BatchStore, batch: Batch) -> Batch:
    """Store the batch, start it (or fail it if the file has no requests), and return it."""
    store.create(batch)
    store.describe(batch)
    store.move(
        batch.id,
        BatchState.IN_PROGRESS if batch.total else BatchState.FAILED,
        [BatchState.VALIDATING],
    )
    return store.get(batch.id)
