"""Builds values from Redis's replies about jobs and queues. Pure functions.

A record that is damaged, or that a newer version wrote with unknown contents, raises
UnreadableRecord.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import msgspec
from redis.exceptions import ResponseError

from tokenmill.errors import UnreadableRecord, readable
from tokenmill.transport.scripts import Argument
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import decode_chunk, decode_result
from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import ChoiceResult, JobError, JobResult, JobStatus

FIELDS: Final = (
    "state", "class", "tenant", "created_ms", "started_ms", "finished_ms", "deadline_ms",
    "due_ms", "deliveries", "crashes", "attempt", "worker", "cancel", "error", "error_code",
    "settled", "result",
)  # fmt: skip


class JobInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The present state of a job. `tokens` counts the tokens delivered so far. Times are Unix
    milliseconds; 0 means not yet.
    """

    job_id: str
    status: JobStatus
    priority: str = ""
    tenant: str = ""
    created_ms: int = 0
    started_ms: int = 0
    finished_ms: int = 0
    deadline_ms: int = 0
    not_before_ms: int = 0
    deliveries: int = 0
    crashes: int = 0
    attempt: int = 1
    tokens: int = 0
    worker_id: str = ""
    cancelling: bool = False
    error: JobError | None = None


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """The backlog of a queue.

    `queued` counts the jobs that wait for a worker, per class; `queued_tokens` is their estimated
    cost in tokens. `running` counts the jobs that workers own. `scheduled` counts the jobs that
    wait for their start time or next attempt; they are no backlog before they are due.
    """

    queued: dict[str, int] = field(default_factory=dict)
    queued_tokens: float = 0.0
    running: int = 0
    scheduled: int = 0

    @property
    def num_queued(self) -> int:
        return sum(self.queued.values())


@dataclass(frozen=True, slots=True)
class Record:
    """A job's hash. `result` is set once a worker has recorded the end; a job may also end without
    a worker.
    """

    info: JobInfo
    result: JobResult | None

    @property
    def is_over(self) -> bool:
        return self.info.status.is_final

    def outcome(self, log: Sequence[Chunk] = ()) -> JobResult:
        """Return the job's result. Before a worker has recorded it, build it from the hash and from
        the text in the log.
        """
        if self.result is not None:
            return self.result
        info = self.info
        return JobResult(
            job_id=info.job_id,
            status=info.status,
            tenant=info.tenant,
            choices=answer_of(log, _REASONS.get(info.status)),
            error=info.error,
            attempt=info.attempt,
            created_ms=info.created_ms,
            started_ms=info.started_ms,
            finished_ms=info.finished_ms,
            params=log[0].params if log else None,
            prompt=next((chunk.prompt for chunk in log if chunk.prompt is not None), None),
        )


_REASONS = {JobStatus.CANCELLED: FinishReason.CANCELLED, JobStatus.EXPIRED: FinishReason.EXPIRED}


def questions(keys: Keys, job_id: str) -> tuple[tuple[Argument, ...], ...]:
    """Return the commands whose replies `read_record` reads."""
    return ("HMGET", keys.job(job_id), *FIELDS), (
        "XREVRANGE",
        keys.log(job_id),
        "+",
        "-",
        "COUNT",
        1,
    )


def read_record(job_id: str, values: Any, last: Any = ()) -> Record | None:
    """Build the record of a job from the replies to `questions`; None if there is no such job.

    Either reply may be an error. If the log's key holds another type, the job counts as having no
    tokens. Raises UnreadableRecord.
    """
    with readable(f"the record of job {job_id}"):
        if isinstance(values, Exception):
            raise ValueError(str(values))
        return _read_record(job_id, values, _end_of(last))


def _end_of(last: Any) -> int:
    """Return the number of a log's last entry. With one choice, this is the number of tokens in the
    log.
    """
    if isinstance(last, Exception) or not last:
        return 0
    return int(last[0][0].partition(b"-")[0])


