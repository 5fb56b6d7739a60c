"""Connections whose session keeps a state after its cause is gone, and poolers that give each
transaction another session.
"""

import collections
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from tests.record.support import finished
from tests.support.postgres import PostgresServer
from tests.tasks.support import record
from tokenmill.errors import ConfigurationError, QueueUnavailable
from tokenmill.sql import SqlResults
from tokenmill.sql.engine import open_engine
from tokenmill.sql.webhooks import SqlWebhooks
from tokenmill_schemas.tables import usage_days
from tokenmill_worker.record.migrate import upgrade

postgres_only = pytest.mark.postgres


def write(engine: sa.Engine, number: int = 0) -> None:
    with engine.begin() as connection:
        day = f"2026-01-{number + 1:02}"
        row = usage_days.insert().values(day=day, rolled_ms=0, sealed=False)
        connection.execute(row)


@pytest.fixture
def engine(postgres_url: str) -> Iterator[sa.Engine]:
    upgrade(postgres_url)
    engine = open_engine(postgres_url)
    yield engine
    engine.dispose()


def name_of(url: str) -> str:
    return url.rsplit("/", 1)[1]


def test_create_engine_is_called_in_one_file_only() -> None:
    roots = [Path(__file__).parents[3] / name for name in ("api_client", "worker", "migrations")]
    files = [path for root in roots for path in root.rglob("*.py")]
    assert [path.name for path in files if "create_engine(" in path.read_text()] == ["engine.py"]


@postgres_only
@pytest.mark.parametrize(
    ("setting", "complains_of"),
    [
        ("default_transaction_read_only = on", "read-only transaction"),
        ("search_path = pg_catalog", "does not exist"),
        ("role = pg_monitor", "permission denied"),
    ],
)
def test_a_session_that_keeps_a_setting_is_replaced_after_its_first_failure(
    engine: sa.Engine, postgres: PostgresServer, postgres_url: str, setting: str, complains_of: str
) -> None:
    name = name_of(postgres_url)
    postgres.execute(f'ALTER DATABASE "{name}" SET {setting}')
    both = [engine.connect(), engine.connect()]  # two sessions with the setting, both in the pool
    for connection in both:
        connection.close()
    postgres.execute(f'ALTER DATABASE "{name}" RESET ALL')
    with pytest.raises(sa.exc.DBAPIError, match=complains_of):
        write(engine)
    for number in range(3):  # the other session of the pool is not used either
        write(engine, number)


@postgres_only
def test_a_read_only_session_is_replaced_after_a_failed_write(
    postgres: PostgresServer, postgres_url: str
) -> None:
    upgrade(postgres_url)
    name = name_of(postgres_url)
    postgres.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    webhooks = SqlWebhooks(postgres_url)
    with pytest.raises(QueueUnavailable, match="read-only"):
        webhooks.redrive()
    postgres.execute(f'ALTER DATABASE "{name}" RESET ALL')
    assert webhooks.redrive() == []
    webhooks.close()


@postgres_only
def test_a_connection_survives_the_fault_of_a_statement(engine: sa.Engine) -> None:
    """A row that is there already is no reason to connect again."""
    write(engine)
    with engine.connect() as connection:
        session = connection.scalar(sa.text("SELECT pg_backend_pid()"))
    with pytest.raises(sa.exc.IntegrityError):
        write(engine)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT pg_backend_pid()")) == session


