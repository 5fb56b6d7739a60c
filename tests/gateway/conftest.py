"""A gateway on a port of its own, in the test's event loop, before a real queue and database."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.support.worker import QUEUE, database_url, running_worker
from tokenmill_gateway.keys import KeyStore
from tokenmill_gateway.run import GatewaySettings, serve

MODEL = "synthetic"
SLOW = "synthetic?step_ms=20"


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway: where it is, and what it stands before."""

    url: str
    redis_url: str
    database: str

    def client(self, key: str = "none", **options: Any) -> Any:
        """Return OpenAI's client, which refuses answers and events that its types do not fit."""
        return AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=key,
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=False),  # else it reads all authorities
            _strict_response_validation=True,
            **options,
        )


@contextlib.asynccontextmanager
async def running_gateway(
    redis_url: str, database: str, *, is_open: bool = True, **changes: Any
) -> AsyncIterator[Gateway]:
    """Run a gateway inside the block, and end it after it."""
    # named, so that asyncio sends small answers at once
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    values: dict[str, Any] = {
        "redis_url": redis_url, "database_url": database, "key_prefix": "tm:",
        "models": {MODEL: QUEUE}, "host": "127.0.0.1", "port": 0, "is_open": is_open,
        "key_secret": "secret", "answer_s": 60.0, "drain_s": 5.0,
    }  # fmt: skip
    ending = asyncio.Event()
    task = asyncio.create_task(serve(GatewaySettings(**values | changes), listener, ending))
    try:
        yield Gateway(f"http://127.0.0.1:{listener.getsockname()[1]}", redis_url, database)
    finally:
        ending.set()
        await asyncio.wait_for(task, 60)
        listener.close()


@pytest.fixture
def database(tmp_path: Path) -> str:
    return database_url(tmp_path)


@pytest.fixture
async def gateway(redis_url: str, database: str) -> AsyncIterator[Gateway]:
    """A gateway that asks for no key, and a worker behind it."""
    async with (
        running_worker(redis_url, database),
        running_gateway(redis_url, database) as gateway,
    ):
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with gateway.client() as client:
        yield client


def new_key(database: str, tenant: str, **more: Any) -> str:
    store = KeyStore(database, "secret")
    try:
        return store.create(tenant, **more)[1]
    finally:
        store.close()
