"""Each test of the record runs on both databases, freshly migrated."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tokenmill_worker.record import ResultStore
from tokenmill_worker.record.migrate import upgrade


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        (tmp_path / "tokenmill.db").touch()
        return f"sqlite:///{tmp_path}/tokenmill.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def url(empty_url: str) -> str:
    upgrade(empty_url)
    return empty_url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path}/tokenmill.db"
    upgrade(url)
    return url


@pytest.fixture
async def store(url: str) -> AsyncIterator[ResultStore]:
    store = ResultStore(url, queue="q")
    yield store
    await store.close()
