"""Reads the state of a batch, ends it when all its jobs have ended, cancels it, and exports its
files.

A batch needs no process that follows it: its jobs run by themselves, and the next reader finds that
they have ended. Only lines that were never submitted need a process with the input file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tokenmill.bulk import job_queries
from tokenmill.bulk.batch import Batch, BatchState, Totals
from tokenmill.bulk.collector import Collector
from tokenmill.bulk.formats.input_file import job_id, read
from tokenmill.bulk.formats.output_files import OutputFiles, Paths
from tokenmill.bulk.formats.output_line import (
    CANCELLED,
    EXPIRED,
    LOST,
    of_bad_line,
    of_result,
    unanswered,
)
from tokenmill.bulk.pages import paged
from tokenmill.bulk.pending_lines import PART_LINES
from tokenmill.bulk.progress import WINDOW
from tokenmill.bulk.store import BatchStore
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError
from tokenmill.operations.io_requests import server_time
from tokenmill_schemas.openai_batch import LineError
from tokenmill_schemas.result import JobResult, JobStatus

_ALIVE_MS: Final = 15_000  # a process that submits lines updates `seen_ms` every second
REASONS: Final[dict[BatchState, LineError]] = {
    BatchState.COMPLETED: LOST,
    BatchState.FAILED: LOST,
    BatchState.CANCELLED: CANCELLED,
    BatchState.EXPIRED: EXPIRED,
}


def refresh(client: Client, store: BatchStore, batch_id: str) -> Batch:
    """Return the batch as it is now, and end it if it is complete; the tasks end one of the
    gateway. Raises BatchNotFound.
    """
    batch = store.get(batch_id)
    if batch.state.is_final or batch.state is BatchState.VALIDATING or batch.is_hosted:
        return batch
    now_ms = client.perform(server_time())
    if not _may_end(batch, now_ms) or any(running(client, batch)):
        totals = _counted(client, store, batch, with_tokens=False)
        return msgspec.structs.replace(batch, totals=totals)
    totals = _counted(client, store, batch, with_tokens=True)
    if totals.ended < batch.total and _has_runner(store, batch, now_ms):
        return msgspec.structs.replace(batch, totals=totals)
    return end_batch(store, batch, totals)


def _has_runner(store: BatchStore, batch: Batch, now_ms: int) -> bool:
    """Return whether a live run has counts that nobody else has: if results are not stored, only
    the run counts those in its files.
    """
    is_alive = now_ms - batch.seen_ms <= _ALIVE_MS
    return (
        is_alive
        and batch.state is BatchState.IN_PROGRESS
        and store.totals(batch, with_tokens=False) is None
    )


def running(client: Client, batch: Batch) -> Iterator[bool]:
    """Yield, for each page of jobs that may be open, whether one of them is."""
    for page in _unsettled(batch):
        yield not all(job_queries.is_over(client, page).values())


def _unsettled(batch: Batch) -> Iterator[list[str]]:
    """Yield pages of the ids of jobs that may be open."""
    for lines in paged(range(batch.over_line + 1, _last_open(batch) + 1)):
        yield [job_id(batch.id, line) for line in lines]


def _last_open(batch: Batch) -> int:
    """Return a line after which no job is: lines of the next part of the file may be submitted
    since the last progress was written.
    """
    return min(batch.last_line, batch.submitted + WINDOW + PART_LINES)


def _may_end(batch: Batch, now_ms: int) -> bool:
    """Return whether a batch without running jobs is complete: no more lines will be submitted."""
    is_left = now_ms - batch.seen_ms > _ALIVE_MS
    if batch.state is BatchState.CANCELLING:
        return batch.is_submitted or is_left
    return batch.is_submitted or (is_left and 0 < batch.expires_ms <= now_ms)


def end_batch(store: BatchStore, batch: Batch, totals: Totals) -> Batch:
    """Move a batch to its last state and return it. Lines without an answer count as failed."""
    is_late = totals.expired or (totals.ended < batch.total and not batch.is_submitted)
    totals = msgspec.structs.replace(totals, failed=batch.total - totals.completed)
    lines = {"submitted": batch.submitted, "over_line": batch.last_line}
    store.progress(batch.id, **lines, totals=totals)
    if not store.move(batch.id, BatchState.CANCELLED, [BatchState.CANCELLING]):
        store.move(batch.id, BatchState.FINALIZING, [BatchState.IN_PROGRESS])
        store.move(
            batch.id,
            BatchState.EXPIRED if is_late else BatchState.COMPLETED,
            [BatchState.FINALIZING],
        )
    return store.get(batch.id)


def _counted(client: Client, store: BatchStore, batch: Batch, *, with_tokens: bool) -> Totals:
    known = store.totals(batch, with_tokens=with_tokens)
    if known is not None and (known.ended >= batch.total or not with_tokens):
        return known  # else count in the queue too: workers may record into another database
    totals = Totals()
    for bad in store.rejected(batch.id):
        totals = totals.plus(of_bad_line(batch.id, bad).share)
    for page in paged(range(1, _last_open(batch) + 1)):
        for result in job_queries.results(client, [job_id(batch.id, line) for line in page]):
            totals = totals.plus(of_result(batch.id, result).share)
    every = [*([known] if known else []), batch.totals, totals]
    # the queue drops jobs whose answers are in a run's files
    return max(every, key=lambda each: each.ended)


def cancel_batch(client: Client, store: BatchStore, batch_id: str) -> Batch:
    """Cancel a batch. A process that submits its lines stops within a second; running jobs keep
    their text so far. Repeating the call is safe.
    """
    open_states = (BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING)
    store.move(batch_id, BatchState.CANCELLING, open_states)
    batch = store.get(batch_id)
    if batch.state is BatchState.CANCELLING:
        cancel_jobs(client, batch)
    return refresh(client, store, batch_id)


def cancel_jobs(client: Client, batch: Batch) -> None:
    """Cancel all jobs of a batch that may be open."""
    for page in _unsettled(batch):
        job_queries.cancel(client, page)


def export_batch(
    client: Client, store: BatchStore, batch_id: str, paths: Paths, *, source: Path | None = None
) -> tuple[Batch, int]:
    """Write all answers to files, replacing their contents. Return the batch and the number of
    lines without an answer in the files.

    `source` is the input file, from which the names of lines that were never submitted are read.
    Raises ConfigurationError for the output of an unfinished run, whose answers may exist nowhere
    else, and for the input file.
    """
    batch = refresh(client, store, batch_id)
    for given in (source, Path(batch.input_file)):
        if given is not None:
            paths.check_input(given)
    with OutputFiles(paths) as files:
        begun = files.load_record()
        if begun is not None and not begun.state.is_final:
            raise ConfigurationError(
                f"`bulk run` of {begun.id} continues with {paths.output}: name another output"
            )
        files.discard()
        collector = Collector(batch.id, files, began_ms=client.clock.now_ms())
        fill(client, store, batch, collector)
        if batch.state.is_final and collector.totals.ended < batch.total:
            reason = REASONS[batch.state]
            fill_rest(batch, collector, source or Path(batch.input_file), reason)
        output = str(paths.output.resolve()) if paths.output.stat().st_size else None
        errors = str(paths.errors.resolve()) if paths.errors.exists() else None
    if not batch.is_hosted:
        store.describe(msgspec.structs.replace(batch, output_file=output, error_file=errors))
    return store.get(batch_id), batch.total - collector.totals.ended


def fill(
    client: Client,
    store: BatchStore,
    batch: Batch,
    collector: Collector,
    *,
    is_late: bool = False,
) -> None:
    """Collect every answer that the store or the queue has, each once. `is_late`: jobs were
    cancelled because the batch's deadline had passed.
    """

    def take(results: Sequence[JobResult]) -> None:
        collector.take([_as_expired(result) if is_late else result for result in results])

    for results in paged(store.results(batch.id)):
        take(results)
    for bad in paged(store.rejected(batch.id)):
        collector.take_bad(bad)
    for lines in paged(range(1, _last_open(batch) + 1)):
        missing = [job_id(batch.id, line) for line in lines if not collector.has(line)]
        if missing:
            take(list(job_queries.results(client, missing)))


def _as_expired(result: JobResult) -> JobResult:
    if result.status is not JobStatus.CANCELLED:
        return result
    return msgspec.structs.replace(result, status=JobStatus.EXPIRED)


def fill_rest(batch: Batch, collector: Collector, source: Path, why: LineError) -> None:
    """Answer the lines that have no answer yet with an error."""
    try:
        rest = (
            line
            for line in read(source)
            if not collector.has(line.line) and line.line <= batch.last_line
        )
        for page in paged(unanswered(line.line, line.custom_id, why) for line in rest):
            collector.take_bad(page)
    except ConfigurationError:  # the input file is on another machine, and with it the names
        return
