"""A server on the same machine is spoken to over a Unix socket: everything goes as by TCP, its
restart included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.worker import client_of, database_url, running_worker
from tokenmill import Client
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.local.valkey_server import ValkeyServer

pytestmark = pytest.mark.redis


@pytest.fixture
def server() -> Iterator[tuple[ValkeyServer, str]]:
    # a socket's path has at most a hundred characters
    with TemporaryDirectory(prefix="tokenmill-") as folder:
        path = Path(folder) / "server.sock"
        with ValkeyServer(settings={"unixsocket": str(path)}) as valkey:
            yield valkey, f"unix://{path}"


async def test_jobs_run_stream_and_are_cancelled_over_a_unix_socket(
    server: tuple[ValkeyServer, str], tmp_path: Path
) -> None:
    url, database = server[1], database_url(tmp_path)
    async with (
        running_worker(url, database, model="synthetic?step_ms=5"),
        client_of(url, database) as client,
    ):
        job = await client.submit(prompt="hello", max_tokens=40, ignore_eos=True)
        received = [token async for chunk in client.stream(job) for token in chunk.token_ids]
        result = await client.result(job)
        assert list(result.choices[0].token_ids) == received
        assert len(received) == 40
        endless = await client.submit(prompt="long", max_tokens=400, ignore_eos=True)
        stream = client.stream(endless)
        await anext(stream)
        assert await client.cancel(endless) == "cancelling"
        *_, last = [chunk async for chunk in stream]
        assert last.status is JobStatus.CANCELLED
    with Client(url, queue=client.queue, database=database) as threaded:
        assert threaded.status(job).status is JobStatus.SUCCEEDED


async def test_a_restart_of_a_server_on_a_unix_socket_loses_no_token(
    server: tuple[ValkeyServer, str], tmp_path: Path
) -> None:
    (valkey, url), database = server, database_url(tmp_path)
    async with (
        running_worker(url, database, model="synthetic?step_ms=10"),
        client_of(url, database) as client,
    ):
        job = await client.submit(prompt="hello", max_tokens=200, ignore_eos=True)
        received: list[int] = []
        async for chunk in client.stream(job):
            received += chunk.token_ids
            if len(received) == 50:
                await asyncio.to_thread(valkey.halt, 15)
                await asyncio.to_thread(valkey.start)
        result = await client.result(job)
        assert list(result.choices[0].token_ids) == received
        assert len(received) == 200
