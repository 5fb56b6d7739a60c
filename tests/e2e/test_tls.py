"""TLS to Redis and PostgreSQL, in a whole worker and both clients; untrusted certificates."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

from tests.support.postgres import PostgresServer
from tests.support.tls import Authority, tls_front
from tests.support.worker import QUEUE, database_url, running_worker, settings, thread_host
from tokenmill import AsyncClient, Client
from tokenmill.errors import QueueUnavailable
from tokenmill.sql import SqlResults
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.app import Worker
from tokenmill_worker.record import migrate

pytestmark = pytest.mark.redis


@dataclass(frozen=True, slots=True)
class Front:
    port: int
    ours: Authority
    strange: Authority

    def url(self, authority: Authority, host: str = "127.0.0.1") -> str:
        return f"rediss://{host}:{self.port}/0?ssl_ca_certs={quote(str(authority.ca_file))}"


@pytest.fixture
async def front(redis_url: str, tmp_path: Path) -> AsyncIterator[Front]:
    ours, strange = Authority.found(tmp_path), Authority.found(tmp_path, "strange")
    port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    async with tls_front(port, ours.server_context()) as tls_port:
        yield Front(tls_port, ours, strange)
    gc.collect()


async def test_jobs_run_and_stream_over_tls_in_worker_and_clients(
    front: Front, tmp_path: Path
) -> None:
    url, database = front.url(front.ours), database_url(tmp_path)

    def threaded() -> str:
        with Client(url, queue=QUEUE) as client:
            job = client.submit(prompt="hello", max_tokens=12, ignore_eos=True)
            received = "".join(chunk.text for chunk in client.stream(job))
            assert received == client.result(job, timeout=60).text
            return received

    async with (
        running_worker(url, database),
        AsyncClient(url, queue=QUEUE, database=database) as client,
    ):
        job = await client.submit(prompt="hello", max_tokens=12, ignore_eos=True)
        received = "".join([chunk.text async for chunk in client.stream(job)])
        assert received == (await client.result(job, timeout=60)).text
        assert len(await asyncio.to_thread(threaded)) > 0
        async with AsyncClient(f"redis://127.0.0.1:{front.port}/0", queue=QUEUE) as plain:
            with pytest.raises(QueueUnavailable):  # that port speaks nothing but TLS
                await plain.submit(prompt="plain")


async def test_a_certificate_of_another_authority_is_refused(front: Front) -> None:
    url = front.url(front.strange)
    async with AsyncClient(url, queue=QUEUE) as client:
        with pytest.raises(QueueUnavailable, match="certificate verify failed"):
            await client.submit(prompt="x")
    with (
        Client(url, queue=QUEUE) as threaded,
        pytest.raises(QueueUnavailable, match="certificate verify failed"),
    ):
        await asyncio.to_thread(threaded.submit, prompt="x")


async def test_a_certificate_for_another_host_is_refused(redis_url: str, tmp_path: Path) -> None:
    ours = Authority.found(tmp_path)
    port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    async with tls_front(port, ours.server_context("redis.example")) as tls_port:
        url = f"rediss://127.0.0.1:{tls_port}/0?ssl_ca_certs={ours.ca_file}"
        async with AsyncClient(url, queue=QUEUE) as client:
            with pytest.raises(QueueUnavailable, match="certificate"):
                await client.submit(prompt="x")


async def test_a_worker_logs_an_untrusted_certificate_while_it_waits_to_start(
    front: Front, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings(front.url(front.strange), database_url(tmp_path))
    worker = Worker(chosen, thread_host(chosen.engine_config()))
    with caplog.at_level(logging.WARNING):
        serving = asyncio.create_task(worker.serve())
        async with asyncio.timeout(60):
            while "certificate verify failed" not in caplog.text:  # noqa: ASYNC110 - a log has no event
                await asyncio.sleep(0.05)
    assert not worker.ready.is_set()
    worker.drain()
    assert await serving == 0


# ── PostgreSQL ──


@pytest.fixture
def guarded_postgres(tmp_path: Path) -> Iterator[tuple[PostgresServer, Authority, Authority]]:
    """Yield a server with our authority's certificate, and an authority that did not sign it."""
    server, ours, strange = (
        PostgresServer(),
        Authority.found(tmp_path),
        Authority.found(tmp_path, "strange"),
    )
    certificate = ours.ca.issue_cert("127.0.0.1")
    files = {
        "ssl_cert_file": server.directory / "server.pem",
        "ssl_key_file": server.directory / "server.key",
    }
    certificate.cert_chain_pems[0].write_to_path(str(files["ssl_cert_file"]))
    certificate.private_key_pem.write_to_path(str(files["ssl_key_file"]))
    owner = server.uid
    for path in files.values():
        path.chmod(0o600)
        if owner is not None:
            os.chown(path, owner, owner)
    server.settings |= {"ssl": "on"} | {name: str(path) for name, path in files.items()}
    try:
        yield server.start(), ours, strange
    finally:
        server.stop()
        shutil.rmtree(server.directory, ignore_errors=True)


def verified(url: str, authority: Authority) -> str:
    return f"{url}?sslmode=verify-ca&sslrootcert={authority.ca_file}"


@pytest.mark.postgres
async def test_results_are_recorded_in_postgres_over_tls(
    guarded_postgres: tuple[PostgresServer, Authority, Authority], redis_url: str
) -> None:
    server, ours, strange = guarded_postgres
    plain = server.create_database()
    database = verified(plain, ours)
    migrate.upgrade(database)
    with pytest.raises(Exception, match="certificate verify failed"):
        migrate.upgrade(verified(plain, strange))
    async with (
        running_worker(redis_url, database),
        AsyncClient(redis_url, queue=QUEUE, database=database) as client,
    ):
        job = await client.submit(prompt="hello", max_tokens=12, ignore_eos=True)
        result = await client.result(job, timeout=60)
        encrypted = await asyncio.to_thread(connections_of_ours, plain)
    assert result.status is JobStatus.SUCCEEDED
    assert encrypted
    assert all(encrypted), "a connection of ours is not encrypted"
    results = SqlResults(database)
    found = results.get(job)
    results.close()
    assert found is not None
    assert found.text == result.text
    gc.collect()


def connections_of_ours(url: str) -> list[bool]:
    query = (
        "select ssl from pg_stat_ssl join pg_stat_activity using (pid) where application_name "
        "like 'tokenmill%'"
    )
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        return [bool(row[0]) for row in connection.execute(query).fetchall()]
