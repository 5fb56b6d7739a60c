"""Reads a database's schema revision, and compares it with those that the `migrations` package has.

Every start does this, so the module itself reads alembic's table and the names of the revisions'
files: alembic alone would cost each start as much again as SQLAlchemy. Nothing is changed here;
`worker/tokenmill_worker/record/migrate.py` does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import column, inspect, select, table
from sqlalchemy.engine import Connection

import tokenmill_migrations

_VERSION = table("alembic_version", column("version_num"))


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """A database's schema revision. `current` is None for an empty database; `is_known` is False
    for a revision of a newer version, and for one from before the first release.
    """

    current: str | None
    head: str
    is_known: bool

    @property
    def is_behind(self) -> bool:
        return self.current is None or self.current < self.head

    @property
    def is_too_old(self) -> bool:
        """Return whether this version has no way from the database's revision to its own."""
        return self.current is not None and self.is_behind and not self.is_known


def revisions() -> list[str]:
    """Return the known revisions, oldest first: `versions/0005_….py` is revision 0005, and follows
    0004.
    """
    files = (Path(tokenmill_migrations.__file__).parent / "versions").glob("[0-9]*_*.py")
    return sorted(path.name.partition("_")[0] for path in files)


def read_schema_version(connection: Connection) -> SchemaVersion:
    """Read the revision that the database has, and compare it with the known ones."""
    known = revisions()
    current = None
    if inspect(connection).has_table(_VERSION.name):
        current = connection.scalar(select(_VERSION.c.version_num))
    return SchemaVersion(current, known[-1], current in known)
