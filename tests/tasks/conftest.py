"""Each test of the tasks' SQL runs on both databases, freshly migrated."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tokenmill.sql.engine import open_engine
from tokenmill_worker.record import ResultStore
from tokenmill_worker.record.migrate import upgrade


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    url = (
        f"sqlite:///{tmp_path}/t.db"
        if request.param == "sqlite"
        else str(request.getfixturevalue("postgres_url"))
    )
    upgrade(url)
    return url


@pytest.fixture
def engine(url: str) -> Iterator[sa.Engine]:
    engine = open_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/t.db"
    upgrade(url)
    return url


@pytest.fixture
async def store(url: str) -> AsyncIterator[ResultStore]:
    store = ResultStore(url, queue="q")
    yield store
    await store.close()
