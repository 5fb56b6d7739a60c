"""Reads the lines of a file that have neither an answer nor an open job, as groups of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenmill.bulk.batch import Batch
from tokenmill.bulk.collector import Collector
from tokenmill.bulk.formats import input_file
from tokenmill.bulk.formats.input_file import BadLine, Line, read_again, repeated, to_request
from tokenmill_schemas.job import JobRequest


class PendingLines:
    """The lines of a batch that are still to be submitted.

    `repeated_lines` have the name of an earlier line. `group` is the number of lines per call.
    """

    def __init__(
        self, batch: Batch, collector: Collector, repeated_lines: input_file.LineSet, group: int
    ) -> None:
        self._batch = batch
        self._collector = collector
        self._repeated = repeated_lines
        self._group = group
        self._order = input_file.BatchDefaults(
            batch.id, batch.tenant, batch.expires_ms or None, batch.any_model
        )

    def groups(
        self, path: Path, reached: int
    ) -> Iterator[tuple[list[JobRequest], list[BadLine], int]]:
        """Yield jobs, lines that can have no job, and the number of the last line of each group."""
        jobs: list[JobRequest] = []
        bad: list[BadLine] = []
        last_line = 0
        for line in self.pending(path, reached):
            job = self._job_of(line)
            if isinstance(job, BadLine):
                bad.append(job)
            else:
                jobs.append(job)
            last_line = line.line
            if len(jobs) + len(bad) >= self._group:
                yield jobs, bad, last_line
                jobs, bad = [], []
        if jobs or bad:
            yield jobs, bad, last_line

    def pending(self, path: Path, reached: int) -> Iterator[Line]:
        """Yield the lines after `reached` without an answer and without an open job.

        If answers are kept in files, these show what is done, and all lines are read.
        """
        start, collector = 0 if self._collector.keeps_answers else reached, self._collector
        for line in read_again(path, self._batch.digest):
            if (
                line.line > start
                and line.line not in collector.jobs
                and not collector.has(line.line)
            ):
                yield line

    def _job_of(self, line: Line) -> JobRequest | BadLine:
        if isinstance(line, BadLine):
            return line
        if line.line in self._repeated:
            return repeated(line)
        return to_request(line, self._order)
