"""The state of a queue: backlog and age of each class, load of each tenant, and the live workers.

For `tokenmill top`, `tokenmill scale` and the exporter. It takes seven round trips at most,
whatever the backlog. It writes nothing, and the `reader` of ops/deploy/redis/users.acl may run it.
A stream that disappears between two commands counts as empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenmill.operations.io_requests import Commands, Operation, QueueContext, server_time
from tokenmill.operations.queue import (
    DueJob,
    due_jobs,
    first_group,
    number_of,
    text_of,
    workers,
)
from tokenmill.transport.scripts import Argument
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.job import PRIORITY_ORDER, Priority

MAX_TENANT_STREAMS = 200  # streams read per class: those that are served next
_DEADLINE_RANKS = tuple(4**power - 1 for power in range(11))  # of the deadlines that are read
_RETURNED_SPAN = 10**13  # range of the scores of one class in `returned`


class ClassState(msgspec.Struct, frozen=True, kw_only=True):
    """One priority class. `oldest_ms`: how long its oldest waiting job has waited; 0 if none
    waits.
    """

    waiting: int = 0
    waiting_tokens: int = 0  # estimated
    oldest_ms: int = 0


class TenantState(msgspec.Struct, frozen=True, kw_only=True):
    tenant: str
    waiting: int = 0
    running: int = 0
    tokens_per_s: float = 0.0


class QueueState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a queue.

    `scheduled` jobs wait for their start time or next attempt; once due they count as waiting.
    `unrecorded` jobs ended while they waited, and have to be recorded. Counters cover the queue's
    whole life. `now_ms` is the server's time. `deadlines` are pairs of a number of jobs that wait
    or run, and the Unix milliseconds at which so many deadlines have passed.
    """

    queue: str
    classes: dict[str, ClassState]
    running: int
    scheduled: int
    unrecorded: int
    dead: int
    submitted: int
    finished: dict[str, int]
    entries_dropped: int
    tenants: list[TenantState]
    workers: list[WorkerStatus]
    now_ms: int = 0
    deadlines: tuple[tuple[int, int], ...] = ()

    @property
    def waiting(self) -> int:
        return sum(state.waiting for state in self.classes.values())


@dataclass(frozen=True, slots=True)
class _TenantStream:
    """The stream of one tenant's jobs of one class. Its pending entries are the jobs that were
    delivered.
    """

    priority: Priority
    tenant: str
    waiting: int
    last_delivered: str


def overview(context: QueueContext) -> Operation[QueueState]:
    """Read the state of a queue. Values that cannot be read are left out. Raises QueueUnavailable
    for trouble with the server.
    """
    keys = context.keys
    counts = (("ZCARD", keys.delayed), ("ZCARD", keys.unrecorded_ends), ("XLEN", keys.dead))
    returned = tuple(_first_returned(context, priority) for priority in PRIORITY_ORDER)
    tenants = tuple(
        ("ZRANGE", keys.fair_shares(priority), 0, MAX_TENANT_STREAMS - 1)
        for priority in PRIORITY_ORDER
    )
    dated = (("ZRANGE", keys.deadlines, k, k, "WITHSCORES") for k in (*_DEADLINE_RANKS, -1))
    meta, scheduled, unrecorded, dead, num_dated, *rest = yield Commands(
        (("HGETALL", keys.meta), *counts, ("ZCARD", keys.deadlines), *returned, *tenants, *dated)
    )
    rest, deadlines = rest[: -len(_DEADLINE_RANKS) - 1], rest[-len(_DEADLINE_RANKS) - 1 :]
    streams = yield from _tenant_streams(context, rest[len(returned) :])
    since = _oldest_returned(rest[: len(returned)])
    yield from _oldest_in_streams(context, streams, since)
    due = yield from due_jobs(context)
    living = yield from workers(context)
    counts_now = (max(0, int(scheduled) - len(due)), int(unrecorded), int(dead))
    now_ms = yield from server_time()
    state = _state(context, meta, counts_now, streams, since, living, due, now_ms)
    ranks = (*(rank + 1 for rank in _DEADLINE_RANKS), int(num_dated))
    pairs = zip(ranks, deadlines, strict=True)
    known = tuple((count, due_ms) for count, reply in pairs if (due_ms := _score(reply)))
    return msgspec.structs.replace(state, now_ms=now_ms, deadlines=known)


def _first_returned(context: QueueContext, priority: Priority) -> tuple[Argument, ...]:
    low = priority.rank * _RETURNED_SPAN
    return (
        "ZRANGEBYSCORE",
        context.keys.requeued,
        low,
        low + _RETURNED_SPAN - 1,
        "WITHSCORES",
        "LIMIT",
        0,
        1,
    )


def _score(reply: Sequence[Any]) -> int:
    """Return the score in a reply about one member; 0 if there is none."""
    if not reply:
        return 0
    return int(float(reply[0][1] if isinstance(reply[0], list | tuple) else reply[1]))


