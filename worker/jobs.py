"""A job on its way through the worker: what each stage hands to the next.

`consume`, `publish` and `record` know these values and not one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeAlias

import msgspec

from schemas.chunk import Chunk
from schemas.job import JobRequest
from schemas.result import JobResult
from worker.engine.mailbox import Frame
from worker.engine.types import GenerationRequest
from worker.text.answer import Answer


@dataclass(frozen=True, slots=True)
class Delivery:
    """A claimed job. `token` is the fencing token: every write for the job must carry it.

    `verdict` other than "run" means that the claim script found the job at its end (cancelled while
    queued, past its deadline, crashed too often): it only has to be recorded.
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
    alone: bool = False  # suspected of crashing the engine: to be run by itself
    is_redriven: bool = False  # it was dead before: its deadline counts no more
    log_end: int = 0  # the number of the log's last entry; see Append

    @property
    def request_id(self) -> str:
        """What the engine calls it. A job that was lost and claimed again is another request: what the engine still
        says of the first is nothing to the second.
        """
        return f"{self.job_id}/{self.token}"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A job that may run: what the engine gets, and the answer so far (with the log of earlier attempts in it).

    The publisher owns `answer` from here on.
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


class Append(msgspec.Struct, frozen=True, gc=False):  # one for every token: a dataclass takes ten times as long to make
    """One chunk to log and publish, under a fencing token. `checkpoint` chunks are logged, not published.

    `start` is the number of the log entry before it, 0 at the log's beginning. An entry's number grows by the chunk's
    tokens, or by one for a chunk that only ends a choice: with one choice it is the number of tokens that the log has.
    """

    token: int
    chunk: Chunk
    start: int
    checkpoint: bool = False

    @property
    def end(self) -> int:
        """The number of its own entry."""
        return self.start + (len(self.chunk.token_ids) or 1)


class AppendReply(StrEnum):
    OK = "ok"
    DUPLICATE = "duplicate"  # a retried call: the chunk is there already
    LOST = "lost"  # another worker holds the job, or it is gone: drop the sequence, write nothing more
    CANCELLED = "cancelled"  # appended, and the user wants it stopped
    GAP = "gap"  # the log is shorter than this worker believed (Redis lost its tail): send again from its end


# What became of the chunks of one call that are not simply logged, by place in it, with the number of the log's last
# entry after the call. As a rule there are none, and nothing is said of each.
Exceptions: TypeAlias = Mapping[int, tuple[AppendReply, int]]


@dataclass(frozen=True, slots=True)
class Finished:
    """A job at its end: to be committed to SQL, then acknowledged."""

    token: int
    result: JobResult
    final_chunk: Chunk
    request: JobRequest | None = None  # what the record says of it beside the result; None: undecodable
    is_recorded: bool = False  # it came back, and SQL had its end: only to be acknowledged


class ChunkLog(Protocol):
    """Where chunks go; `consume.job_stream` implements it, `publish` uses it."""

    async def append(self, items: list[Append]) -> Exceptions:
        """One round trip for all."""
        ...


class Acknowledger(Protocol):
    """Where finished jobs are acknowledged; `consume.job_stream` implements it, `record` uses it."""

    async def finish(self, jobs: list[Finished]) -> list[bool]:
        """After SQL has committed. False where the fencing token was outdated (the job is another's now)."""
        ...


class Watcher(Protocol):
    """Hears what becomes of jobs between claim and record; `worker.observer` is one. Must not raise."""

    def claimed(self, deliveries: Sequence[Delivery]) -> None: ...

    def started(self, jobs: Sequence[Admitted]) -> None:
        """The engine has them."""
        ...

    def stepped(self, frame: Frame) -> None:
        """A frame's tokens are published."""
        ...

    def left(self, job_ids: Iterable[str], reason: str) -> None:
        """They go on elsewhere: "handed_over", "crash", "retry", "lost"."""
        ...


class Unwatched:
    """A watcher that does not care."""

    def claimed(self, deliveries: Sequence[Delivery]) -> None: ...

    def started(self, jobs: Sequence[Admitted]) -> None: ...

    def stepped(self, frame: Frame) -> None: ...

    def left(self, job_ids: Iterable[str], reason: str) -> None: ...
