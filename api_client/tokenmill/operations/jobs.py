"""The operations on one job: status, cancel, wait and stream, as generators over IO requests.

A stream first subscribes, then reads the log from its position, then follows the messages, and
reads the log again wherever a message is missing. Pub/sub may lose messages at any time; the log,
the job's hash and the database do not.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tokenmill.errors import JobNotFound, QueueUnavailable, readable
from tokenmill.operations.io_requests import (
    Commands,
    Emit,
    Operation,
    QueryDatabase,
    QueueContext,
    Receive,
    RunScript,
    Sleep,
    StreamMessages,
    Subscribe,
)
from tokenmill.operations.records import (
    FIELDS,
    JobInfo,
    Record,
    info_of,
    is_wrong_type,
    questions,
    read_log,
    read_record,
)
from tokenmill.operations.retry_window import RetryWindow
from tokenmill.operations.stream_position import StreamPosition, read_position
from tokenmill.transport.scripts import CANCEL, Argument
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import DecodeError, decode_chunk, decode_request
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult

LOG_PAGE = 1_000


# ── looking ──


def ask_each(commands: Sequence[tuple[Argument, ...]]) -> Operation[Sequence[Any]]:
    """Send commands in one round trip and return their replies.

    A command whose key holds another type has the exception as its reply; any other server error is
    raised.
    """
    replies: Sequence[Any] = yield Commands(tuple(commands), tolerant=True)
    if any(isinstance(reply, Exception) and not is_wrong_type(reply) for reply in replies):
        replies = yield Commands(tuple(commands))
    return replies


def ask_records(
    context: QueueContext, job_ids: Sequence[str]
) -> Operation[list[tuple[str, Any, Any]]]:
    """Return the arguments of `read_record` for each job."""
    replies = yield from ask_each(
        [command for job_id in job_ids for command in questions(context.keys, job_id)]
    )
    return list(zip(job_ids, replies[::2], replies[1::2], strict=True))


def read(context: QueueContext, job_ids: Sequence[str]) -> Operation[list[Record | None]]:
    """Return the record of each job, None for an unknown job. Raises UnreadableRecord."""
    return [read_record(*each) for each in (yield from ask_records(context, job_ids))]


def status(context: QueueContext, job_id: str) -> Operation[JobInfo]:
    """Return a job's state from Redis, or from the database if Redis no longer has it."""
    (record,) = yield from read(context, [job_id])
    if record is not None:
        return record.info
    result = yield QueryDatabase(job_id)
    if result is None:
        raise JobNotFound(job_id)
    return info_of(result)


def request(
    context: QueueContext, job_id: str, tenant: str | None = None
) -> Operation[JobRequest | None]:
    """Return the request of a job that has not ended, None after that and for an unknown job. With
    `tenant`, another tenant's job is as an unknown one: the same command finds neither. Raises
    UnreadableRecord.
    """
    if tenant is not None:
        ((owner,),) = yield Commands((("HMGET", context.keys.job(job_id), "tenant"),))
        if owner != tenant.encode():
            return None
    ((data,),) = yield Commands((("HMGET", context.keys.job(job_id), "request"),))
    if data is None:
        return None
    with readable(f"the request of job {job_id}"):
        return decode_request(data)


def cancel(context: QueueContext, job_id: str) -> Operation[str]:
    (word,) = yield RunScript(CANCEL, (job_id,))
    outcome: str = word.decode()
    if outcome != "unknown":
        return outcome
    result = yield QueryDatabase(job_id)
    if result is None:
        raise JobNotFound(job_id)
    return str(result.status.value)


# ── waiting and following ──


def follow(
    context: QueueContext, job_id: str, starting_after: str | int, timeout: float | None
) -> Operation[None]:
    """Emit every chunk after the position `starting_after` once.

    Args:
        starting_after: a chunk's position, or a number of tokens.
        timeout: seconds without a new chunk after which ResultTimeout is raised; None: no limit.
    """
    position = StreamPosition(job_id, starting_after)
    window = RetryWindow(context, job_id, timeout)
    values_of = functools.partial(_delivered_by, position)
    while not position.is_over:
        try:
            yield Subscribe(context.keys.chunks(job_id))
            yield from _catch_up(context, position, window)
            while not position.is_over:
                message = yield StreamMessages(
                    window.next_wait_s(), window.limit_s(), values_of, window.progress
                )
                chunk = _chunk_of(message)
                delivered = position.accept(chunk) if chunk is not None else None
                if delivered is None:
                    yield from _look_again(context, position, window, was_silent=message is None)
                    continue
                yield from _emit(delivered)
                window.progress()
        except (QueueUnavailable, JobNotFound) as trouble:
            result = yield QueryDatabase(job_id)
            if result is not None:
                yield from _emit(position.accept_result(result))
            else:
                yield Sleep(window.pause_s(trouble))


