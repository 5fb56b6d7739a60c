"""Sums usage by day, tenant, model, queue and state: `usage_daily` is rebuilt from `usage`, one day
at a time.

Making a day twice gives the same rows, so it may be repeated, interrupted, and done by two
processes at once. Days are made in order, so every day before the newest one that was made has been
made too. Readers take the newest two days from `usage` itself and trust the sums for the rest. The
usage of a sealed day is being removed; its sums stay.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    Engine,
    Select,
    and_,
    delete,
    except_,
    false,
    func,
    insert,
    select,
    true,
    union,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection

from tokenmill_schemas.tables import usage, usage_daily, usage_days

_FIRST: Final = "0001-01-01"  # days before it come from broken clocks
_WINDOW_DAYS: Final = 2  # days before today that are made again, for late rows and redrives
_KEYS: Final = ("day", "tenant", "model", "queue", "state")
_SUMS: Final = tuple(column.name for column in usage_daily.c if column.name not in (*_KEYS, "jobs"))


class RollUp:
    """Makes the daily sums. Calls block, each in short transactions."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._clock = clock

    def recent(self) -> list[str]:
        """Make today, the days just before, and every day since the last run; on the first run, all
        days. Returns the days that were made.
        """
        return [day for day in self._recent_days() if self.make(day)]

    def reconcile(self) -> list[str]:
        """Make every unsealed day again whose sums differ from its rows. That happens through rows
        that were recorded late, and rows that a redrive moved to another day, also when the day has
        none left. Returns the days that were made.
        """
        sealed = select(usage_days.c.day).where(usage_days.c.sealed == true())
        rows = _sums_of_rows().where(usage.c.day.not_in(sealed))
        names = (*_KEYS, "jobs", *_SUMS)
        sums = select(*(usage_daily.c[name] for name in names)).where(
            usage_daily.c.day.not_in(sealed)
        )
        missing, outdated = except_(rows, sums).subquery(), except_(sums, rows).subquery()
        statement = union(select(missing.c.day), select(outdated.c.day))
        with self._engine.connect() as connection:
            days = sorted(connection.execute(statement).scalars())
        return [day for day in days if self.make(day)]

    def make(self, day: str) -> bool:
        """Make a day's sums. Returns False for a sealed day, which stays as it is."""
        with self._engine.begin() as connection:
            return self._make(connection, day)

    def seal(self, day: str) -> None:
        """Sum a day a last time; from then on its usage may be removed."""
        with self._engine.begin() as connection:
            if self._make(connection, day):
                connection.execute(
                    update(usage_days).where(usage_days.c.day == day).values(sealed=true())
                )

    def _make(self, connection: Connection, day: str) -> bool:
        if not self._take(connection, day):
            return False
        connection.execute(delete(usage_daily).where(usage_daily.c.day == day))
        rows = _sums_of_rows().where(usage.c.day == day)
        connection.execute(insert(usage_daily).from_select([*_KEYS, "jobs", *_SUMS], rows))
        return True

    def _take(self, connection: Connection, day: str) -> bool:
        """Lock the day against other processes that make it. Returns False if the day is sealed."""
        dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
        row: Any = dialect.insert(usage_days).values(
            day=day, rolled_ms=round(self._clock() * 1000), sealed=false()
        )
        taken = row.on_conflict_do_update(
            index_elements=["day"],
            set_={"rolled_ms": row.excluded.rolled_ms},
            where=usage_days.c.sealed == false(),
        )
        return connection.execute(taken.returning(usage_days.c.day)).first() is not None

    def _recent_days(self) -> list[str]:
        today = datetime.fromtimestamp(self._clock(), UTC).date()
        begin = (today - timedelta(days=_WINDOW_DAYS)).isoformat()
        with self._engine.connect() as connection:
            newest = connection.scalar(
                select(func.max(usage_days.c.day)).where(usage_days.c.day <= today.isoformat())
            )
            since = min(begin, _before(newest)) if newest is not None and newest > _FIRST else ""
            days: set[str] = set()
            # a day may have sums and no row: a redrive moved the last one
            for table in (usage, usage_daily):
                wanted = and_(table.c.day >= since, table.c.day <= today.isoformat())
                days |= set(
                    connection.execute(select(table.c.day).where(wanted).distinct()).scalars()
                )
        return sorted(days | {today.isoformat()})


def _sums_of_rows() -> Select[Any]:
    keys = [usage.c[name] for name in _KEYS]
    sums = [func.sum(usage.c[name]).label(name) for name in _SUMS]
    return select(*keys, func.count().label("jobs"), *sums).group_by(*keys)


def _before(day: str) -> str:
    return (date.fromisoformat(day) - timedelta(days=1)).isoformat()
