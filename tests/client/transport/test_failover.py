"""A failover behind one address: the old primary becomes a replica and closes no connection."""

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.support.proxy import FaultProxy
from tests.support.queue import QUEUE, token
from tests.support.valkey import ControlledValkey
from tokenmill import AsyncClient, Client, ClientOptions
from tokenmill.transport.connect import connect_async
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.keys import Keys
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.queue.job_stream import JobStream

pytestmark = pytest.mark.redis


class Failover:
    """`proxy` is the address; `happen` makes the second server the primary behind it."""

    def __init__(self, servers: list[ControlledValkey], proxy: FaultProxy) -> None:
        self._old, self._new = servers
        self.proxy = proxy

    def happen(self) -> None:
        with self._old.client() as old, self._new.client() as new:
            new.execute_command("REPLICAOF", "127.0.0.1", self._old.port)
            deadline = time.monotonic() + 60
            while new.info("replication").get("master_link_status") != "up":
                assert time.monotonic() < deadline
                time.sleep(0.02)
            new.execute_command("REPLICAOF", "NO", "ONE")
            old.execute_command("REPLICAOF", "127.0.0.1", self._new.port)
        self.proxy.lead_to(self._new.port)


@pytest.fixture
def failover(
    make_valkey: Callable[..., ControlledValkey], make_proxy: Callable[[int], FaultProxy]
) -> Failover:
    servers = [make_valkey(persistent=False), make_valkey(persistent=False)]
    return Failover(servers, make_proxy(servers[0].port))


async def test_a_worker_continues_at_the_new_primary_after_a_failover(failover: Failover) -> None:
    redis = connect_async(failover.proxy.url)
    worker = JobStream(redis, Keys(QUEUE), "w1")
    async with AsyncClient(failover.proxy.url, queue=QUEUE) as client:
        await client.submit(prompt="x")
        (delivery,) = await worker.claim(1)
        await worker.append([token(delivery, 0)])
        failover.happen()
        for call in (
            lambda: worker.append([token(delivery, 1)]),
            lambda: worker.heartbeat(WorkerStatus(worker_id="w1")),
            lambda: worker.claim(1),
        ):
            try:
                await call()
            except RedisUnavailable:  # once
                await call()
    assert worker.owned == {delivery.job_id: delivery.token}
    await redis.aclose()


async def test_clients_continue_at_the_new_primary_after_a_failover(failover: Failover) -> None:
    with Client(failover.proxy.url, queue=QUEUE, options=ClientOptions()) as client:
        async with AsyncClient(failover.proxy.url, queue=QUEUE) as aclient:
            await asyncio.gather(
                asyncio.to_thread(client.submit, prompt="a"), aclient.submit(prompt="b")
            )
            failover.happen()
            await asyncio.gather(
                asyncio.to_thread(client.submit, prompt="c"), aclient.submit(prompt="d")
            )
            assert (await aclient.depth()).num_queued == 4