def _look_again(
    context: QueueContext, position: StreamPosition, window: RetryWindow, *, was_silent: bool
) -> Operation[None]:
    """Read the log when the messages do not show how the answer continues."""
    before = position.num_tokens
    yield from _catch_up(context, position, window)
    # the log had tokens without a message: the subscription is dead
    if was_silent and position.num_tokens > before:
        yield Subscribe(context.keys.chunks(position.job_id))


def _chunk_of(message: object) -> Chunk | None:
    """Decode a message. Returns None if it cannot be read: it then counts as missed and the log is
    read instead.
    """
    try:
        return decode_chunk(message) if isinstance(message, bytes) else None
    except DecodeError:
        return None


def _delivered_by(position: StreamPosition, message: object) -> list[Chunk] | None:
    """Return the chunks in a message that the subscriber does not have yet.

    Returns None if a chunk before them is missing, and for the job's last chunk.
    """
    chunk = _chunk_of(message)
    return position.accept(chunk) if chunk is not None and not chunk.is_last else None


def _catch_up(
    context: QueueContext, position: StreamPosition, window: RetryWindow
) -> Operation[None]:
    """Emit the missing chunks from the log, and from the result if the job has ended.

    The log is read first: when it is deleted, the result exists already.
    """
    keys, start = context.keys, position.log_start
    while not position.is_over:
        entries, values = yield from _ask_of_log(
            ("XRANGE", keys.log(position.job_id), start, "+", "COUNT", LOG_PAGE),
            ("HMGET", keys.job(position.job_id), *FIELDS),
        )
        for chunk in position.accept_log(read_log(entries, position.has)):
            yield Emit(chunk)
            window.progress()
        if len(entries) == LOG_PAGE:
            start = b"(" + entries[-1][0]
            continue
        record = read_record(position.job_id, values)
        if record is None:
            raise JobNotFound(position.job_id)
        window.was_known = True
        window.succeeded()
        if record.is_over:
            yield from _emit(position.accept_result(record.outcome()))
        else:
            yield from window.check_served(record.info)
        return


def _ask_of_log(*commands: tuple[Argument, ...]) -> Operation[list[Any]]:
    """Send commands of which the first reads the job's log.

    A log key of another type counts as a log without entries: the job's worker creates it again, or
    the result replaces it.
    """
    log, *others = yield from ask_each(commands)
    return [[] if is_wrong_type(log) else log, *others]


def _emit(chunks: Any) -> Operation[None]:
    for chunk in chunks:
        yield Emit(chunk)


def wait(context: QueueContext, job_id: str, timeout: float | None) -> Operation[JobResult]:
    """Return the job's result as soon as it exists."""
    window = RetryWindow(context, job_id, timeout)
    listens = False
    while True:
        try:
            result = yield from _result_now(context, job_id, window)
            if result is not None:
                return result
            if listens:
                yield from _until_last(window)
            else:
                # then read again: the job may have ended meanwhile
                yield Subscribe(context.keys.chunks(job_id))
                listens = True
        except (QueueUnavailable, JobNotFound) as trouble:
            listens = False
            recorded: JobResult | None = yield QueryDatabase(job_id)
            if recorded is not None:
                return recorded
            yield Sleep(window.pause_s(trouble))


def _until_last(window: RetryWindow) -> Operation[None]:
    """Return when the job may have ended: after its last chunk, or after a silence."""
    while True:
        message = yield Receive(window.next_wait_s(), window.limit_s())
        chunk = _chunk_of(message)
        if chunk is None or chunk.is_last:
            return


def _result_now(
    context: QueueContext, job_id: str, window: RetryWindow
) -> Operation[JobResult | None]:
    entries: list[Any] = []
    (record,) = yield from read(context, [job_id])
    if record is None:
        raise JobNotFound(job_id)
    window.was_known = True
    window.succeeded()
    if not record.is_over:
        yield from window.check_served(record.info)
        return None
    if record.result is None:
        (entries,) = yield from _ask_of_log(("XRANGE", context.keys.log(job_id), "-", "+"))
    result: JobResult = record.outcome(read_log(entries))
    return result


def check_starting_after(value: str | int) -> str | int:
    """Return the value. Raises ConfigurationError if it is no position."""
    read_position(value)
    return value
