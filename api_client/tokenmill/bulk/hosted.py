"""Runs a batch whose files are in the gateway's store, from its input file to its outputs.

A call may be cut off anywhere, in any process, and another goes on: lines are submitted under the
same ids, answers are where the workers put them, and the outputs appear in the transaction that
ends the batch. Two calls at once do no harm.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from tokenmill.bulk.batch import Batch, BatchState
from tokenmill.bulk.collector import Collector
from tokenmill.bulk.feeder import POLL_S, BatchFeeder
from tokenmill.bulk.formats.input_file import LineSet, summarise
from tokenmill.bulk.formats.output_files import Done, OutputFiles, Paths
from tokenmill.bulk.formats.output_line import CANCELLED, EXPIRED, LOST, EncodedLine
from tokenmill.bulk.lifecycle import cancel_jobs, fill, fill_rest, running
from tokenmill.bulk.progress import BatchProgress, RunLimits
from tokenmill.bulk.run import described, stored, summarising
from tokenmill.bulk.store import BatchStore
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError
from tokenmill.files.file_table import FileTable
from tokenmill.files.object_store import ObjectStore
from tokenmill.files.stored_file import StoredFile, new_file_id
from tokenmill.operations.io_requests import server_time
from tokenmill_schemas.openai_batch import BatchError

OUTPUT_PURPOSE: Final = "batch_output"
_GONE: Final = BatchError(
    code="file_not_found", message="The input file was removed before its lines were read."
)


@dataclass(frozen=True, slots=True)
class HostedBatches:
    """The places of a batch: its queue, its row, and its files. `keep` is called all the time, also
    while the outputs are written.
    """

    client: Client
    store: BatchStore
    files: FileTable
    objects: ObjectStore
    keep: Callable[[], object] = lambda: None

    def advance(self, batch_id: str, limits: RunLimits) -> Batch:
        """Run a batch to its end, and return it. What `limits.on_progress` raises cuts it off."""
        batch = self.store.get(batch_id)
        if batch.state.is_final:
            return batch
        with tempfile.TemporaryDirectory(prefix="tokenmill-batch-") as name:
            folder = Path(name)
            file = self.files.find(batch.input_file)
            try:
                if file is None:
                    raise FileNotFoundError
                source = self.objects.fetch(file.id, file.bytes, folder)
            except FileNotFoundError:
                return self._fail(batch, [_GONE])
            if not batch.digest:  # no call has read its lines; it may be cancelled already
                batch = self._validated(batch, source, limits)
            if batch.state.is_final:
                return batch
            if batch.state is not BatchState.FINALIZING:
                self._feed(batch, source, limits)
                self._wait(batch_id, limits)
                self.store.move(batch_id, BatchState.FINALIZING, [BatchState.IN_PROGRESS])
            return self._finish(self.store.get(batch_id), source, folder)

    def _validated(self, batch: Batch, source: Path, limits: RunLimits) -> Batch:
        """Check all lines. A file with one that is no request of this batch fails as a whole."""
        try:
            found = summarise(source, summarising(limits), only=(batch.endpoint, batch.model))
        except ConfigurationError as error:
            words = str(error).replace(str(source), batch.input_file)
            return self._fail(batch, [BatchError(code="invalid_file", message=words)])
        if found.first_bad or not found.total:
            return self._fail(batch, described(batch, found).errors)
        return stored(self.store, described(batch, found))

    def _fail(self, batch: Batch, errors: Sequence[BatchError]) -> Batch:
        failed = msgspec.structs.replace(batch, errors=tuple(errors))
        self.store.end_hosted(failed, BatchState.FAILED, batch.totals, ())
        cancel_jobs(self.client, batch)
        return self.store.get(batch.id)

    def _feed(self, batch: Batch, source: Path, limits: RunLimits) -> None:
        """Submit the lines, and wait for the ends of those that this call submitted."""
        feeder = BatchFeeder(
            self.client,
            self.store,
            batch,
            Collector(batch.id, done=Done(totals=batch.totals)),
            repeated_lines=LineSet(),
            limits=limits,
            is_resumed=True,
        )
        feeder.submit(source)
        feeder.drain()

    def _wait(self, batch_id: str, limits: RunLimits) -> None:
        """Wait for the jobs that earlier calls submitted, if the batch is cancelled or late."""
        while any(running(self.client, batch := self.store.get(batch_id))):
            if batch.state is BatchState.CANCELLING or self._is_late(batch, limits.late_s):
                cancel_jobs(self.client, batch)
            limits.on_progress(BatchProgress(batch.total, 0, batch.totals))
            time.sleep(POLL_S)

    def _is_late(self, batch: Batch, by_s: float = 0.0) -> bool:
        now_ms = self.client.perform(server_time())
        return 0 < batch.expires_ms <= now_ms - by_s * 1000

    # ── the outputs ──

    def _finish(self, batch: Batch, source: Path, folder: Path) -> Batch:
        if batch.state.is_final:  # another process ended it
            return batch
        is_late = batch.state is not BatchState.CANCELLING and self._is_late(batch)
        paths = Paths.of(folder / "output.jsonl")
        with OutputFiles(paths) as outputs:
            sink = _KeptSink(outputs, self.keep)
            collector = Collector(batch.id, sink, began_ms=self.client.clock.now_ms())
            fill(self.client, self.store, batch, collector, is_late=is_late)
            why = EXPIRED if is_late else LOST
            reason = CANCELLED if batch.state is BatchState.CANCELLING else why
            if collector.totals.ended < batch.total:
                fill_rest(batch, collector, source, reason)
            ended = collector.totals
            output = self._put(batch, paths.output, "output")
            errors = self._put(batch, paths.errors, "error")
        if batch.state is BatchState.CANCELLING:
            state = BatchState.CANCELLED
        else:
            state = BatchState.EXPIRED if ended.expired else BatchState.COMPLETED
        named = msgspec.structs.replace(
            batch,
            output_file=output.id if output else None,
            error_file=errors.id if errors else None,
        )
        written = [file for file in (output, errors) if file is not None]
        if not self.store.end_hosted(named, state, ended, written):
            for file in written:  # another process ended it, or it was cancelled
                self.objects.remove(file.id)
                self.files.forget(file.id)
        return self.store.get(batch.id)

    def _put(self, batch: Batch, path: Path, kind: str) -> StoredFile | None:
        if not path.exists() or not (size := path.stat().st_size):
            return None
        now_ms, expires_s = self.client.clock.now_ms(), batch.output_expires_s
        file = StoredFile(
            id=new_file_id(),
            tenant=batch.tenant,
            purpose=OUTPUT_PURPOSE,
            name=f"{batch.id}_{kind}.jsonl",
            bytes=size,
            created_ms=now_ms,
            expires_ms=None if expires_s is None else now_ms + expires_s * 1000,
        )
        self.files.add(file)
        self.keep()
        self.objects.put(file.id, path)
        return file


class _KeptSink:
    """Writes answers, and says after each page that the process lives."""

    def __init__(self, files: OutputFiles, keep: Callable[[], object]) -> None:
        self._files = files
        self._keep = keep

    def write(self, answers: Sequence[EncodedLine]) -> None:
        self._files.write(answers)
        self._keep()
