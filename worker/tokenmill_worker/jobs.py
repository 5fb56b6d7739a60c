"""A job on its way through the worker: the values that one stage passes to the next.

`consume`, `publish` and `record` share these values and do not import one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeAlias

import msgspec

from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult
from tokenmill_worker.engine.process.mailbox import Frame
from tokenmill_worker.engine.types import GenerationRequest
from tokenmill_worker.text.job_output import Answer


@dataclass(frozen=True, slots=True)
class Delivery:
    """A claimed job. `token` is the fencing token: every write for the job must carry it.

    A `verdict` other than "run" means that the claim script found the job ended (cancelled while
    queued, past its deadline, crashed too often). It only has to be recorded.
    """

    job_id: str
    token: int
    payload: bytes  # an encoded JobRequest, not yet trusted
    deliveries: int  # this one included
    crashes: int
    verdict: Literal["run", "cancelled", "expired", "dead"]
    log: tuple[bytes, ...]  # encoded chunks of earlier attempts, in order
    created_ms: int
    started_ms: int  # first claim ever
    attempt: int
    alone: bool = False  # suspected of crashing the engine: must run alone
    is_redriven: bool = False  # it was a dead letter: its deadline no longer counts
    log_end: int = 0  # the number of the log's last entry; see Append

    @property
    def request_id(self) -> str:
        """The request's id in the engine. A job that was lost and claimed again is another request,
        so late events of the first delivery do not reach the second.
        """
        return f"{self.job_id}/{self.token}"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job that may run: the request for the engine, and the answer so far, with the log of
    earlier attempts in it.

    From here on the publisher owns `answer`.
    """

    delivery: Delivery
    request: JobRequest
    generation: GenerationRequest
    answer: Answer

    @property
    def job_id(self) -> str:
        return self.delivery.job_id

    @property
    def request_id(self) -> str:
        return self.generation.request_id


class Append(
    msgspec.Struct, frozen=True, gc=False
):  # made for every token: a dataclass takes ten times as long
    """One chunk to log and publish, under a fencing token. `checkpoint` chunks are logged and not
    published.

    `start` is the number of the log entry before it, 0 at the log's beginning. An entry's number is
    larger by the chunk's tokens, or by one for a chunk that only ends a choice. With one choice it
    is the number of tokens in the log.
    """

    token: int
    chunk: Chunk
    start: int
    checkpoint: bool = False

    @property
    def end(self) -> int:
        """The number of this chunk's own entry."""
        return self.start + (len(self.chunk.token_ids) or 1)


class AppendReply(StrEnum):
    OK = "ok"
    DUPLICATE = "duplicate"  # a retried call: the chunk is there already
    # another worker holds the job, or it is gone: drop the sequence, write nothing more
    LOST = "lost"
    CANCELLED = "cancelled"  # appended, and the user wants it stopped
    GAP = "gap"  # the log is shorter than this worker believed (Redis lost its tail): send again from its end


# The chunks of one call that were not simply logged: index in the call → reply, and the number of the log's last entry
# after the call. Usually there are none.
Exceptions: TypeAlias = Mapping[int, tuple[AppendReply, int]]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that has ended: to be committed to SQL, then acknowledged."""

    token: int
    result: JobResult
    final_chunk: Chunk
    request: JobRequest | None = None  # recorded beside the result; None if it could not be decoded
    is_recorded: bool = False  # SQL has its end already: it only has to be acknowledged


class ChunkLog(Protocol):
    """Writes chunks to the log; implemented by `consume.job_stream`, used by `publish`."""

    async def append(self, items: list[Append]) -> Exceptions:
        """Append all chunks in one round trip."""
        ...


class Acknowledger(Protocol):
    """Acknowledges finished jobs; implemented by `consume.job_stream`, used by `record`."""

    async def finish(self, jobs: list[Finished]) -> list[bool]:
        """Acknowledge jobs whose rows SQL has committed. Returns one flag per job; False if the
        fencing token was outdated, because the job is another worker's now.
        """
        ...


class Watcher(Protocol):
    """Observes jobs between claim and record; `telemetry.job_observer` implements it. Must not raise."""

    def claimed(self, deliveries: Sequence[Delivery]) -> None: ...

    def started(self, jobs: Sequence[Admitted]) -> None:
        """The jobs were submitted to the engine."""
        ...

    def stepped(self, frame: Frame) -> None:
        """The tokens of a frame were published."""
        ...

    def left(self, job_ids: Iterable[str], reason: str) -> None:
        """The jobs left this worker to go on elsewhere. `reason`: "handed_over", "crash", "retry",
        "lost".
        """
        ...


class Unwatched:
    """A watcher that does nothing."""

    def claimed(self, deliveries: Sequence[Delivery]) -> None: ...

    def started(self, jobs: Sequence[Admitted]) -> None: ...

    def stepped(self, frame: Frame) -> None: ...

    def left(self, job_ids: Iterable[str], reason: str) -> None: ...
