"""A database closes all of its connections."""

import sqlite3
from pathlib import Path

import pytest

from tokenmill.errors import QueueUnavailable
from tokenmill.sql.database import Database


@pytest.mark.parametrize("statement", ["SELECT 1", "SELECT nothing"])
def test_a_connection_in_use_at_the_close_is_closed_after_its_transaction(
    statement: str, tmp_path: Path
) -> None:
    database = Database(tmp_path / "t.db")
    held: list[sqlite3.Connection] = []
    try:
        with database.connection() as connection:
            held.append(connection.connection.dbapi_connection)  # type: ignore[arg-type]
            database.close()
            connection.execute(database.sql.text(statement))
    except QueueUnavailable:
        assert statement == "SELECT nothing"
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        held[0].execute("SELECT 1")
