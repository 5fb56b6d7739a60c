"""The outbox of webhook messages in SQL: which are due, which process tries which, and the outcome.

    pending ──claim──▶ sending ──delivered──▶ delivered
       ▲                  │ ├─── limit, or refused for good ──▶ dead ── redrive ─▶ pending
       └──── failed ──────┘ └─── its job has ended anew ──▶ superseded

A claim gives a lease, which lasts for a limited time. A message whose try was not begun, or whose
process died, is due again when its lease ends, so no message is lost with a process or the broker.
A lease is identified by the time at which it ends, and a try by its number, so a late update of an
older lease or try changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Engine, and_, case, func, select, update
from sqlalchemy.engine import Connection

from tokenmill_schemas.tables import jobs, usage, webhooks
from tokenmill_schemas.webhook import redacted_url

# longer than any claimed message waits for a free thread, see MAX_IN_FLIGHT
LEASE_MS: Final = 300_000
MAX_IN_FLIGHT: Final = 64
MAX_OF_TENANT: Final = 48  # keeps room for other tenants while one tenant's hosts hang
MAX_ERROR_CHARS: Final = 500


@dataclass(frozen=True, slots=True)
class OutboxLease:
    """A message that may be tried until `until_ms`."""

    id: str
    until_ms: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try. `job` and `usage` are rows, or None if retention has removed them."""

    id: str
    number: int
    message: Mapping[str, Any]
    job: Mapping[str, Any] | None
    usage: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class OutboxBacklog:
    """The messages that are not delivered. `counts`: their number by state. `overdue_s`: how long
    the longest due of the pending ones has been due.
    """

    counts: Mapping[str, int]
    overdue_s: float


