"""Fixtures of the commands' tests: a database with two ended jobs, a shell, a client."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.cli.support import Shell
from tests.record.support import failed, finished
from tests.support.databases import migrated_sqlite
from tokenmill import Client
from tokenmill_worker.record import ResultStore


@pytest.fixture
def database(tmp_path: Path) -> str:
    url = migrated_sqlite(tmp_path / "t.db")

    async def fill() -> None:
        store = ResultStore(url, queue="q")
        await store.record([finished("good"), failed("bad", "the prompt is too long")])
        await store.close()

    asyncio.run(fill())
    return url


@pytest.fixture
def shell(redis_url: str, database: str, allowed_keys: list[str]) -> Shell:
    allowed_keys.append("tm:{q}:*")  # no worker runs: submitted jobs stay
    return Shell(redis_url, database)


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    with Client(redis_url, queue="q") as client:
        yield client
