"""Reads and removes the recorded responses of ended jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa

from tokenmill.errors import readable
from tokenmill.sql.database import Database
from tokenmill_gateway.threads import in_thread
from tokenmill_schemas.codec import decode_result
from tokenmill_schemas.result import JobResult
from tokenmill_schemas.tables import jobs

MOST_TURNS: Final = 1_000
_LIGHT: Final = ("id", "queue", "envelope", "previous_id")
_CONTENT: Final = ("text", "reasoning", "token_ids", "logprobs", "prompt", "params", "metadata",
                   "envelope", "result")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recorded:
    """An ended job: what the API shows of its request, and its result. `result` is
    None after a purge of payloads.
    """

    job_id: str
    queue: str
    envelope: bytes
    previous_id: str
    result: JobResult | None


class Records:
    """The recorded jobs of one database; its calls run in threads, for a limited time."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)

    async def find(self, job_id: str, tenant: str) -> Recorded | None:
        """Return an ended job of a tenant, without its result."""

        def look() -> Recorded | None:
            statement = sa.select(*_columns(*_LIGHT))
            statement = statement.where(jobs.c.id == job_id, jobs.c.tenant == tenant)
            with self._database.connection() as connection:
                row = connection.execute(statement).mappings().first()
            return None if row is None else _recorded(dict(row))

        return await in_thread(look)

    async def chain(self, job_id: str, tenant: str) -> list[Recorded]:
        """Return a tenant's job and those that it goes on from, the newest first, in one query."""
        return await in_thread(lambda: self._chain(job_id, tenant, MOST_TURNS + 1))

    async def remove(self, job_id: str) -> None:
        """Remove what was asked and answered. Owner, times, outcome and usage stay."""

        def change() -> None:
            statement = sa.update(jobs).where(jobs.c.id == job_id)
            with self._database.connection() as connection:
                connection.execute(statement.values(dict.fromkeys(_CONTENT, sa.null())))

        await in_thread(change)

    async def ping(self) -> None:
        def ask() -> None:
            with self._database.connection() as connection:
                connection.execute(sa.select(sa.literal(1)))

        await in_thread(ask)

    def _chain(self, job_id: str, tenant: str, most: int) -> list[Recorded]:
        turns = (
            sa.select(jobs.c.id, jobs.c.previous_id, sa.literal(1).label("turn"))
            .where(jobs.c.id == job_id, jobs.c.tenant == tenant)
            .cte("turns", recursive=True)
        )
        before = sa.select(jobs.c.id, jobs.c.previous_id, turns.c.turn + 1).where(
            jobs.c.id == turns.c.previous_id, jobs.c.tenant == tenant, turns.c.turn < most
        )
        turns = turns.union_all(before)
        statement = sa.select(*_columns(*_LIGHT, "result")).join(turns, turns.c.id == jobs.c.id)
        with self._database.connection() as connection:
            rows = connection.execute(statement.order_by(turns.c.turn)).mappings().all()
        return [_recorded(dict(row)) for row in rows]

    def close(self) -> None:
        self._database.close()


def _columns(*names: str) -> list[Any]:
    return [jobs.c[name] for name in names]


def _recorded(row: dict[str, Any]) -> Recorded:
    result = None
    if row.get("result") is not None:
        with readable(f"the recorded result of job {row['id']}"):
            result = decode_result(bytes(row["result"]))
    return Recorded(
        job_id=row["id"],
        queue=row["queue"],
        envelope=bytes(row["envelope"] or b""),
        previous_id=row["previous_id"] or "",
        result=result,
    )
