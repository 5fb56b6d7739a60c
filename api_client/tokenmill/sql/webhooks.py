"""Webhooks in the database: the message of an end, and for operators the pending, delivered and
dead ones, and redriving the dead.

Needs the extra `sql`. `tokenmill tasks` sends them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from tokenmill.errors import ConfigurationError
from tokenmill.sql.database import Database
from tokenmill_schemas.webhook import redacted_url

if TYPE_CHECKING:
    import sqlalchemy

STATES: Final = ("pending", "sending", "delivered", "dead", "superseded")
_COLUMNS: Final = (
    "id", "job_id", "queue", "tenant", "event", "url", "state", "attempts", "ended_ms", "due_ms",
    "delivered_ms", "last_status", "last_error",
)  # fmt: skip


_MAX_NAME: Final = 255  # size of the tables' name columns


def message_of(
    about: str, event: str, *, queue: str, tenant: str, url: str, ended_ms: int
) -> dict[str, Any] | None:
    """Return the row of the message about an end of a job or a batch; None if nothing can be sent
    to the URL. Its id is the same in every process that records this end; a redriven job has
    another one.
    """
    host = _host(url)
    if host is None:
        return None
    return {
        "queue": queue,
        "tenant": tenant,
        "id": f"msg_{about}_{ended_ms}",
        "job_id": about,
        "event": event,
        "url": url,
        "host": host,
        "state": "pending",
        "attempts": 0,
        "ended_ms": ended_ms,
        "due_ms": ended_ms,
    }


def _host(url: str) -> str | None:
    """Return the URL's host; None if nothing can be sent there."""
    if not url.isprintable():
        return None
    try:
        parts = urlsplit(url)
        return (
            (parts.hostname or "")[:_MAX_NAME]
            if parts.scheme in ("http", "https") and parts.hostname
            else None
        )
    except ValueError:
        return None


def announce(
    connection: sqlalchemy.Connection,
    about: str,
    event: str,
    *,
    queue: str,
    tenant: str,
    ended_ms: int,
) -> None:
    """Add the message about an end to the outbox, if its tenant has a URL, in the transaction that
    records the end. `event` is OpenAI's, such as `batch.completed`; `about` is the id that the API
    shows.
    """
    from sqlalchemy import select

    from tokenmill_schemas.tables import tenant_webhooks, webhooks

    urls = select(tenant_webhooks.c.url).where(tenant_webhooks.c.tenant == tenant)
    url = connection.scalar(urls)
    if url is None:
        return
    row = message_of(about, event, queue=queue, tenant=tenant, url=url, ended_ms=ended_ms)
    if row is None:
        return
    if connection.scalar(select(webhooks.c.id).where(webhooks.c.id == row["id"])) is None:
        connection.execute(webhooks.insert().values(row))


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
