"""Makes finished jobs, a database for them, and a simulated Redis that fails on request."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import sqlalchemy

from tokenmill.sql.engine import open_engine
from tokenmill_schemas import (
    ChoiceResult,
    Chunk,
    FinishReason,
    JobError,
    JobRequest,
    JobResult,
    JobStatus,
    Priority,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from tokenmill_worker.jobs import FinishedJob

_ids = itertools.count(1)


def result(job_id: str | None = None, **changes: Any) -> JobResult:
    base = JobResult(
        job_id=job_id or f"job-{next(_ids):05d}",
        status=JobStatus.SUCCEEDED,
        model="tiny",
        tenant="acme",
        choices=(
            ChoiceResult(
                text="Blue light scatters. ☁",
                token_ids=(7, 8, 9),
                text_ends=(4, 10, 22),
                finish_reason=FinishReason.STOP,
                logprobs=(
                    TokenLogprob(-0.25, ((7, -0.25), (3, -1.5)), b"Blue", (b"Blue", b"\xe2")),
                    TokenLogprob(-1.0),
                    TokenLogprob(-2.0),
                ),
            ),
        ),
        usage=Usage(
            prompt_tokens=11,
            cached_tokens=4,
            completion_tokens=3,
            queue_ms=5,
            ttft_ms=20,
            total_ms=90,
            reasoning_tokens=2,
        ),
        worker_id="w1",
        created_ms=1_795_000_000_000,
        started_ms=1_795_000_000_005,
        finished_ms=1_795_000_000_090,
        metadata={"user": "42"},
    )
    return msgspec.structs.replace(base, **changes)


def finished(job_id: str | None = None, token: int = 1, **changes: Any) -> FinishedJob:
    end = result(job_id, **changes)
    request = JobRequest(
        job_id=end.job_id,
        prompt="a secret prompt",
        params=SamplingParams(max_tokens=64, logit_bias={5: 1.5}),
        priority=Priority.INTERACTIVE,
        tenant=end.tenant,
        batch_id="batch-1",
    )
    chunk = Chunk(job_id=end.job_id, index=3, status=end.status, usage=end.usage, error=end.error)
    return FinishedJob(token, end, chunk, request)


def failed(
    job_id: str, message: str = "too long", status: JobStatus = JobStatus.FAILED, **changes: Any
) -> FinishedJob:
    return finished(
        job_id,
        status=status,
        choices=(),
        usage=Usage(),
        error=JobError("engine_crash", message),
        **changes,
    )


@contextmanager
def reading(url: str) -> Iterator[sqlalchemy.Connection]:
    engine = open_engine(url)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def rows(url: str, statement: str) -> list[dict[str, Any]]:
    with reading(url) as connection:
        return [dict(row) for row in connection.execute(sqlalchemy.text(statement)).mappings()]


def counts(url: str) -> tuple[int, int, int, int]:
    """Count rows and distinct ids of jobs and of usage: equal if each job is there once."""
    statement = (
        "SELECT (SELECT count(*) FROM jobs) AS a, (SELECT count(DISTINCT id) FROM jobs) AS b, "
        "(SELECT count(*) FROM usage) AS c, (SELECT count(*) FROM usage JOIN jobs ON jobs.id = "
        "usage.job_id) AS d"
    )
    row = rows(url, statement)[0]
    return row["a"], row["b"], row["c"], row["d"]


@dataclass
class FakeRedis:
    """An Acknowledger: repeatable, fenced, and able to fail before or after its effect."""

    done: dict[str, FinishedJob] = field(default_factory=dict)
    calls: list[list[str]] = field(default_factory=list)
    outdated: set[str] = field(default_factory=set)
    fail_before: int = 0  # calls from now that have no effect
    fail_after: int = 0  # calls from now whose reply is lost
    poison: set[str] = field(default_factory=set)  # ids that break each call they are in

    async def finish(self, jobs: list[FinishedJob]) -> list[bool]:
        ids = [job.result.job_id for job in jobs]
        self.calls.append(ids)
        if self.fail_before > 0 or self.poison & set(ids):
            self.fail_before -= 1
            raise ConnectionError("redis is away")
        for job in jobs:
            if job.result.job_id not in self.outdated:
                self.done.setdefault(job.result.job_id, job)
        if self.fail_after > 0:
            self.fail_after -= 1
            raise ConnectionError("the reply was lost")
        return [job_id not in self.outdated for job_id in ids]
