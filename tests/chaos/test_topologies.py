"""Redis Cluster and Sentinel under a whole worker and both clients.

Every call works, a failover in the middle of an answer leaves no gap, and no connection is left
open (that would be a ResourceWarning, an error here).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checker import Received
from tests.chaos.clients import listen
from tests.support.topologies import SentinelGroup, ValkeyCluster
from tests.support.worker import database_url, running_worker
from tokenmill import AsyncClient, Client
from tokenmill.errors import QueueUnavailable
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.local.valkey_server import free_port

pytestmark = [pytest.mark.redis, pytest.mark.chaos]

SLOW_MODEL = "synthetic?step_ms=8"
LONG: dict[str, Any] = {"prompt": "go on", "max_tokens": 300, "ignore_eos": True, "seed": 7}


@pytest.fixture(autouse=True)
def no_connection_is_forgotten() -> Iterator[None]:
    yield
    gc.collect()


@contextlib.asynccontextmanager
async def serving(
    url: str, folder: Path, queue: str, model: str = SLOW_MODEL
) -> AsyncIterator[AsyncClient]:
    """Yield a worker and a client of one queue."""
    database = database_url(folder)
    lease: dict[str, Any] = {"lease_seconds": 1.0}
    async with (
        running_worker(url, database, queue=queue, model=model, **lease),
        AsyncClient(url, queue=queue, database=database) as client,
    ):
        yield client


def use_every_call(url: str, queue: str) -> None:
    """Use every call of the threaded client while a worker serves."""
    with Client(url, queue=queue) as client:
        job = client.submit(
            prompt="hello", max_tokens=20, ignore_eos=True, tenant="t", idempotency_key="k"
        )
        assert (
            client.submit(
                prompt="hello", max_tokens=20, ignore_eos=True, tenant="t", idempotency_key="k"
            )
            == job
        )
        chunks = list(client.stream(job))
        result = client.result(job, timeout=60)
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert sum(len(chunk.token_ids) for chunk in chunks) == 20
        later = client.submit(prompt="later", max_tokens=5, not_before=3_600 + 1e10)
        assert client.cancel(later) == "cancelled"
        assert client.status(job).status is JobStatus.SUCCEEDED
        running = client.submit(**{**LONG, "max_tokens": 4_000})
        for chunk in client.stream(running):
            if chunk.end > 3:
                client.cancel(running)
        assert client.result(running, timeout=60).status is JobStatus.CANCELLED
        assert [worker.worker_id for worker in client.workers()]
        assert client.depth().num_queued == 0
        assert client.list() == []


async def use_every_call_async(client: AsyncClient) -> None:
    jobs = await client.submit_many(
        [{"prompt": f"{n}", "max_tokens": 10, "ignore_eos": True} for n in range(20)]
    )
    received = [Received() for _ in jobs]
    await asyncio.gather(
        *(listen(client, job, collected) for job, collected in zip(jobs, received, strict=True))
    )
    for job, collected in zip(jobs, received, strict=True):
        result = await client.result(job, timeout=60)
        assert (result.text, result.token_ids) == (collected.text, tuple(collected.token_ids))
        assert collected.problems == []
    waiting = await client.submit(prompt="later", not_before=1e10)
    assert await client.cancel(waiting) == "cancelled"
    assert (await client.status(waiting)).status is JobStatus.CANCELLED
    assert await client.workers()


async def stream_through(client: AsyncClient, fault: Any) -> None:
    """Read a long answer while `trouble()` happens; it must end as an undisturbed one does."""
    job = await client.submit(**LONG)
    received = Received()
    listening = asyncio.create_task(listen(client, job, received))
    async with asyncio.timeout(60):
        while len(received.token_ids) < 20 and not listening.done():  # noqa: ASYNC110 - the listener knows no event
            await asyncio.sleep(0.02)
    await fault()
    async with asyncio.timeout(60):
        await listening
    undisturbed = await client.result(await client.submit(**LONG), timeout=60)
    assert received.problems == []
    assert (tuple(received.token_ids), received.text) == (undisturbed.token_ids, undisturbed.text)
    result = await client.result(job, timeout=60)
    assert (result.status, result.text) == (JobStatus.SUCCEEDED, undisturbed.text)


async def test_a_cluster_serves_every_call(valkey_cluster: ValkeyCluster, tmp_path: Path) -> None:
    """Two queues on two nodes."""
    queues = two_queues_apart(valkey_cluster)
    for number, queue in enumerate(queues):
        folder = tmp_path / queue
        folder.mkdir()
        async with serving(valkey_cluster.url, folder, queue) as client:
            await use_every_call_async(client)
            if number == 0:
                await asyncio.to_thread(use_every_call, valkey_cluster.url, queue)


def two_queues_apart(cluster: ValkeyCluster) -> tuple[str, str]:
    names = [f"q{number}" for number in range(20)]
    first = cluster.node_of(Keys(names[0]).meta)
    return names[0], next(name for name in names if cluster.node_of(Keys(name).meta) is not first)


async def test_messages_of_a_cluster_stay_on_the_queues_node(
    valkey_cluster: ValkeyCluster, tmp_path: Path
) -> None:
    """Sharded pub/sub: an ordinary PUBLISH would go to every node."""
    queue = "sharded"
    async with serving(valkey_cluster.url, tmp_path, queue) as client:
        job = await client.submit(**LONG)
        stream = client.stream(job)
        await anext(stream)
        channels, plain = {}, []
        for node in valkey_cluster.nodes:
            with node.client() as direct:
                channels[node.port] = direct.execute_command("PUBSUB", "SHARDCHANNELS")
                plain += direct.execute_command("PUBSUB", "CHANNELS")
        await stream.aclose()
        await client.cancel(job)
        await client.result(job, timeout=60)
    owner = valkey_cluster.node_of(Keys(queue).meta).port
    assert Keys(queue).chunks(job).encode() in channels[owner]
    assert [port for port, found in channels.items() if found] == [owner]
    assert plain == []


async def test_jobs_end_after_a_whole_cluster_was_down(
    valkey_cluster: ValkeyCluster, tmp_path: Path
) -> None:
    """The outage is longer than the lease. The Redis library has errors of its own for it."""

    def outage() -> None:
        for node in valkey_cluster.nodes:
            node.kill()
        time.sleep(1.5)
        for node in valkey_cluster.nodes:
            node.start()
        valkey_cluster.wait_ready()

    async with serving(valkey_cluster.url, tmp_path, "outage") as client:
        await stream_through(client, lambda: asyncio.to_thread(outage))


@pytest.mark.parametrize("form", ["redis+cluster", "redis+sentinel"])
async def test_an_unreachable_topology_is_an_error_of_one_sentence(form: str) -> None:
    url = f"{form}://127.0.0.1:{free_port()}" + ("/main" if "sentinel" in form else "")
    async with AsyncClient(url, queue="q") as client:
        with pytest.raises(QueueUnavailable):
            await client.submit(prompt="x")
        with pytest.raises(QueueUnavailable):
            await anext(client.stream("unknown"))

    def threaded() -> None:
        with Client(url, queue="q") as client:
            client.submit(prompt="x")

    with pytest.raises(QueueUnavailable):
        await asyncio.to_thread(threaded)


async def test_an_unreachable_sentinel_is_called_once_per_try() -> None:
    """The library would ask each sentinel ten times more, with pauses, before the next one."""
    asked = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        url = f"redis+sentinel://127.0.0.1:{server.sockets[0].getsockname()[1]}/main"
        async with AsyncClient(url, queue="q") as client:
            with pytest.raises(QueueUnavailable):
                await client.submit(prompt="x")
    assert 1 <= asked <= 4


@pytest.mark.slow
async def test_a_replica_of_a_cluster_takes_over_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    queue = "q"
    with ValkeyCluster(num_primaries=3, num_replicas=1) as cluster:
        owner = cluster.node_of(Keys(queue).meta)
        async with serving(cluster.url, tmp_path, queue) as client:
            await stream_through(client, lambda: asyncio.to_thread(owner.kill))
        assert cluster.node_of(Keys(queue).meta) is not owner


async def test_sentinel_names_the_next_primary_in_the_middle_of_an_answer(
    sentinel_group: SentinelGroup, tmp_path: Path
) -> None:
    url = sentinel_group.url
    async with serving(url, tmp_path, "q") as client:
        await asyncio.to_thread(use_every_call, url, "q")
        await stream_through(client, lambda: asyncio.to_thread(sentinel_group.fail_over))
        await use_every_call_async(client)
        await asyncio.to_thread(use_every_call_again, url)


def use_every_call_again(url: str) -> None:
    with Client(url, queue="q") as client:
        job = client.submit(prompt="after", max_tokens=5, ignore_eos=True)
        assert client.result(job, timeout=60).usage.completion_tokens == 5
