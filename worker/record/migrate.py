"""Brings a database to this version's schema, from code: alembic with the scripts of the `migrations` package.

Works from a checkout and from an installed wheel. Several processes may upgrade at once: one does it, the
others wait and find it done. Databases ahead of us (a rolling upgrade) are fine, see migrations/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, text
from sqlalchemy.engine import Connection

import migrations
from worker.record.connection import open_engine

_LOCK: Final = 0x746F6B656E  # "token": the advisory lock of upgrades


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a database stands. `current` is None for an empty one."""

    current: str | None
    head: str
    is_known: bool

    @property
    def is_behind(self) -> bool:
        return self.current is None or (self.is_known and self.current != self.head)


def configuration() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def standing(connection: Connection) -> Standing:
    scripts = ScriptDirectory.from_config(configuration())
    head = scripts.get_current_head()
    current = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in scripts.walk_revisions()}
    return Standing(current, head or "", current in known)


def upgrade(url: str, revision: str = "head", *, engine: Engine | None = None) -> tuple[str | None, str | None]:
    """Returns the revisions before and after."""
    database = engine or open_engine(url)
    try:
        with database.connect() as connection:
            with connection.begin():
                _lock(connection)
                before = MigrationContext.configure(connection).get_current_revision()
                known = standing(connection)
                if before is None or known.is_known:
                    config = configuration()
                    config.attributes["connection"] = connection
                    command.upgrade(config, revision)
            return before, MigrationContext.configure(connection).get_current_revision()
    finally:
        if engine is None:
            database.dispose()


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({_LOCK})"))
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
