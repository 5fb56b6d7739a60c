"""Webhooks in the database, for operators: pending, delivered and dead ones, and redriving the
dead.

Needs the extra `sql`. `tokenmill tasks` sends them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from tokenmill.errors import ConfigurationError
from tokenmill.sql.database import Database
from tokenmill_schemas.webhook import redacted_url

STATES: Final = ("pending", "sending", "delivered", "dead", "superseded")
_COLUMNS: Final = (
    "id", "job_id", "queue", "tenant", "event", "url", "state", "attempts", "ended_ms", "due_ms",
    "delivered_ms", "last_status", "last_error",
)  # fmt: skip


class WebhookRow(msgspec.Struct, frozen=True, kw_only=True):
    """One webhook message. `due_ms` is the time of its next attempt while it is pending. `url` is
    without passwords and query values.
    """

    id: str
    job_id: str
    queue: str
    tenant: str
    event: str
    url: str
    state: str
    attempts: int
    ended_ms: int
    due_ms: int
    delivered_ms: int | None
    last_status: int | None
    last_error: str | None


class SqlWebhooks:
    """The webhooks in one database; may be shared between threads."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)
        from tokenmill_schemas.tables import webhooks  # imports SQLAlchemy

        self._webhooks = webhooks

    def list(
        self,
        *,
        state: str | None = None,
        tenant: str | None = None,
        job_id: str | None = None,
        limit: int = 100,
    ) -> Sequence[WebhookRow]:
        """List webhooks, the latest due first."""
        if state is not None and state not in STATES:
            raise ConfigurationError(f"a webhook is {', '.join(STATES)}, not {state}")
        table = self._webhooks
        wanted = {"state": state, "tenant": tenant, "job_id": job_id}
        statement = self._database.sql.select(*(table.c[name] for name in _COLUMNS))
        statement = statement.where(
            *(table.c[name] == value for name, value in wanted.items() if value is not None)
        )
        statement = statement.order_by(table.c.due_ms.desc(), table.c.id).limit(limit)
        with self._database.connection() as connection:
            rows = [
                msgspec.convert(dict(zip(_COLUMNS, row, strict=True)), WebhookRow)
                for row in connection.execute(statement)
            ]
        return [msgspec.structs.replace(row, url=redacted_url(row.url)) for row in rows]

    def redrive(self, ids: Sequence[str] | None = None, limit: int = 1000) -> Sequence[str]:
        """Make dead webhooks pending again, with all their attempts, and return their ids. Without
        `ids`, take those that died first.
        """
        sql, table = self._database.sql, self._webhooks
        dead = sql.select(table.c.id).where(table.c.state == "dead")
        dead = (
            dead.order_by(table.c.due_ms) if ids is None else dead.where(table.c.id.in_(list(ids)))
        )
        values: dict[str, Any] = {
            "state": "pending",
            "attempts": 0,
            "due_ms": round(time.time() * 1000),
        }
        statement = (
            sql.update(table)
            .where(table.c.id.in_(dead.limit(limit)), table.c.state == "dead")
            .values(values)
        )
        with self._database.connection() as connection:
            return sorted(connection.execute(statement.returning(table.c.id)).scalars())

    def close(self) -> None:
        self._database.close()
