"""Real databases, killed processes: a job's rows exist exactly once, before it is acknowledged."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, event, exc

from tests.record.support import FakeRedis, counts, finished
from tests.support.postgres import PostgresServer
from tests.support.waiting import until
from tokenmill.sql.engine import open_engine
from tokenmill.transport.backoff import Backoff
from tokenmill_worker.errors import StoreUnavailable
from tokenmill_worker.record import Finalizer, FinalizerLimits, ResultStore
from tokenmill_worker.record.migrate import upgrade

FAST = FinalizerLimits(record_backoff=Backoff(first_s=0.02, longest_s=0.2))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before-commit", "after-commit", "after-acknowledge"])
def test_a_worker_killed_at_any_moment_leaves_each_row_once(
    url: str, tmp_path: Path, moment: str
) -> None:
    acknowledged = tmp_path / "acknowledged"
    acknowledged.touch()

    def run(when: str) -> int:
        command = [sys.executable, "-m", "tests.record.killed", url, str(acknowledged), when]
        return subprocess.run(command, timeout=60, check=False).returncode

    assert run(moment) == -signal.SIGKILL
    known = set(acknowledged.read_text().split())
    there = counts(url)[0]
    assert len(known) <= there, "acknowledged before it was recorded"
    assert there == {"before-commit": 0, "after-commit": there, "after-acknowledge": there}[moment]
    assert (moment == "before-commit") == (there == 0)
    assert run("never") == 0  # the redelivery
    assert counts(url) == (10, 10, 10, 10)
    assert set(acknowledged.read_text().split()) == {f"job-{number}" for number in range(10)}


async def _finish_all(
    store: ResultStore, count: int, while_running: Any = None
) -> tuple[Finalizer, FakeRedis]:
    redis = FakeRedis()
    finalizer = Finalizer(store, redis, FAST)
    task = asyncio.create_task(finalizer.run())
    for number in range(count):
        await finalizer.submit(finished(f"job-{number}"))
    try:
        if while_running is not None:
            await while_running(finalizer, redis)
        await finalizer.drain(30)
        assert finalizer.held_ids == []
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.close()
    return finalizer, redis


@pytest.mark.postgres
@pytest.mark.parametrize("crash", [False, True])
async def test_jobs_are_recorded_after_postgres_was_stopped(
    own_postgres: PostgresServer, crash: bool
) -> None:
    url = own_postgres.create_database()
    upgrade(url)
    store = ResultStore(url, queue="q")
    await store.record([finished("before")])
    await asyncio.to_thread(own_postgres.halt, signal.SIGQUIT if crash else signal.SIGINT)

    async def repair(finalizer: Finalizer, redis: FakeRedis) -> None:
        await until(lambda: finalizer.stats.record_failures >= 2)
        assert "password" not in finalizer.stats.last_error
        assert not redis.done
        await asyncio.to_thread(own_postgres.start)

    _, redis = await _finish_all(store, 50, repair)
    assert len(redis.done) == 50
    assert counts(url) == (51, 51, 51, 51)


def freeze(server: PostgresServer, number: int) -> None:
    """Send SIGSTOP or SIGCONT to every process of the server."""
    main = int((server.data_directory / "postmaster.pid").read_text().split()[0])
    children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
    for process in (main, *map(int, children)):
        os.kill(process, number)


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
async def test_a_frozen_postgres_leads_to_a_timeout_and_a_retry(
    own_postgres: PostgresServer,
) -> None:
    url = own_postgres.create_database()
    upgrade(url)
    others = set(threading.enumerate())
    store = ResultStore(url, queue="q", answer_timeout_s=2.0)
    await store.record([finished("before")])
    freeze(own_postgres, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable, match="did not answer within"):
        await store.record([finished("during")])
    freeze(own_postgres, signal.SIGCONT)
    for thread in set(threading.enumerate()) - others:
        if thread.name == "sql":  # the abandoned call comes back and returns its connection
            await asyncio.to_thread(thread.join, 60)
    await store.close()
    store = ResultStore(url, queue="q")
    report = await store.record([finished("during")])  # perhaps the late commit came through
    assert report.written | set(report.existing) == {"during"}
    _, redis = await _finish_all(store, 5)
    assert counts(url) == (7, 7, 7, 7)
    assert len(redis.done) == 5


@pytest.mark.postgres
async def test_the_victim_of_a_deadlock_is_retried(postgres_url: str) -> None:
    upgrade(postgres_url)
    columns = (
        "id, queue, model, tenant, priority, state, attempts, worker_id, created_ms, "
        "started_ms, finished_ms"
    )
    statement = (
        f"INSERT INTO jobs ({columns}) VALUES (%s, 'q', 'm', 'other', 'bulk', 'failed', "
        "1, 'w', 0, 0, 0)"
    )
    other = await psycopg.AsyncConnection.connect(postgres_url.replace("+psycopg", ""))
    # so that the store's side notices first, and is the victim
    await other.execute("SET deadlock_timeout = '60s'")
    await other.execute(statement, ["job-5"])

    async def cross(finalizer: Finalizer, _redis: FakeRedis) -> None:
        async def holds_the_first_and_waits() -> bool:
            return (
                await (await other.execute("SELECT 1 FROM pg_locks WHERE NOT granted")).fetchone()
                is not None
            )

        await until(holds_the_first_and_waits)  # for job-5
        await asyncio.wait_for(other.execute(statement, ["job-0"]), 60)
        await until(lambda: "deadlock" in finalizer.stats.last_error)
        await other.rollback()

    try:
        _, redis = await _finish_all(ResultStore(postgres_url, queue="q"), 10, cross)
    finally:
        await other.close()
    assert len(redis.done) == 10
    assert counts(postgres_url) == (10, 10, 10, 10)


async def test_jobs_wait_while_the_disk_of_sqlite_is_full(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)
    limits = [30]

    @event.listens_for(engine, "begin")
    def full(connection: Any) -> None:
        # SQLite's own "disk is full"
        connection.exec_driver_sql(f"PRAGMA max_page_count = {limits[0]}")

    async def make_room(finalizer: Finalizer, redis: FakeRedis) -> None:
        await until(lambda: "full" in finalizer.stats.last_error)
        assert len(redis.done) == counts(sqlite_url)[0] < 400
        limits[0] = 100_000

    _, redis = await _finish_all(ResultStore(sqlite_url, queue="q", engine=engine), 400, make_room)
    assert len(redis.done) == 400
    assert counts(sqlite_url) == (400, 400, 400, 400)


async def test_jobs_wait_while_sqlite_is_locked(sqlite_url: str) -> None:
    engine = open_engine(sqlite_url)

    @event.listens_for(engine, "begin")
    def impatient(connection: Any) -> None:
        connection.exec_driver_sql("PRAGMA busy_timeout = 20")

    holder = open_engine(sqlite_url)
    lock = holder.connect()
    lock.exec_driver_sql("BEGIN EXCLUSIVE")

    async def unlock(finalizer: Finalizer, _redis: FakeRedis) -> None:
        await until(lambda: "locked" in finalizer.stats.last_error)
        lock.rollback()
        lock.close()

    _, redis = await _finish_all(ResultStore(sqlite_url, queue="q", engine=engine), 5, unlock)
    holder.dispose()
    assert len(redis.done) == 5


class _DriverError(Exception):
    def __init__(self, sqlstate: str) -> None:
        super().__init__(f"could not extend file: {sqlstate}")
        self.sqlstate = sqlstate


@pytest.mark.parametrize(
    "sqlstate", ["53100", "40001", "25006", "57P01", "08006", "55P03", "53300"]
)
async def test_a_group_refused_with_a_transient_error_is_retried_as_a_whole(
    sqlite_url: str, sqlstate: str
) -> None:
    """PostgreSQL's codes for: disk full, serialization, read-only, shutdown, connection, lock, too
    many clients.
    """
    engine: Engine = open_engine(sqlite_url)
    tries = []

    @event.listens_for(engine, "before_cursor_execute")
    def fail(_connection: Any, _cursor: Any, statement: str, *_rest: Any) -> None:
        if "INSERT INTO usage" in statement:
            tries.append(1)
            if len(tries) <= 3:
                raise exc.OperationalError(statement, None, _DriverError(sqlstate))

    finalizer, redis = await _finish_all(ResultStore(sqlite_url, queue="q", engine=engine), 8)
    assert finalizer.stats.record_failures == 3
    assert len(redis.done) == 8
    assert counts(sqlite_url) == (8, 8, 8, 8)


async def test_jobs_wait_for_missing_tables_and_the_log_names_the_command(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    url = f"sqlite:///{path}"
    store = ResultStore(url, queue="q")
    with pytest.raises(StoreUnavailable, match=f"there is no database at {path}"):
        await store.record([finished("a")])
    await asyncio.to_thread(path.touch)
    with pytest.raises(StoreUnavailable, match="run `tokenmill db upgrade`"):
        await store.record([finished("a")])
    upgrade(url)
    assert (await store.record([finished("a")])).written == {"a"}
    await store.close()
