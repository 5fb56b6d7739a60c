"""Operations on a whole queue: its depth, jobs, workers, limits and dead letters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokenmill.errors import ConfigurationError, UnreadableRecord, readable
from tokenmill.operations.io_requests import (
    Commands,
    Operation,
    QueueContext,
    RunScript,
    server_time,
)
from tokenmill.operations.records import (
    JobInfo,
    QueueDepth,
    questions,
    read_depth,
    read_record,
)
from tokenmill.transport.scripts import REDRIVE
from tokenmill_schemas.codec import DecodeError, decode_status
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import PRIORITY_ORDER, Priority
from tokenmill_schemas.result import JobStatus

MAX_DUE = 1_000  # due jobs read for the backlog
MOST_LATE_MS = 100  # a client's clock may lag the server's by the time of a reply


class DeadJob(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter: a job that was set aside, with its error and its earlier crashes, one line
    each.
    """

    job_id: str
    died_ms: int
    error: str
    history: tuple[str, ...]


class DueJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that is due, and that no worker has moved into its stream yet.

    `is_counted`: the queue's counters include it already, as they do for jobs of an older version.
    """

    priority: str
    cost: float
    due_ms: int
    is_counted: bool


def wanted_status(status: JobStatus | str | None) -> JobStatus | None:
    """Return the state that a caller asks for. Raises ConfigurationError if there is none such."""
    try:
        return None if status is None else JobStatus(status)
    except ValueError:
        known = ", ".join(JobStatus)
        raise ConfigurationError(f"a job's state is one of {known}, not {status!r}") from None


def depth(context: QueueContext) -> Operation[QueueDepth]:
    meta, delayed = yield Commands(
        (("HGETALL", context.keys.meta), ("ZCARD", context.keys.delayed))
    )
    due = yield from due_jobs(context)
    read = read_depth(meta)
    queued, tokens = dict(read.queued), read.queued_tokens
    for job in due:
        if not job.is_counted:
            queued[job.priority] = queued.get(job.priority, 0) + 1
            tokens += job.cost
    return QueueDepth(queued, tokens, read.running, max(0, int(delayed) - len(due)))


def due_jobs(context: QueueContext) -> Operation[list[DueJob]]:
    """Return the jobs that are due and still scheduled, MAX_DUE at most.

    With a live worker there are few. Without one they must count as backlog, or an autoscaler would
    start no worker.
    """
    keys, now_ms = context.keys, (yield from server_time()) + MOST_LATE_MS
    (ids,) = yield Commands((("ZRANGEBYSCORE", keys.delayed, "-inf", now_ms, "LIMIT", 0, MAX_DUE),))
    fields = ("class", "cost", "uncounted", "due_ms", "created_ms", "state")
    names = [
        keys.job(job_id.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        for job_id in ids
    ]
    replies = yield Commands(tuple(("HMGET", name, *fields) for name in names), tolerant=True)
    return [
        _due_job(values)
        for values in replies
        if not isinstance(values, Exception) and values[-1] == b"scheduled"
    ]


def _due_job(values: Sequence[bytes | None]) -> DueJob:
    priority, cost, uncounted, due, created = (
        (value or b"").decode("utf-8", "replace") for value in values[:5]
    )
    known = (
        priority if priority in {each.value for each in PRIORITY_ORDER} else Priority.STANDARD.value
    )
    since_ms = round(max(number_of(due), number_of(created)))
    return DueJob(priority=known, cost=number_of(cost), due_ms=since_ms, is_counted=not uncounted)


def number_of(value: bytes | str) -> float:
    """Return a number; 0 if the text is no finite number."""
    try:
        found = float(value)
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0


def workers(context: QueueContext) -> Operation[list[WorkerStatus]]:
    """Return the live workers, each with the status of its last heartbeat."""
    (ids,) = yield Commands((("SMEMBERS", context.keys.workers),))
    names = sorted(value.decode() for value in ids)
    values = yield Commands(tuple(("GET", context.keys.worker(name)) for name in names))
    alive = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    return [read_status(name, value) for name, value in alive]


def read_status(worker_id: str, value: bytes) -> WorkerStatus:
    """Decode a worker's status. A worker whose status is empty or unreadable is alive too, and gets
    an empty one.
    """
    try:
        return decode_status(value) if value else WorkerStatus(worker_id=worker_id)
    except DecodeError:
        return WorkerStatus(worker_id=worker_id)


def jobs(context: QueueContext, status: JobStatus | None, limit: int) -> Operation[list[JobInfo]]:
    """Return the jobs that are not recorded yet, and dead ones: running jobs first, then by class
    and age. Recorded jobs are in SQL.
    """
    if limit < 1:
        return []
    ids = yield from _running(context)
    if status is not JobStatus.RUNNING:
        ids += yield from _waiting(context, limit)
    unique = list(dict.fromkeys(ids))
    found: list[JobInfo] = []
    size = max(50, min(limit, 500))
    for start in range(0, len(unique), size):
        page = unique[start : start + size]
        commands = tuple(command for job_id in page for command in questions(context.keys, job_id))
        replies = yield Commands(commands, tolerant=True)
        infos = [_info_of(*each) for each in zip(page, replies[::2], replies[1::2], strict=True)]
        found += [info for info in infos if info is not None and status in (None, info.status)]
        if len(found) >= limit:
            break
    return found[:limit]


def _info_of(job_id: str, values: Any, last: Any) -> JobInfo | None:
    """Return the state of a job; None if its record cannot be read, so that the other jobs are
    still listed.
    """
    try:
        record = read_record(job_id, values, last)
    except UnreadableRecord:
        return None
    return record.info if record is not None else None


def _running(context: QueueContext) -> Operation[list[str]]:
    (ids,) = yield Commands((("SMEMBERS", context.keys.workers),))
    held = yield Commands(tuple(("SMEMBERS", context.keys.owned(value.decode())) for value in ids))
    return sorted(value.decode() for members in held for value in members)


def _waiting(context: QueueContext, limit: int) -> Operation[list[str]]:
    """Return ids of jobs that wait, ended without a record, or are dead: `limit` of each kind at
    most, and of the tenants whose turn is next.
    """
    keys = context.keys
    requeued, unrecorded, delayed, letters, *rest = yield Commands(
        (
            ("ZRANGE", keys.requeued, 0, limit - 1),
            ("ZRANGE", keys.unrecorded_ends, 0, limit - 1),
            ("ZRANGE", keys.delayed, 0, limit - 1),
            ("XREVRANGE", keys.dead, "+", "-", "COUNT", limit),
            *(("ZRANGE", keys.held(each), 0, limit - 1) for each in PRIORITY_ORDER),
            *(("ZRANGE", keys.fair_shares(each), 0, limit - 1) for each in PRIORITY_ORDER),
        )
    )
    num_classes = len(PRIORITY_ORDER)
    queued: list[bytes] = []
    for priority, held, names in zip(
        PRIORITY_ORDER, rest[:num_classes], rest[num_classes:], strict=True
    ):
        if len(queued) >= limit:
            break
        queued += held
        streams = [
            keys.tenant_stream(priority, tenant)
            for tenant in dict.fromkeys(["", *(name.decode() for name in names)])
        ]
        queued += yield from _undelivered(streams, limit - len(queued))
    ids = [*requeued, *unrecorded, *queued, *delayed, *(_job_of(entry) for entry in letters)]
    return [job_id.decode() for job_id in ids]


def _undelivered(streams: Sequence[str], limit: int) -> Operation[list[bytes]]:
    """Return the jobs of the entries that no worker has claimed, the oldest first: `limit`, if the
    streams have as many, and at most one more per stream. Each round trip reads its share of them
    from each stream that has more.
    """
    groups = yield Commands(tuple(("XINFO GROUPS", name) for name in streams), tolerant=True)
    starts: dict[str, str] = {}
    for name, reply in zip(streams, groups, strict=True):
        group = first_group(reply)
        starts[name] = "-" if group is None else f"({text_of(group['last-delivered-id'])}"
    entries: list[Any] = []
    while starts and len(entries) < limit:
        count = math.ceil((limit - len(entries)) / len(starts))
        pages = yield Commands(
            tuple(("XRANGE", name, start, "+", "COUNT", count) for name, start in starts.items()),
            tolerant=True,
        )
        for name, page in zip(list(starts), pages, strict=True):
            found = page if isinstance(page, list) else []
            entries += found
            if len(found) < count:
                del starts[name]
            else:
                starts[name] = f"({text_of(found[-1][0])}"
    entries.sort(key=lambda entry: tuple(map(int, entry[0].split(b"-"))))
    return [_job_of(entry) for entry in entries]


def first_group(reply: Any) -> Mapping[str, Any] | None:
    """Return the first consumer group in a reply to XINFO GROUPS, in the form of RESP2 or RESP3;
    None if there is none.
    """
    if not isinstance(reply, list) or not reply:
        return None
    first = reply[0]
    pairs = first.items() if isinstance(first, dict) else zip(first[::2], first[1::2], strict=True)
    return {text_of(name): value for name, value in pairs}


def text_of(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _job_of(entry: tuple[bytes, Mapping[bytes, bytes]]) -> bytes:
    return entry[1].get(b"job", b"")


def dead(context: QueueContext, limit: int) -> Operation[list[DeadJob]]:
    """Return the dead letters, the newest first."""
    (entries,) = yield Commands((("XREVRANGE", context.keys.dead, "+", "-", "COUNT", limit),))
    return read_dead(entries)


def read_dead(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[DeadJob]:
    """Decode entries of the dead-letter stream. Raises UnreadableRecord."""
    found = []
    with readable("the list of dead jobs"):
        for _, raw in entries:
            fields = {
                key.decode("utf-8", "replace"): value.decode("utf-8", "replace")
                for key, value in raw.items()
            }
            history = tuple(fields.get("history", "").splitlines())
            died_ms, error = int(fields.get("died_ms", 0)), fields.get("error", "")
            found.append(
                DeadJob(job_id=fields["job"], died_ms=died_ms, error=error, history=history)
            )
    return found


def redrive(
    context: QueueContext, job_ids: Sequence[str] | None, limit: int
) -> Operation[list[str]]:
    """Return dead jobs to their streams as new jobs without a deadline; without ids, the oldest.

    Each call of the script reads one page of the dead-letter stream.
    """
    wanted = tuple(dict.fromkeys(job_ids or ()))
    most = limit if job_ids is None else min(limit, len(wanted))
    revived: list[str] = []
    start = "-"
    while start and len(revived) < most:
        reply = yield RunScript(REDRIVE, (most - len(revived), start, *wanted))
        start, *page = (value.decode() for value in reply)
        revived += page
    return revived


def set_limits(
    context: QueueContext, tenant: str, limits: dict[str, float | None]
) -> Operation[None]:
    """Write the limits of a tenant. 0 removes a limit. Tenant "*" stands for all tenants without
    limits of their own.
    """
    bad = [
        f"{name} must be at least 0, not {value}"
        for name, value in limits.items()
        if value is not None and not 0 <= value < math.inf
    ]
    if bad:
        raise ConfigurationError("; ".join(bad))
    given = [
        part
        for name, value in limits.items()
        if value is not None
        for part in (f"{name}:{tenant}", value)
    ]
    if given:
        yield Commands((("HSET", context.keys.meta, *given),))


def set_queue_limit(context: QueueContext, limit: int) -> Operation[None]:
    yield Commands((("HSET", context.keys.meta, "max_queued", max(0, limit)),))
