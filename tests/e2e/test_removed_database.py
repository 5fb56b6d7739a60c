"""An SQLite file that is removed under a running worker: no result is written into nothing, and
none is lost.
"""

import asyncio
from pathlib import Path

import pytest
import sqlalchemy

from tests.chaos.test_dependencies_sql import health
from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.record import migrate

pytestmark = pytest.mark.redis


def recorded(database: str) -> list[str]:
    engine = sqlalchemy.create_engine(database)
    with engine.connect() as connection:
        found = [row.id for row in connection.execute(sqlalchemy.text("select id from jobs"))]
    engine.dispose()
    return found


async def test_results_wait_until_a_removed_database_is_restored(
    redis_url: str, tmp_path: Path
) -> None:
    database, port = database_url(tmp_path), free_port()
    async with (
        running_worker(redis_url, database, metrics_port=port) as worker,
        client_of(redis_url) as client,
    ):
        first = await client.submit(prompt="before", max_tokens=5)
        assert (await client.result(first, timeout=30)).status is JobStatus.SUCCEEDED
        for name in ("tokenmill.db", "tokenmill.db-wal", "tokenmill.db-shm"):
            await asyncio.to_thread((tmp_path / name).unlink, missing_ok=True)
        status, checks = await asyncio.to_thread(health, port)  # though nothing was written yet
        assert (status, f"there is no database at {tmp_path}/tokenmill.db" in checks["sql"]) == (
            503,
            True,
        )
        second = await client.submit(prompt="meanwhile", max_tokens=5)
        await until(lambda: worker._finalizer.stats.record_failures > 0)
        assert not (await client.status(second)).status.is_final, "reported before it was recorded"
        assert not (tmp_path / "tokenmill.db").exists(), "the worker made an empty one"
        migrate.upgrade(database)
        assert (await client.result(second, timeout=60)).status is JobStatus.SUCCEEDED
        assert (await asyncio.to_thread(health, port))[0] == 200
    assert recorded(database) == [second]
