"""The exceptions of the clients, and what the caller can do about each.

TokenmillError
├── ConfigurationError        a URL, a password or an option is wrong: fix it
├── InvalidRequest            the job can never run: fix it          (.problems)
├── QueueRefusal              nothing was stored: try later           (.accepted of earlier batches)
│   ├── QueueFull             (.depth .limit)
│   └── RateLimited           (.tenant .retry_after)
├── IdempotencyConflict       the key or id belongs to another job   (.job_id)
├── JobNotFound               neither the queue nor the database has the job
├── ResultTimeout             the job has not ended yet; also a TimeoutError
├── QueueUnserved             no worker has ever served the queue    (.queue .job_id)
├── JobFailed                 the job ended without an answer         (.result)
├── UnreadableRecord          a job's record is damaged, or of a newer version: update
├── ClientClosed              `close` was called before or during the call; also a RuntimeError
└── QueueUnavailable          the server cannot be reached, or refuses to write
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill_schemas.result import JobResult


class TokenmillError(Exception):
    """The base class. Each message is one sentence for people."""


class ConfigurationError(TokenmillError, ValueError):
    pass


class InvalidRequest(TokenmillError, ValueError):
    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class QueueRefusal(TokenmillError):
    """The queue refused a job. `accepted`: ids of the jobs that earlier batches of the same
    submit_many had stored.
    """

    accepted: tuple[str, ...] = ()


class QueueFull(QueueRefusal):
    def __init__(self, queue: str, depth: int, limit: int) -> None:
        super().__init__(f"queue {queue} holds {depth} waiting jobs and its limit is {limit}")
        self.depth = depth
        self.limit = limit


class RateLimited(QueueRefusal):
    def __init__(self, tenant: str, retry_after: float) -> None:
        super().__init__(
            f"tenant {tenant!r} submits faster than it may: retry after {retry_after:.2f} s"
        )
        self.tenant = tenant
        self.retry_after = retry_after


class IdempotencyConflict(TokenmillError):
    def __init__(self, job_id: str) -> None:
        super().__init__(
            f"the idempotency key or job id stands for job {job_id}, whose content is different"
        )
        self.job_id = job_id


class JobNotFound(TokenmillError, LookupError):
    def __init__(self, job_id: str) -> None:
        super().__init__(f"no job {job_id}: it was never submitted here, or its record has expired")
        self.job_id = job_id


class ResultTimeout(TokenmillError, TimeoutError):
    def __init__(self, job_id: str, timeout: float) -> None:
        super().__init__(f"job {job_id} has not ended within {timeout:g} s")
        self.job_id = job_id


class QueueUnserved(TokenmillError):
    """No worker has ever served the queue. The job stays in the queue.

    The arguments are texts, so that Celery's result backends can store the exception.
    """

    def __init__(self, queue: str, job_id: str) -> None:
        super().__init__(queue, job_id)
        self.queue = queue
        self.job_id = job_id

    def __str__(self) -> str:
        return (
            f"no worker has ever served the queue {self.queue!r}, so job {self.job_id} waits: "
            "check the queue's name, or start a worker for it"
        )


class JobFailed(TokenmillError):
    """Raised by `result(..., check=True)` when the job did not succeed."""

    def __init__(self, result: JobResult) -> None:
        reason = result.error.message if result.error else f"its state is {result.status.value}"
        super().__init__(f"job {result.job_id} has no answer: {reason}")
        self.result = result


class ClientClosed(TokenmillError, RuntimeError):
    def __init__(self) -> None:
        super().__init__("this client has been closed")


class QueueUnavailable(TokenmillError, ConnectionError):
    pass


class UnreadableRecord(TokenmillError, ValueError):
    pass


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raise UnreadableRecord for data in the body that cannot be read."""
    try:
        yield
    except (ValueError, OverflowError, KeyError) as error:  # DecodeError is a ValueError
        words = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UnreadableRecord(f"{what} cannot be read by this version: {words}") from error
