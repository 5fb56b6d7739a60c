"""Tests of opening the store, and of calls with a time limit."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator

import pytest

from tests.support.waiting import until
from tokenmill.sql.driver_errors import is_misconfigured
from tokenmill.sql.engine import open_engine, parse_database_url
from tokenmill_worker.errors import StoreUnavailable
from tokenmill_worker.record.threads import BlockingCalls


@pytest.mark.parametrize(
    "url", ["postgres://u:p@h/db", "postgresql://u:p@h/db", "postgresql+psycopg://u:p@h/db"]
)
def test_every_spelling_of_a_postgresql_url_uses_psycopg_3(url: str) -> None:
    assert parse_database_url(url).drivername == "postgresql+psycopg"


def test_other_databases_are_refused() -> None:
    with pytest.raises(ValueError, match="SQLite or PostgreSQL"):
        open_engine("mssql+pyodbc://u:p@h/db")


def test_sqlite_is_durable_and_readable_during_writes(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 10_000
    engine.dispose()


@pytest.mark.parametrize(
    ("words", "is_final"),
    [
        ('FATAL:  password authentication failed for user "tm"', True),
        ('FATAL:  database "tokenmil" does not exist', True),
        ('FATAL:  role "nobody" does not exist', True),
        ("FATAL:  the database system is starting up", False),
        ("connection refused", False),
    ],
)
def test_an_error_that_retries_cannot_repair_is_recognised(words: str, is_final: bool) -> None:
    assert is_misconfigured(OSError(words)) is is_final


def num_threads() -> int:
    return sum(thread.name == "sql" for thread in threading.enumerate())


@pytest.fixture
async def threads() -> AsyncIterator[BlockingCalls]:
    """Yield a pool, and check afterwards that no thread is left."""
    before, made = num_threads(), BlockingCalls()
    yield made
    made.close()
    await until(lambda: num_threads() == before)


async def test_consecutive_calls_share_one_thread(threads: BlockingCalls) -> None:
    served = {await threads.run(threading.get_ident, 5.0) for _ in range(20)}
    assert len(served) == 1
    both = threading.Barrier(2)  # a call that waits for the other has a thread of its own
    await asyncio.gather(*(threads.run(lambda: both.wait(30), 60.0) for _ in range(2)))


async def test_a_call_that_takes_too_long_is_abandoned(threads: BlockingCalls) -> None:
    answered, before = threading.Event(), num_threads()
    with pytest.raises(StoreUnavailable, match="did not answer within"):
        await threads.run(lambda: answered.wait(60), 0.05)
    assert await threads.run(lambda: 2, 5.0) == 2
    assert num_threads() == before + 2
    answered.set()
    await until(lambda: num_threads() == before + 1)


async def test_a_cancellation_that_arrives_with_the_reply_is_raised(
    threads: BlockingCalls,
) -> None:
    task = asyncio.create_task(threads.run(lambda: 1, 5.0))
    await asyncio.sleep(0)
    time.sleep(0.1)  # noqa: ASYNC251 - the thread ends while the loop stands: its answer is queued
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_in_a_thread_is_raised_to_the_caller(threads: BlockingCalls) -> None:
    def fail() -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        await threads.run(fail, 5.0)
    assert await threads.run(lambda: 2, 5.0) == 2
