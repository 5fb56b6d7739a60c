"""Each test of the record runs on both databases, freshly migrated."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.databases import migrated_sqlite
from tokenmill_worker.record import ResultStore

DATABASES = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=DATABASES)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        (tmp_path / "tokenmill.db").touch()
        return f"sqlite:///{tmp_path}/tokenmill.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture(params=DATABASES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return migrated_sqlite(tmp_path / "tokenmill.db")
    return str(request.getfixturevalue("migrated_postgres_url"))


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return migrated_sqlite(tmp_path / "tokenmill.db")


@pytest.fixture
async def store(url: str) -> AsyncIterator[ResultStore]:
    store = ResultStore(url, queue="q")
    yield store
    await store.close()