def _tenant_streams(
    context: QueueContext, tenants: Sequence[Sequence[bytes]]
) -> Operation[list[_TenantStream]]:
    names = [
        (priority, name.decode("utf-8", "replace"))
        for priority, members in zip(PRIORITY_ORDER, tenants, strict=True)
        for name in members
    ]
    asked: list[tuple[Argument, ...]] = []
    for priority, name in names:
        stream = context.keys.tenant_stream(priority, name)
        asked += [("XLEN", stream), ("XINFO GROUPS", stream)]
    replies = yield Commands(tuple(asked), tolerant=True)
    found = []
    for (priority, name), length, groups in zip(names, replies[::2], replies[1::2], strict=True):
        group = first_group(groups)
        if group is not None and isinstance(length, int):
            waiting = max(0, length - int(group["pending"]))
            found.append(
                _TenantStream(priority, name, waiting, text_of(group["last-delivered-id"]))
            )
    return found


def _oldest_returned(replies: Sequence[Any]) -> dict[Priority, int]:
    """Return, per class, the creation time of the oldest requeued job in Unix milliseconds."""
    since = {}
    for priority, reply in zip(PRIORITY_ORDER, replies, strict=True):
        if reply:
            since[priority] = _score(reply) - priority.rank * _RETURNED_SPAN
    return since


def _oldest_in_streams(
    context: QueueContext, streams: Sequence[_TenantStream], since: dict[Priority, int]
) -> Operation[None]:
    """Lower `since` to the time of the first undelivered entry of each stream. An entry's id begins
    with the time at which it was added.
    """
    waiting = [stream for stream in streams if stream.waiting]
    firsts = yield Commands(
        tuple(
            (
                "XRANGE",
                context.keys.tenant_stream(stream.priority, stream.tenant),
                f"({stream.last_delivered}",
                "+",
                "COUNT",
                1,
            )
            for stream in waiting
        ),
        tolerant=True,
    )
    for stream, entries in zip(waiting, firsts, strict=True):
        if isinstance(entries, list) and entries:
            made_ms = int(text_of(entries[0][0]).split("-")[0])
            since[stream.priority] = min(made_ms, since.get(stream.priority, made_ms))


def _state(
    context: QueueContext,
    meta: Mapping[bytes, bytes],
    counts: tuple[int, int, int],
    streams: Sequence[_TenantStream],
    since: dict[Priority, int],
    living: Sequence[WorkerStatus],
    due: Sequence[DueJob],
    now_ms: int,
) -> QueueState:
    numbers = defaultdict(float, {text_of(name): number_of(value) for name, value in meta.items()})
    _count_due(due, numbers, since)
    classes = {
        priority.value: ClassState(
            waiting=max(0, round(numbers.get(f"queued:{priority.value}", 0))),
            waiting_tokens=max(0, round(numbers.get(f"queued_tokens:{priority.value}", 0))),
            oldest_ms=max(1, now_ms - since[priority]) if priority in since else 0,
        )
        for priority in PRIORITY_ORDER
    }
    scheduled, unrecorded, dead = counts
    ended = {
        name.removeprefix("finished:"): int(value)
        for name, value in numbers.items()
        if name.startswith("finished:")
    }
    return QueueState(
        queue=context.keys.queue,
        classes=classes,
        running=max(0, round(numbers.get("running", 0))),
        scheduled=scheduled,
        unrecorded=unrecorded,
        dead=dead,
        submitted=round(numbers.get("submitted", 0)),
        finished=ended,
        entries_dropped=round(numbers.get("entries_dropped", 0)),
        tenants=_tenants(streams, living),
        workers=list(living),
    )


def _count_due(
    due: Sequence[DueJob], numbers: defaultdict[str, float], since: dict[Priority, int]
) -> None:
    for job in due:
        priority = Priority(job.priority)
        since[priority] = min(job.due_ms, since.get(priority, job.due_ms))
        if not job.is_counted:
            numbers[f"queued:{job.priority}"] += 1
            numbers[f"queued_tokens:{job.priority}"] += job.cost


def _tenants(streams: Sequence[_TenantStream], living: Sequence[WorkerStatus]) -> list[TenantState]:
    """Return the load of each tenant, the busiest first. Running jobs and tokens are those of the
    workers' last heartbeats.
    """
    waiting: Counter[str] = Counter()
    running: Counter[str] = Counter()
    pace: dict[str, float] = {}
    for stream in streams:
        waiting[stream.tenant] += stream.waiting
    for worker in living:
        for name, load in worker.tenants.items():
            running[name] += load.running
            pace[name] = pace.get(name, 0.0) + load.tokens_per_s
    states = [
        TenantState(
            tenant=name,
            waiting=waiting[name],
            running=running[name],
            tokens_per_s=round(pace.get(name, 0.0), 1),
        )
        for name in {*waiting, *running, *pace}
    ]
    busy = [state for state in states if state.waiting or state.running or state.tokens_per_s]
    return sorted(
        busy, key=lambda state: (-state.tokens_per_s, -state.running, -state.waiting, state.tenant)
    )
