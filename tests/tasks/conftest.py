"""Each test of the tasks' SQL runs on both databases, freshly migrated."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.support.databases import migrated_sqlite
from tokenmill.sql.engine import open_engine
from tokenmill_worker.record import ResultStore


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return migrated_sqlite(tmp_path / "t.db")
    return str(request.getfixturevalue("migrated_postgres_url"))


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    engine = open_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return migrated_sqlite(tmp_path / "t.db")


@pytest.fixture
async def store(url: str) -> AsyncIterator[ResultStore]:
    store = ResultStore(url, queue="q")
    yield store
    await store.close()
