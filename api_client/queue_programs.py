"""Programs about the whole queue: its depth, jobs, workers, limits, and what is set aside as dead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from api_client.effects import Commands, Program, RunScript
from api_client.errors import ConfigurationError, UnreadableRecord
from api_client.programs import QueueView
from api_client.records import JobInfo, QueueDepth, questions, read_depth, read_record, readable
from api_client.scripts import REDRIVE
from schemas.codec import DecodeError, decode_status
from schemas.control import WorkerStatus
from schemas.job import PRIORITY_ORDER
from schemas.result import JobStatus


class DeadJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was set aside: what it failed of, and each crash before, one line each."""

    job_id: str
    died_ms: int
    error: str
    history: tuple[str, ...]


def depth(view: QueueView) -> Program[QueueDepth]:
    (meta,) = yield Commands((("HGETALL", view.keys.meta),))
    return read_depth(meta)


def workers(view: QueueView) -> Program[list[WorkerStatus]]:
    """Those that are alive, as they described themselves at their last heartbeat."""
    (ids,) = yield Commands((("SMEMBERS", view.keys.workers),))
    names = sorted(value.decode() for value in ids)
    values = yield Commands(tuple(("GET", view.keys.worker(name)) for name in names))
    alive = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    return [read_status(name, value) for name, value in alive]


def read_status(worker_id: str, value: bytes) -> WorkerStatus:
    """A worker that says nothing, or nothing that this version understands, is alive all the same."""
    try:
        return decode_status(value) if value else WorkerStatus(worker_id=worker_id)
    except DecodeError:
        return WorkerStatus(worker_id=worker_id)


def jobs(view: QueueView, status: JobStatus | None, limit: int) -> Program[list[JobInfo]]:
    """Jobs that are not settled yet, and dead ones: running first, then by class and age. Ended ones are in SQL."""
    ids = yield from _running(view)
    if status is not JobStatus.RUNNING:
        ids += yield from _waiting(view, limit)
    unique = list(dict.fromkeys(ids))
    found: list[JobInfo] = []
    for start in range(0, len(unique), 500):
        page = unique[start : start + 500]
        commands = tuple(command for job_id in page for command in questions(view.keys, job_id))
        replies = yield Commands(commands, tolerant=True)
        infos = [_info_of(*each) for each in zip(page, replies[::2], replies[1::2], strict=True)]
        found += [info for info in infos if info is not None and status in (None, info.status)]
        if len(found) >= limit:
            break
    return found[:limit]


def _info_of(job_id: str, values: Any, last: Any) -> JobInfo | None:
    """A job that cannot be read does not hide the others."""
    try:
        record = read_record(job_id, values, last)
    except UnreadableRecord:
        return None
    return record.info if record is not None else None


def _running(view: QueueView) -> Program[list[str]]:
    (ids,) = yield Commands((("SMEMBERS", view.keys.workers),))
    held = yield Commands(tuple(("SMEMBERS", view.keys.held(value.decode())) for value in ids))
    return sorted(value.decode() for members in held for value in members)


def _waiting(view: QueueView, limit: int) -> Program[list[str]]:
    keys = view.keys
    tenants = yield Commands(tuple(("ZRANGE", keys.lanes(priority), 0, -1) for priority in PRIORITY_ORDER))
    lanes = [
        keys.lane(priority, tenant)
        for priority, names in zip(PRIORITY_ORDER, tenants, strict=True)
        for tenant in dict.fromkeys(["", *(name.decode() for name in names)])
    ]
    # A lane also holds the entries of its running jobs, at its beginning: read a little more than asked for.
    sets = ((keys.returned, limit), (keys.ended, limit))
    front = yield Commands(tuple(("ZRANGE", name, 0, count) for name, count in sets))
    streams = yield Commands(tuple(("XRANGE", lane, "-", "+", "COUNT", limit + 1_000) for lane in lanes))
    late = yield Commands((("ZRANGE", keys.delayed, 0, limit), ("XREVRANGE", keys.dead, "+", "-", "COUNT", limit)))
    ids = [value.decode() for members in front for value in members]
    ids += [_job_of(entry).decode() for entries in streams for entry in entries]
    ids += [value.decode() for value in late[0]]
    return ids + [_job_of(entry).decode() for entry in late[1]]


def _job_of(entry: tuple[bytes, Mapping[bytes, bytes]]) -> bytes:
    return entry[1].get(b"job", b"")


def dead(view: QueueView, limit: int) -> Program[list[DeadJob]]:
    """Newest first."""
    (entries,) = yield Commands((("XREVRANGE", view.keys.dead, "+", "-", "COUNT", limit),))
    return read_dead(entries)


def read_dead(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> list[DeadJob]:
    """Raises UnreadableRecord."""
    found = []
    with readable("the list of dead jobs"):
        for _, raw in entries:
            fields = {key.decode("utf-8", "replace"): value.decode("utf-8", "replace") for key, value in raw.items()}
            history = tuple(fields.get("history", "").splitlines())
            died_ms, error = int(fields.get("died_ms", 0)), fields.get("error", "")
            found.append(DeadJob(job_id=fields["job"], died_ms=died_ms, error=error, history=history))
    return found


def redrive(view: QueueView, job_ids: Sequence[str] | None, limit: int) -> Program[list[str]]:
    """Back to their lanes, as if new; without ids, the oldest."""
    if job_ids is not None and not job_ids:
        return []
    revived = yield RunScript(REDRIVE, (limit, *(job_ids or ())))
    return [value.decode() for value in revived]


def set_limits(view: QueueView, tenant: str, limits: dict[str, float | None]) -> Program[None]:
    """0 removes a limit. Tenant "*" stands for all that have none of their own."""
    bad = [
        f"{name} must be at least 0, not {value}" for name, value in limits.items() if value is not None and value < 0
    ]
    if bad:
        raise ConfigurationError("; ".join(bad))
    given = [part for name, value in limits.items() if value is not None for part in (f"{name}:{tenant}", value)]
    if given:
        yield Commands((("HSET", view.keys.meta, *given),))


def set_queue_limit(view: QueueView, limit: int) -> Program[None]:
    yield Commands((("HSET", view.keys.meta, "max_queued", max(0, limit)),))