def _read_record(job_id: str, values: Sequence[bytes | None], end: int) -> Record | None:
    raw = {
        name: value.decode("utf-8", "replace")
        for name, value in zip(FIELDS, values, strict=True)
        if value and name != "result"
    }
    if "state" not in raw:
        return None
    message, code = raw.get("error", ""), raw.get("error_code", "")
    packed = values[FIELDS.index("result")]
    result = decode_result(packed) if packed and "settled" in raw else None

    def number(name: str, default: int = 0) -> int:
        value = int(float(raw.get(name) or default))
        if not -(2**63) <= value < 2**63:
            raise ValueError(f"{name} is {value}")
        return value

    info = JobInfo(
        job_id=job_id,
        status=JobStatus(raw["state"]),
        priority=raw.get("class", ""),
        tenant=raw.get("tenant", ""),
        created_ms=number("created_ms"),
        started_ms=number("started_ms"),
        finished_ms=number("finished_ms"),
        deadline_ms=number("deadline_ms"),
        not_before_ms=number("due_ms"),
        deliveries=number("deliveries"),
        crashes=number("crashes"),
        attempt=number("attempt", 1),
        tokens=num_tokens_of(result) if result else end,
        worker_id=raw.get("worker", ""),
        cancelling="cancel" in raw
        and raw["state"] in (JobStatus.RUNNING.value, JobStatus.QUEUED.value),
        error=result.error if result else JobError(code, message) if code else None,
    )
    return Record(info, result)


def info_of(result: JobResult) -> JobInfo:
    """Return the state of a job that only the database has."""
    return JobInfo(
        job_id=result.job_id,
        status=result.status,
        tenant=result.tenant,
        created_ms=result.created_ms,
        started_ms=result.started_ms,
        finished_ms=result.finished_ms,
        attempt=result.attempt,
        tokens=num_tokens_of(result),
        worker_id=result.worker_id,
        error=result.error,
    )


def num_tokens_of(result: JobResult) -> int:
    return sum(len(choice.token_ids) for choice in result.choices)


def read_depth(meta: Mapping[bytes, bytes]) -> QueueDepth:
    """Return the depth of a queue from its meta hash. Raises UnreadableRecord."""
    with readable("the queue's counters"):
        queued = {
            name.decode().removeprefix("queued:"): int(value)
            for name, value in meta.items()
            if name.startswith(b"queued:")
        }
        tokens = sum(
            float(value) for name, value in meta.items() if name.startswith(b"queued_tokens:")
        )
        return QueueDepth(queued, max(0.0, tokens), int(meta.get(b"running", 0)))


def is_wrong_type(reply: object) -> bool:
    """Return whether the server refused a command because the key holds a value of another type."""
    return isinstance(reply, ResponseError) and "WRONGTYPE" in str(reply)


def read_log(
    entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]],
    have: Mapping[int, int] = MappingProxyType({}),
) -> list[Chunk]:
    """Decode the chunks of a job's log from a reply to XRANGE.

    Args:
        entries: the entries of the log.
        have: for each choice, the number of tokens that the reader has already.

    An entry that is no chunk is skipped if no token is missing because of it. Otherwise raises
    UnreadableRecord.
    """
    chunks: list[Chunk] = []
    ends = dict(have)
    has_other = False
    for _, fields in entries:
        chunk = _chunk_of(fields)
        if chunk is None:
            has_other = True
            continue
        so_far = ends.get(chunk.choice, 0)
        if has_other and chunk.index > so_far:
            raise UnreadableRecord(
                "the job's log cannot be read by this version: "
                f"what follows token {so_far} is no chunk"
            )
        chunks.append(chunk)
        ends[chunk.choice] = max(so_far, chunk.end)
    return chunks


def _chunk_of(fields: Mapping[bytes, bytes]) -> Chunk | None:
    try:
        return decode_chunk(fields[b"chunk"])
    except (ValueError, OverflowError, KeyError):  # DecodeError is a ValueError
        return None


def answer_of(chunks: Sequence[Chunk], reason: FinishReason | None) -> tuple[ChoiceResult, ...]:
    """Build the choices of an answer from its chunks, as far as these go."""
    parts: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        parts.setdefault(chunk.choice, []).append(chunk)
    return tuple(_choice(index, parts[index], reason) for index in sorted(parts))


def _choice(index: int, chunks: Sequence[Chunk], reason: FinishReason | None) -> ChoiceResult:
    text = ""
    ends: list[int] = []
    ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    for chunk in chunks:
        text += chunk.text
        ids += chunk.token_ids
        ends += [len(text)] * len(chunk.token_ids)
        logprobs += chunk.logprobs or ()
        reason = chunk.finish_reason or reason
    return ChoiceResult(
        index=index,
        text=text,
        token_ids=tuple(ids),
        text_ends=tuple(ends),
        finish_reason=reason,
        logprobs=tuple(logprobs) if logprobs else None,
    )
