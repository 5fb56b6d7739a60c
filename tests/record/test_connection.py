"""How the store is opened, and calls that have an end."""

import asyncio
import threading
import time

import pytest

from worker.errors import StoreUnavailable
from worker.record.connection import in_thread, normalised, open_engine


@pytest.mark.parametrize("url", ["postgres://u:p@h/db", "postgresql://u:p@h/db", "postgresql+psycopg://u:p@h/db"])
def test_every_spelling_of_postgresql_means_psycopg_3(url: str) -> None:
    assert normalised(url).drivername == "postgresql+psycopg"


def test_other_databases_are_refused() -> None:
    with pytest.raises(ValueError, match="SQLite or PostgreSQL"):
        open_engine("mssql+pyodbc://u:p@h/db")


def test_sqlite_is_durable_and_lets_readers_read(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 10_000
    engine.dispose()


async def test_a_call_that_takes_too_long_is_left_behind() -> None:
    answered = threading.Event()
    with pytest.raises(StoreUnavailable, match="did not answer within"):
        await in_thread(lambda: answered.wait(60), 0.05)
    answered.set()


async def test_a_cancellation_that_meets_the_answer_is_not_swallowed() -> None:
    task = asyncio.create_task(in_thread(lambda: 1, 5.0))
    await asyncio.sleep(0)
    time.sleep(0.1)  # noqa: ASYNC251 - the thread ends while the loop stands: its answer is queued
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_errors_come_back_to_the_caller() -> None:
    def fail() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        await in_thread(fail, 5.0)
