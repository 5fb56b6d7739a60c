"""Fixtures of the batch tests: stores of batches, and a client on a real queue."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.bulk.support import BulkSetup
from tests.support.databases import migrated_sqlite
from tokenmill import Client
from tokenmill.bulk import BatchStore, open_store


@pytest.fixture
def database(tmp_path: Path) -> str:
    return migrated_sqlite(tmp_path / "tokenmill.db")


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    """Yield a client without a database."""
    with Client(redis_url, queue="q") as client:
        yield client


@pytest.fixture(
    params=["a file of its own", "sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]
)
def any_client(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Client]:
    """Yield a client that keeps its batches in a file beside an output, SQLite or PostgreSQL."""
    url = None
    if request.param == "sqlite":
        url = request.getfixturevalue("database")
    elif request.param == "postgres":
        url = request.getfixturevalue("migrated_postgres_url")
    with Client(redis_url, queue="q", database=url) as client:
        yield client


@pytest.fixture
def store(any_client: Client, tmp_path: Path) -> Iterator[BatchStore]:
    store = open_store(any_client, tmp_path / "out?.jsonl")
    yield store
    store.close()


@pytest.fixture(params=["with a database", "without"])
def setup(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str, database: str
) -> BulkSetup:
    return BulkSetup(tmp_path, redis_url, database if request.param == "with a database" else None)
