"""The exceptions of the clients, and what the caller can do about each.

TokenmillError
├── ConfigurationError        a URL, a password or an option is wrong: fix it
├── InvalidRequest            the job can never run: fix it          (.problems)
├── QueueRefusal              nothing was stored: try later           (.accepted of earlier batches)
│   ├── QueueFull             (.depth .limit .priority)
│   └── RateLimited           (.tenant .retry_after)
├── IdempotencyConflict       the key or id belongs to another job   (.job_id)
├── JobNotFound               neither the queue nor the database has the job
├── ResultTimeout             the job has not ended yet; also a TimeoutError
├── QueueUnserved             no worker has ever served the queue    (.queue .job_id)
├── JobFailed                 the job ended without an answer         (.result)
├── UnreadableRecord          a job's record is damaged, or of a newer version: update
├── ClientClosed              `close` was called before or during the call; also a RuntimeError
└── QueueUnavailable          the server cannot be reached, or refuses to write

Each class keeps the arguments of its constructor in `args`, as values of JSON, and makes its
sentence in `__str__`. So pickle, copy, process pools and Celery's result backends rebuild an
exception as it was: they call the class with `args`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from tokenmill_schemas.result import JobResult


class TokenmillError(Exception):
    """The base class. Each message is one sentence for people."""

    def __repr__(self) -> str:  # what is logged holds the sentence, not a whole result
        return f"{type(self).__name__}({str(self)!r})"


class ConfigurationError(TokenmillError, ValueError):
    pass


class InvalidRequest(TokenmillError, ValueError):
    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(list(problems))
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class QueueRefusal(TokenmillError):
    """The queue refused a job. `accepted`: ids of the jobs that earlier batches of the same
    submit_many had stored.
    """

    accepted: tuple[str, ...] = ()


class QueueFull(QueueRefusal):
    """Jobs of this priority wait in the largest number allowed. `depth`: how many wait."""

    def __init__(
        self,
        queue: str,
        depth: int,
        limit: int,
        accepted: Sequence[str] = (),
        priority: str = "standard",
    ) -> None:
        super().__init__(queue, depth, limit, [str(job_id) for job_id in accepted], priority)
        self.accepted = tuple(self.args[3])
        self.queue = queue
        self.depth = depth
        self.limit = limit
        self.priority = priority

    def __str__(self) -> str:
        return (
            f"queue {self.queue} holds {self.depth} waiting {self.priority} jobs and its limit is "
            f"{self.limit}"
        )


class RateLimited(QueueRefusal):
    def __init__(self, tenant: str, retry_after: float, accepted: Sequence[str] = ()) -> None:
        super().__init__(tenant, retry_after, [str(job_id) for job_id in accepted])
        self.accepted = tuple(self.args[-1])
        self.tenant = tenant
        self.retry_after = retry_after

    def __str__(self) -> str:
        return (
            f"tenant {self.tenant!r} submits faster than it may: "
            f"retry after {self.retry_after:.2f} s"
        )


class IdempotencyConflict(TokenmillError):
    def __init__(self, job_id: str) -> None:
        super().__init__(str(job_id))
        self.job_id = str(job_id)

    def __str__(self) -> str:
        return (
            f"the idempotency key or job id stands for job {self.job_id}, "
            "whose content is different"
        )


class JobNotFound(TokenmillError, LookupError):
    def __init__(self, job_id: str) -> None:
        super().__init__(str(job_id))
        self.job_id = str(job_id)

    def __str__(self) -> str:
        return f"no job {self.job_id}: it was never submitted here, or its record has expired"


class ResultTimeout(TokenmillError, TimeoutError):
    def __init__(self, job_id: str, timeout: float) -> None:
        super().__init__()
        self.args = (str(job_id), timeout)  # given to OSError, they would be errno and strerror
        self.job_id = str(job_id)
        self.timeout = timeout

    def __str__(self) -> str:
        return f"job {self.job_id} has not ended within {self.timeout:g} s"


class QueueUnserved(TokenmillError):
    """No worker has ever served the queue. The job stays in the queue."""

    def __init__(self, queue: str, job_id: str) -> None:
        super().__init__(queue, str(job_id))
        self.queue = queue
        self.job_id = str(job_id)

    def __str__(self) -> str:
        return (
            f"no worker has ever served the queue {self.queue!r}, so job {self.job_id} waits: "
            "check the queue's name, or start a worker for it"
        )


class JobFailed(TokenmillError):
    """Raised by `result(..., check=True)` when the job did not succeed. `result` may be given as
    the map that JSON makes of it.
    """

    def __init__(self, result: JobResult | dict[str, Any]) -> None:
        super().__init__(msgspec.to_builtins(result))
        self.result = msgspec.convert(result, JobResult, str_keys=True)

    def __str__(self) -> str:
        error, state = self.result.error, self.result.status.value
        reason = error.message if error else f"its state is {state}"
        return f"job {self.result.job_id} has no answer: {reason}"


class ClientClosed(TokenmillError, RuntimeError):
    def __str__(self) -> str:
        return "this client has been closed"


class QueueUnavailable(TokenmillError, ConnectionError):
    pass


class UnreadableRecord(TokenmillError, ValueError):
    pass


def not_unicode(error: UnicodeEncodeError) -> InvalidRequest:
    """Return the exception for a name or an id that holds a lone surrogate."""
    return InvalidRequest(
        [f"a name or id holds {error.object[error.start]!r}, which is no Unicode character"]
    )


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raise UnreadableRecord for data in the body that cannot be read."""
    try:
        yield
    except (ValueError, OverflowError, KeyError) as error:  # DecodeError is a ValueError
        words = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise UnreadableRecord(f"{what} cannot be read by this version: {words}") from error
