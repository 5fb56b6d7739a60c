"""Reads the lines of a file that have neither an answer nor an open job, as groups of jobs.

The file is read in parts, which follow one another. In a part, lines that begin with the same text
stand together (`prefix_order`), and are jobs of one session: of several workers, the one that has
computed their beginning claims them. Lines that are done keep their place in the order, so a run
that goes on repeats it, and finds the jobs of an interrupted one first.

What is left of a part after PART_S is submitted in smaller ones, of as many lines as this time was
enough for. So a line waits at most twice PART_S for lines that stand behind it in the file, while
lines are submitted at a steady rate.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec

from tokenmill.bulk.batch import Batch
from tokenmill.bulk.collector import Collector
from tokenmill.bulk.formats import input_file
from tokenmill.bulk.formats.input_file import (
    BadLine,
    GoodLine,
    Line,
    read_again,
    repeated,
    to_request,
)
from tokenmill.bulk.prefix_order import fingerprint, in_prefix_order, shared_beginnings
from tokenmill_schemas.job import JobRequest

PART_LINES: Final = 10_000  # several times the jobs that are in the queue at once
PART_BYTES: Final = 64 * 1024 * 1024  # of its lines, which are in memory
PART_S: Final = 900.0

Group = tuple[list[JobRequest], list[BadLine], int]


class PendingLines:
    """The lines of a batch that are still to be submitted.

    `repeated_lines` have the name of an earlier line. `group` is the number of lines per call.
    `clock` returns seconds.
    """

    def __init__(
        self,
        batch: Batch,
        collector: Collector,
        repeated_lines: input_file.LineSet,
        group: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batch = batch
        self._collector = collector
        self._repeated = repeated_lines
        self._group = group
        self._clock = clock
        self._part_lines = PART_LINES  # fewer if so many are not submitted within PART_S
        self._order = input_file.BatchDefaults(
            batch.id, batch.tenant, batch.expires_ms or None, batch.any_model
        )

    def groups(self, path: Path, reached: int) -> Iterator[Group]:
        """Yield jobs, lines that can have no job, and the number of the line up to which all lines
        were yielded, this group included.
        """
        part, is_pending = _FilePart(0), self._filter(reached)
        for line in read_again(path, self._batch.digest):
            if part.is_full(line.line):
                yield from self._groups_of(part)
                part = _FilePart(line.line - 1)
            part.add(line, self._job_of, is_pending=is_pending(line))
        yield from self._groups_of(part)

    def _groups_of(self, part: _FilePart) -> Iterator[Group]:
        yield [], [], part.after  # so far no line needs a job
        rest, left, done = part.lines, deque(part.pending), set[int]()
        while rest:
            lines = _with_sessions(in_prefix_order(rest[: self._part_lines]))
            rest, began = rest[self._part_lines :], self._clock()
            for start in range(0, len(lines), self._group):
                if start and self._clock() - began > PART_S:
                    rest = sorted(lines[start:] + rest, key=attrgetter("line"))
                    self._part_lines = start
                    break
                group = lines[start : start + self._group]
                done.update(read.line for read in group)
                while left and left[0] in done:
                    done.remove(left.popleft())
                jobs = [read.job for read in group]
                yield (
                    [job for job in jobs if isinstance(job, JobRequest)],
                    [job for job in jobs if isinstance(job, BadLine)],
                    left[0] - 1 if left else part.last,
                )
        self._part_lines = min(PART_LINES, 2 * self._part_lines)

    def pending(self, path: Path, reached: int) -> Iterator[Line]:
        """Yield the lines after `reached` without an answer and without an open job, as they stand.

        If answers are kept in files, these show what is done, and all lines are read.
        """
        return filter(self._filter(reached), read_again(path, self._batch.digest))

    def _filter(self, reached: int) -> Callable[[Line], bool]:
        start, collector = 0 if self._collector.keeps_answers else reached, self._collector
        return lambda line: (
            line.line > start and line.line not in collector.jobs and not collector.has(line.line)
        )

    def _job_of(self, line: Line) -> JobRequest | BadLine:
        if isinstance(line, BadLine):
            return line
        if line.line in self._repeated:
            return repeated(line)
        return to_request(line, self._order)


@dataclass(frozen=True, slots=True)
class _ReadLine:
    """A line with its fingerprint. One that is not pending has no job."""

    line: int
    digests: tuple[bytes, ...]
    job: JobRequest | BadLine | None


class _FilePart:
    """Lines of a file after the line `after`, in its order. `pending` are the numbers of those that
    have a job.
    """

    def __init__(self, after: int) -> None:
        self.after = self.last = after
        self.lines: list[_ReadLine] = []
        self.pending: list[int] = []
        self._num_bytes = 0
        self._passed: list[Line] = []  # not pending; they count if a pending line follows

    def is_full(self, line: int) -> bool:
        return line > self.after + PART_LINES or self._num_bytes >= PART_BYTES

    def add(
        self, line: Line, job_of: Callable[[Line], JobRequest | BadLine], *, is_pending: bool
    ) -> None:
        self.last = line.line
        self._num_bytes += line.num_bytes if isinstance(line, GoodLine) else 0
        if not is_pending:
            self._passed.append(line)
            return
        for passed in self._passed:
            self.lines.append(_ReadLine(passed.line, _digests(job_of(passed)), None))
        self._passed = []
        job = job_of(line)
        self.lines.append(_ReadLine(line.line, _digests(job), job))
        self.pending.append(line.line)


def _with_sessions(lines: list[_ReadLine]) -> list[_ReadLine]:
    """Return the lines that have a job; those with the same beginning as jobs of one session."""
    found = []
    for read, beginning in zip(lines, shared_beginnings(lines), strict=True):
        job = read.job
        if isinstance(job, JobRequest) and beginning and not job.session:
            job = msgspec.structs.replace(job, session=f"lines:{beginning.hex()}")
            read = replace(read, job=job)
        if job is not None:
            found.append(read)
    return found


def _digests(job: JobRequest | BadLine) -> tuple[bytes, ...]:
    return fingerprint(job) if isinstance(job, JobRequest) else ()
