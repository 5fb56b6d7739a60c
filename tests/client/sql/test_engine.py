"""Connections to an SQLite file while others open it."""

import sqlite3
from pathlib import Path
from typing import Any, Self

import pytest

from tokenmill.sql.engine import open_engine


class BusyAtFirst(sqlite3.Connection):
    """Refuses the first changes of the journal mode, as SQLite does while another makes one."""

    refusals = 0

    def cursor(self, *arguments: Any) -> Any:
        return super().cursor(BusyCursor)


class BusyCursor(sqlite3.Cursor):
    def execute(self, statement: str, *arguments: Any) -> Self:
        if "journal_mode" in statement and BusyAtFirst.refusals:
            BusyAtFirst.refusals -= 1
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = sqlite3.SQLITE_BUSY
            raise error
        return super().execute(statement, *arguments)


def test_opening_waits_while_another_connection_changes_the_journal_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *args, **kwargs: connect(*args, factory=BusyAtFirst, **kwargs)
    )
    BusyAtFirst.refusals = 2
    engine = open_engine(f"sqlite:///{tmp_path}/new.db", may_create=True)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()
    assert BusyAtFirst.refusals == 0
