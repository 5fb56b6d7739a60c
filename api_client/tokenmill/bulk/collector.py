"""The open jobs of a batch, and the outcome of all others. Each line is answered once, however
often its end is reported.

A job's request is kept while the job is open, in case the queue loses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenmill.bulk.batch import Totals
from tokenmill.bulk.formats.input_file import BadLine, LineSet, line_of
from tokenmill.bulk.formats.output_files import Done
from tokenmill.bulk.formats.output_line import EncodedLine, of_bad_line, of_result
from tokenmill_schemas.codec import encode
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult


class Sink(Protocol):
    """A destination of answers. They are stored safely when `write` returns."""

    def write(self, answers: Sequence[EncodedLine]) -> None: ...


class Collector:
    """Collects the answers of a batch. Without a sink it only counts them, and they stay in the
    store or queue. `began_ms`: the server's time from which tokens count for the rate.
    """

    def __init__(
        self,
        batch_id: str,
        sink: Sink | None = None,
        done: Done | None = None,
        began_ms: int = 0,
    ) -> None:
        self._batch_id = batch_id
        self._began_ms = began_ms
        self.generated = 0  # tokens of jobs that ended since then, for the rate
        self._sink = sink
        self._lines = done.lines if done else LineSet()
        self.totals = self._settled = done.totals if done else Totals()
        self._shares: dict[int, Totals] = {}  # shares of lines that `_settled` does not include
        self.jobs: dict[int, JobRequest] = {}  # by line, in the order of submission
        self.num_bytes = 0
        self._sizes: dict[int, int] = {}

    @property
    def keeps_answers(self) -> bool:
        return self._sink is not None

    def has(self, line: int) -> bool:
        return line in self._lines

    def open(self, job: JobRequest) -> None:
        line = line_of(self._batch_id, job.job_id)
        if line not in self.jobs:
            self.jobs[line] = job
            self._sizes[line] = size = len(encode(job))
            self.num_bytes += size

    def drop(self, job: JobRequest) -> None:
        """Close a job that the queue has lost."""
        self._close(line_of(self._batch_id, job.job_id))

    def up_to(self, line: int) -> Totals:
        """Return the totals from which a later run continues after this line.

        With a sink these are all totals so far; a later run reads the files. Without a sink they
        cover the lines up to `line` only, because later lines will be counted again.
        """
        if self._sink is not None:
            return self.totals
        for settled in [number for number in self._shares if number <= line]:
            self._settled = self._settled.plus(self._shares.pop(settled))
        return self._settled

    def take(self, results: Sequence[JobResult]) -> None:
        self.generated += sum(
            result.usage.completion_tokens
            for result in results
            if result.finished_ms >= self._began_ms
            and not self.has(line_of(self._batch_id, result.job_id))
        )
        self._take([of_result(self._batch_id, result) for result in results])

    def take_bad(self, lines: Sequence[BadLine]) -> None:
        self._take([of_bad_line(self._batch_id, line) for line in lines])

    def _take(self, answers: Sequence[EncodedLine]) -> None:
        new = {answer.line: answer for answer in answers if answer.line not in self._lines}
        if new and self._sink is not None:
            self._sink.write(list(new.values()))
        for answer in new.values():
            self._lines.add(answer.line)
            self.totals = self.totals.plus(answer.share)
            if self._sink is None:
                self._shares[answer.line] = answer.share
        for answer in answers:
            self._close(answer.line)

    def _close(self, line: int) -> None:
        if self.jobs.pop(line, None) is not None:
            self.num_bytes -= self._sizes.pop(line)