def test_an_sqlite_connection_that_stayed_read_only_is_replaced(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/t.db"
    upgrade(url)
    engine = open_engine(url)
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = 1")
    with pytest.raises(sa.exc.OperationalError, match="readonly"):
        write(engine)
    write(engine)
    engine.dispose()


def test_a_failed_sqlite_connection_keeps_no_lock_while_its_error_is_referenced(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path}/t.db"
    upgrade(url)
    engine = open_engine(url)
    values = ", ".join(["(randomblob(4000))"] * 200)
    connection = engine.connect()
    connection.exec_driver_sql("CREATE TABLE large (data)")
    connection.exec_driver_sql("PRAGMA max_page_count = 1")
    with pytest.raises(sa.exc.OperationalError, match="full") as held:
        connection.exec_driver_sql(f"INSERT INTO large VALUES {values} RETURNING 1")
    connection.close()
    other = sqlite3.connect(tmp_path / "t.db", timeout=0.1)
    other.execute("CREATE TABLE small (data)")  # raises if the first transaction were open
    other.close()
    assert held.value.connection_invalidated
    engine.dispose()


@postgres_only
def test_results_are_read_through_a_pooler_in_transaction_mode(
    postgres_url: str, pooled_url: str
) -> None:
    upgrade(postgres_url)
    record(postgres_url, finished("a"))
    results = SqlResults(pooled_url)
    seen: collections.Counter[str] = collections.Counter()

    def read() -> None:
        for _ in range(20):
            try:
                seen[str(results.get("a") is not None)] += 1
                results.jobs(limit=2)
            except Exception as error:
                seen[f"{type(error).__name__}: {error}"] += 1

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.close()
    assert dict(seen) == {"True": 120}


@postgres_only
@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda url: url + "_", ConfigurationError, 'cannot be used: .*_" does not exist'),
        (
            lambda url: url.replace("tokenmill@", "nobody@"),
            ConfigurationError,
            'cannot be used: .*role "nobody" does not exist',
        ),
        (lambda url: url, ConfigurationError, 'lacks a table.*"jobs" does not exist'),
    ],
)
def test_only_a_missing_table_asks_for_an_upgrade(
    postgres_url: str, spoil: Callable[[str], str], error: type[Exception], says: str
) -> None:
    results = SqlResults(spoil(postgres_url))
    with pytest.raises(error, match=says) as caught:
        results.get("a")
    assert ("db upgrade" in str(caught.value)) == ("table" in says)
    results.close()


@postgres_only
def test_a_lost_prepared_statement_is_not_reported_as_a_missing_table(engine: sa.Engine) -> None:
    """A pooler answers so where a session has not prepared the statement."""
    results = SqlResults(engine.url.render_as_string(hide_password=False))
    with (
        pytest.raises(QueueUnavailable, match="cannot be read: prepared statement"),
        results._database.connection() as connection,
    ):
        connection.exec_driver_sql('EXECUTE "_pg3_0"')
    results.close()


@pytest.mark.parametrize("made_by", ["upgrade", "engine"])
def test_a_new_sqlite_file_and_its_log_are_readable_by_this_account_only(
    tmp_path: Path, made_by: str
) -> None:
    before = os.umask(0o022)
    try:
        url = f"sqlite:///{tmp_path}/t.db"
        if made_by == "upgrade":
            upgrade(url)
        engine = open_engine(url, may_create=True)
        with engine.connect() as connection:
            connection.exec_driver_sql("CREATE TABLE other (data)")
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        engine.dispose()
    finally:
        os.umask(before)
    assert modes == {"t.db": 0o600, "t.db-wal": 0o600, "t.db-shm": 0o600}


def test_an_sqlite_file_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    file = tmp_path / "t.db"
    file.touch()
    file.chmod(0o640)
    upgrade(f"sqlite:///{file}")
    assert file.stat().st_mode & 0o777 == 0o640


def test_an_sqlite_file_that_cannot_be_created_is_an_error_of_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    engine = open_engine(f"sqlite:///{tmp_path}/folder", may_create=True)
    with pytest.raises(sa.exc.OperationalError, match="unable to open database file"):
        engine.connect()


def test_a_producer_does_not_change_the_journal_mode(tmp_path: Path) -> None:
    file = tmp_path / "t.db"
    sqlite3.connect(file).execute("CREATE TABLE t (a)")
    engine: Any = open_engine(f"sqlite:///{file}", is_producer=True)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "delete"
    engine.dispose()