class Outbox:
    """Reads and writes the outbox. Calls block. Safe to share between threads and processes."""

    def __init__(self, engine: Engine, *, max_attempts: int = 10, per_host: int = 8) -> None:
        self._engine = engine
        self._max_attempts = max_attempts
        self._per_host = per_host

    def claim(self, now_ms: int) -> list[OutboxLease]:
        """Claim due messages, limited in total, per host and per tenant. Tenants take turns, each
        with its longest due message first, so receivers that hang do not hold up the others.
        """
        until_ms = now_ms + LEASE_MS
        with self._engine.begin() as connection:
            self._mark_dead(connection, now_ms)
            wanted = self._choose(connection, now_ms)
            if not wanted:
                return []
            taken = connection.execute(
                update(webhooks)
                # not claimed by another process meanwhile
                .where(webhooks.c.id.in_(wanted), _is_due(now_ms))
                .values(state="sending", due_ms=until_ms)
                .returning(webhooks.c.id)
            )
            return [OutboxLease(str(found), until_ms) for found in taken.scalars()]

    def _mark_dead(self, connection: Connection, now_ms: int) -> None:
        """Mark messages dead whose tries are used up. Tries of processes that died count too, so a
        message that kills each process that tries it comes to an end.
        """
        died = and_(webhooks.c.state == "sending", webhooks.c.due_ms <= now_ms)
        reason = func.coalesce(webhooks.c.last_error, "each process that tried it died")
        spent = webhooks.c.attempts >= self._max_attempts
        connection.execute(
            update(webhooks).where(died, spent).values(state="dead", last_error=reason)
        )

    def _choose(self, connection: Connection, now_ms: int) -> list[str]:
        columns = (webhooks.c.tenant, webhooks.c.host)
        flying = select(*columns, func.count()).where(
            webhooks.c.state == "sending", webhooks.c.due_ms > now_ms
        )
        of_tenant: Counter[str] = Counter()
        of_host: Counter[str] = Counter()
        for tenant, host, count in connection.execute(flying.group_by(*columns)):
            of_tenant[str(tenant)] += int(count)
            of_host[str(host)] += int(count)
        room = MAX_IN_FLIGHT - of_tenant.total()
        chosen: list[str] = []
        for message_id, tenant, host in connection.execute(self._due_in_turn(now_ms)):
            is_free = of_host[str(host)] < self._per_host and of_tenant[str(tenant)] < MAX_OF_TENANT
            if len(chosen) < room and is_free:
                of_tenant[str(tenant)] += 1
                of_host[str(host)] += 1
                chosen.append(str(message_id))
        return chosen

    def _due_in_turn(self, now_ms: int) -> Any:
        """Select due messages, one of each tenant in turn, with at most as many per host and per
        tenant as may be in flight.
        """
        order = webhooks.c.due_ms
        place = func.row_number().over(partition_by=webhooks.c.host, order_by=order).label("place")
        due = (
            select(webhooks.c.id, webhooks.c.tenant, webhooks.c.host, order, place)
            .where(_is_due(now_ms))
            .subquery()
        )
        turn = (
            func.row_number().over(partition_by=due.c.tenant, order_by=due.c.due_ms).label("turn")
        )
        few = select(due, turn).where(due.c.place <= self._per_host).subquery()
        in_turn = select(few.c.id, few.c.tenant, few.c.host).where(few.c.turn <= 4 * MAX_IN_FLIGHT)
        return in_turn.order_by(few.c.turn, few.c.due_ms).limit(16 * MAX_IN_FLIGHT)

    def begin(self, lease: OutboxLease, now_ms: int) -> Attempt | None:
        """Begin a try. Returns None if the lease has passed to another process, or if the job has
        ended again since.
        """
        with self._engine.begin() as connection:
            begun = connection.execute(
                update(webhooks)
                .where(
                    webhooks.c.id == lease.id,
                    webhooks.c.state == "sending",
                    webhooks.c.due_ms == lease.until_ms,
                )
                .values(attempts=webhooks.c.attempts + 1, due_ms=now_ms + LEASE_MS)
                .returning(webhooks)
            )
            message = begun.mappings().first()
            if message is None:
                return None
            job = _row(connection, select(jobs).where(jobs.c.id == message["job_id"]))
            used = _row(connection, select(usage).where(usage.c.job_id == message["job_id"]))
            if job is not None and job["finished_ms"] != message["ended_ms"]:
                connection.execute(
                    _of(message["id"], message["attempts"]).values(state="superseded")
                )
                return None
        return Attempt(message["id"], message["attempts"], dict(message), job, used)

    def delivered(self, attempt: Attempt, status: int, now_ms: int) -> None:
        """Record a delivery, and remove the secrets from the URL: they are not needed any more."""
        shown = redacted_url(attempt.message["url"])
        self._end(
            attempt,
            state="delivered",
            delivered_ms=now_ms,
            last_status=status,
            last_error=None,
            url=shown,
        )

    def failed(self, attempt: Attempt, error: str, status: int | None, due_ms: int | None) -> None:
        """Record a failed try. `due_ms`: the next try; None makes the message dead at once."""
        is_last = due_ms is None or attempt.number >= self._max_attempts
        after = {"state": "dead"} if is_last else {"state": "pending", "due_ms": due_ms}
        self._end(attempt, last_status=status, last_error=error[:MAX_ERROR_CHARS], **after)

    def _end(self, attempt: Attempt, **values: object) -> None:
        with self._engine.begin() as connection:
            connection.execute(_of(attempt.id, attempt.number).values(**values))

    def backlog(self, now_ms: int) -> OutboxBacklog:
        due = select(func.min(webhooks.c.due_ms)).where(
            webhooks.c.state == "pending", webhooks.c.due_ms <= now_ms
        )
        with self._engine.connect() as connection:
            oldest = connection.scalar(due)
        return OutboxBacklog(self.counts(), (now_ms - oldest) / 1000 if oldest is not None else 0.0)

    def counts(self) -> dict[str, int]:
        """Return how many messages are pending, are being sent, or are dead."""
        statement = select(
            *(
                func.count(case((webhooks.c.state == name, 1))).label(name)
                for name in ("pending", "sending", "dead")
            )
        ).where(webhooks.c.state.in_(("pending", "sending", "dead")))
        with self._engine.connect() as connection:
            return {
                name: int(count)
                for name, count in connection.execute(statement).mappings().one().items()
            }


def _is_due(now_ms: int) -> Any:
    """Match messages that are pending and due, or whose lease has expired."""
    return and_(webhooks.c.state.in_(("pending", "sending")), webhooks.c.due_ms <= now_ms)


def _of(message_id: str, number: int) -> Any:
    return update(webhooks).where(
        webhooks.c.id == message_id, webhooks.c.state == "sending", webhooks.c.attempts == number
    )


def _row(connection: Connection, statement: Any) -> Mapping[str, Any] | None:
    found = connection.execute(statement).mappings().first()
    return dict(found) if found is not None else None
