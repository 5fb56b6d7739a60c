"""Brings a database to this version's schema, from code: alembic with the scripts of the
`migrations` package.

It works from a checkout and from an installed wheel. Several processes may upgrade at once: one
does it, the others wait and find it done. Databases of a newer version (during a rolling upgrade)
stay as they are, see migrations/README.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Engine, text
from sqlalchemy.engine import Connection

import tokenmill_migrations
from tokenmill.errors import TokenmillError
from tokenmill.sql.engine import open_engine
from tokenmill_worker.record.schema_version import (
    SchemaVersion,
    read_schema_version,
    revisions,
)

_LOCK: Final = 0x746F6B656E  # "token": the advisory lock of upgrades
_LOCK_POLL_S: Final = 0.1


def configuration() -> Config:
    config = Config()
    config.set_main_option(
        "script_location", str(Path(tokenmill_migrations.__file__).parent).replace("%", "%%")
    )
    config.set_main_option("path_separator", "os")
    return config


def upgrade(
    url: str, revision: str = "head", *, engine: Engine | None = None
) -> tuple[str | None, str | None]:
    """Upgrade the schema. Returns the revisions before and after.

    Raises:
        TokenmillError: the database has a revision from before the first release.
    """

    def change(connection: Connection, config: Config) -> None:
        found = read_schema_version(connection)
        _leave_transaction(connection)
        _require_known_past(found)
        if found.current is None or found.is_known:
            command.upgrade(config, revision)

    return _migrate(url, engine, change)


def downgrade(
    url: str, revision: str, *, engine: Engine | None = None
) -> tuple[str | None, str | None]:
    """Remove what came after `revision`, with the data in it. No worker of this version may run.
    Raises TokenmillError for a database of a newer version: only that version can take it back.
    """

    def change(connection: Connection, config: Config) -> None:
        found = read_schema_version(connection)
        _leave_transaction(connection)
        _require_known_past(found)
        if found.current is not None and not found.is_known:
            raise TokenmillError(
                f"the database is at revision {found.current}, of a newer version: take it back "
                "with that"
            )
        if found.current is not None and (revision == "base" or revision < found.current):
            command.downgrade(config, revision)

    return _migrate(url, engine, change)


def _require_known_past(found: SchemaVersion) -> None:
    if found.is_too_old:
        raise TokenmillError(
            f"the database is at revision {found.current}, from before the first release: upgrade "
            f"it to {revisions()[0]} with a checkout of that time, or name a new database"
        )


def _migrate(
    url: str, engine: Engine | None, change: Callable[[Connection, Config], None]
) -> tuple[str | None, str | None]:
    database = engine or open_engine(url, may_create=True)
    try:
        with _alone(database) as connection:
            before = _current(connection)
            config = configuration()
            config.attributes["connection"] = connection
            change(connection, config)
            return before, _current(connection)
    finally:
        if engine is None:
            database.dispose()


def _current(connection: Connection) -> str | None:
    revision = MigrationContext.configure(connection).get_current_revision()
    _leave_transaction(connection)
    return revision


def _leave_transaction(connection: Connection) -> None:
    """End PostgreSQL's transaction: its revisions begin their own, and some must run outside of
    any. SQLite's revisions run in ours.
    """
    if connection.dialect.name == "postgresql":
        connection.commit()


@contextmanager
def _alone(database: Engine) -> Iterator[Connection]:
    """Allow one upgrade at a time. SQLite: a single transaction. PostgreSQL: an advisory lock of a
    session without a transaction, since building an index beside running writers waits for every
    transaction, including those that wait for the lock.
    """
    if database.dialect.name != "postgresql":
        with database.begin() as connection:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
            yield connection
        return
    with database.connect().execution_options(isolation_level="AUTOCOMMIT") as guard:
        while not guard.scalar(text(f"SELECT pg_try_advisory_lock({_LOCK})")):
            time.sleep(_LOCK_POLL_S)
        try:
            with database.connect() as connection:
                yield connection
        finally:
            guard.execute(text(f"SELECT pg_advisory_unlock({_LOCK})"))
