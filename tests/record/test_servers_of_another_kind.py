"""PostgreSQL that a worker cannot write to for a while, and databases that it can never use."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.record.support import FakeRedis, counts, finished
from tests.support.postgres import PostgresServer
from tests.support.waiting import until
from tokenmill.sql.engine import open_engine
from tokenmill.transport.backoff import Backoff
from tokenmill_worker.errors import StoreUnavailable
from tokenmill_worker.local.doctor import examine
from tokenmill_worker.local.findings import Finding
from tokenmill_worker.record import Finalizer, FinalizerLimits, ResultStore
from tokenmill_worker.record.migrate import upgrade
from tokenmill_worker.settings import load_settings

pytestmark = pytest.mark.postgres
FAST = FinalizerLimits(record_backoff=Backoff(first_s=0.02, longest_s=0.2))
ENDS_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'"


async def test_jobs_are_recorded_once_a_read_only_server_is_writable(
    postgres: PostgresServer, postgres_url: str
) -> None:
    """New sessions are read-only after a switchover, and then the server takes it back."""
    await asyncio.to_thread(upgrade, postgres_url)
    name = postgres_url.rsplit("/", 1)[1]
    redis = FakeRedis()
    finalizer = Finalizer(ResultStore(postgres_url, queue="q"), redis, FAST)
    task = asyncio.create_task(finalizer.run())
    await finalizer.submit(finished("before"))
    await finalizer.drain(30)
    assert finalizer.held_ids == []
    postgres.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    postgres.execute(ENDS_SESSIONS.format(name))
    for number in range(20):
        await finalizer.submit(finished(f"job-{number}"))
    await until(lambda: "read-only" in finalizer.stats.last_error)
    postgres.execute(f'ALTER DATABASE "{name}" RESET ALL')
    await finalizer.submit(finished("after"))
    await finalizer.drain(30)
    assert finalizer.held_ids == []
    task.cancel()
    await finalizer._store.close()  # type: ignore[attr-defined]
    assert len(redis.done) == 22
    assert counts(postgres_url) == (22, 22, 22, 22)


async def test_jobs_wait_on_a_standby_until_it_is_promoted(own_postgres: PostgresServer) -> None:
    database = own_postgres.create_database()
    await asyncio.to_thread(upgrade, database)
    standby = await asyncio.to_thread(PostgresServer(standby_of=own_postgres).start)
    url = standby.url(database.rsplit("/", 1)[1])
    store, redis = ResultStore(url, queue="q"), FakeRedis()
    finalizer = Finalizer(store, redis, FAST)
    task = asyncio.create_task(finalizer.run())
    try:
        for number in range(5):
            await finalizer.submit(finished(f"job-{number}"))
        await until(lambda: "read-only" in finalizer.stats.last_error)
        await asyncio.to_thread(own_postgres.halt)
        await asyncio.to_thread(standby.promote)
        await finalizer.drain(60)
        assert finalizer.held_ids == []
        assert counts(url) == (5, 5, 5, 5)
    finally:
        task.cancel()
        await store.close()
        await asyncio.to_thread(standby.stop)


async def test_jobs_are_recorded_through_a_pooler_in_transaction_mode(
    postgres_url: str, pooled_url: str
) -> None:
    await asyncio.to_thread(upgrade, postgres_url)
    stores = [ResultStore(pooled_url, queue="q") for _ in range(4)]
    for number in range(5):
        await asyncio.gather(
            *(store.record([finished(f"{n}-{number}")]) for n, store in enumerate(stores))
        )
    assert set(await stores[0].find(["0-0", "3-4"])) == {"0-0", "3-4"}
    for store in stores:
        await store.close()
    assert counts(postgres_url) == (20, 20, 20, 20)


def test_the_pause_before_a_retry_is_at_most_two_seconds() -> None:
    backoff = FinalizerLimits().record_backoff
    assert max(backoff.delay_s(failures) for failures in range(1, 40)) <= 2.0


@pytest.fixture(params=["LATIN1", "SQL_ASCII"])
def other_encoding(request: pytest.FixtureRequest, postgres: PostgresServer) -> Iterator[str]:
    url = postgres.create_database(
        f"ENCODING '{request.param}' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
    )
    yield url
    postgres.drop_database(url)


@pytest.mark.parametrize("other_encoding", ["SQL_ASCII"], indirect=True)
@pytest.mark.parametrize("command", [("db", "upgrade"), ("worker",), ("tasks",), ("usage",)])
def test_a_database_that_is_not_utf8_is_refused_in_one_sentence(
    other_encoding: str, redis_url: str, command: tuple[str, ...]
) -> None:
    environment = {
        **os.environ,  # noqa: TID251 - for a child process
        "TOKENMILL_DATABASE_URL": other_encoding,
        "TOKENMILL_REDIS_URL": redis_url,
        "TOKENMILL_MODEL": "synthetic",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill.cli", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert done.returncode == 1
    assert "which cannot store every text: make it with ENCODING 'UTF8'" in complaint
    assert "Traceback" not in done.stderr


def test_a_database_that_is_not_utf8_is_an_error_of_doctor(other_encoding: str) -> None:
    settings = load_settings({"database_url": other_encoding, "redis_url": "redis://127.0.0.1:1/0"})
    (found,) = [item for item in examine(settings, servers_only=True) if item.subject == "sql"]
    assert isinstance(found, Finding)
    assert found.severity == "error"
    assert "ENCODING 'UTF8'" in found.words
    assert "TEMPLATE template0" in found.hint


async def test_a_database_that_is_not_utf8_is_a_misconfiguration(other_encoding: str) -> None:
    store = ResultStore(other_encoding, queue="q")
    with pytest.raises(StoreUnavailable) as caught:
        await store.check()
    assert caught.value.is_misconfigured
    with pytest.raises(StoreUnavailable, match="ENCODING 'UTF8'"):  # and no row is the reason
        await store.record([finished("a")])
    await store.close()


def test_text_is_stored_as_utf8_under_any_client_encoding(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    engine = open_engine(postgres_url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT %s::text", ("🦊",)).scalar() == "🦊"
    engine.dispose()
