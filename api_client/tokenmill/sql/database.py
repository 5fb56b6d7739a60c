"""Reads and writes a database for producers: one transaction at a time, one sentence for each
error.

Needs the extra `sql` (SQLAlchemy), which is imported when the first database is opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import ConfigurationError, QueueUnavailable, not_unicode

if TYPE_CHECKING:
    import sqlalchemy


def _parsed(url: str) -> sqlalchemy.URL:
    from sqlalchemy.exc import ArgumentError

    from tokenmill.sql.engine import parse_database_url

    scheme, separator, _ = url.partition("://")
    if separator and scheme.partition("+")[0] not in ("sqlite", "postgresql", "postgres"):
        raise ConfigurationError(
            "the database URL begins with sqlite:/// or postgresql://; others are not served"
        )
    try:
        parsed = parse_database_url(url)
        parsed.get_dialect()
    except (ArgumentError, ValueError):  # their messages repeat parts of the URL
        raise ConfigurationError(
            "the database URL cannot be read: sqlite:///FILE or postgresql://…, "
            "odd characters of a password quoted"
        ) from None
    return parsed


class Database:
    """A connection pool of one database; may be shared between threads. `sql` is the module
    sqlalchemy, imported when the first instance is created.
    """

    def __init__(self, where: str | Path) -> None:
        """Raises ConfigurationError for a URL that cannot be read. A path is an SQLite file, which
        is made if it does not exist.
        """
        try:
            import sqlalchemy

            from tokenmill.sql import driver_errors, engine
        except ImportError as error:
            raise ConfigurationError(
                "a database needs SQLAlchemy (and PostgreSQL psycopg): "
                "pip install '.[sql]' in tokenmill's folder, './api_client[sql]' for the light "
                "client"
            ) from error
        self.sql = sqlalchemy
        self._may_create = isinstance(where, Path)
        self._is_closed = False
        self._errors = driver_errors
        if isinstance(where, Path):
            url = sqlalchemy.URL.create("sqlite", database=str(where.absolute()))
        else:
            url = _parsed(where)
        try:
            self._engine = engine.open_engine(
                url, pool_size=5, may_create=self._may_create, is_producer=True
            )
        except ImportError as error:
            raise ConfigurationError(f"the database's driver is not installed: {error}") from error

    @contextmanager
    def connection(self) -> Iterator[sqlalchemy.Connection]:
        """Open one transaction, which commits at the end. Errors of SQLAlchemy become
        TokenmillErrors: one sentence, without the statement.
        """
        pool = self._engine.pool
        try:
            try:
                with self._engine.begin() as connection:
                    yield connection
            finally:
                if self._is_closed:  # perhaps before the connection was back in this pool
                    pool.dispose()
        except self.sql.exc.SQLAlchemyError as error:
            words = self._errors.sentence_of(error)
            if "unable to open database file" in words or "there is no database at" in words:
                raise ConfigurationError(self._why_not_open()) from error
            if self._errors.lacks_schema(error):
                raise ConfigurationError(
                    f"the database lacks a table or a column of this version ({words}): "
                    "`tokenmill db upgrade`"
                ) from error
            if self._errors.is_misconfigured(error):
                raise ConfigurationError(f"the database cannot be used: {words}") from error
            raise QueueUnavailable(f"the database cannot be read: {words}") from error
        except UnicodeEncodeError as error:
            raise not_unicode(error) from error

    def _why_not_open(self) -> str:
        from tokenmill.sql.engine import file_exists

        path = Path(str(self._engine.url.database).removeprefix("file:")).absolute()
        if self._may_create:
            return f"the file {path} cannot be made: it needs a folder that this user may write to"
        if not file_exists(path):
            return f"there is no database at {path}"
        return (
            f"the database {path} cannot be opened: it must be a file, "
            "in a folder that this user may write to"
        )

    def has_table(self, name: str) -> bool:
        with self.connection() as connection:
            return bool(self.sql.inspect(connection).has_table(name))

    def close(self) -> None:
        """Close the connections: those in use when their transactions end."""
        self._is_closed = True
        self._engine.dispose()
