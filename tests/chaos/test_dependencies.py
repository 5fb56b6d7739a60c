"""Redis away, restarted, full, read-only or slow: the cases of the runbook."""

import asyncio

import pytest

from tests.chaos.checker import Received, Wanted, violations
from tests.chaos.clients import listen, submit
from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill.errors import QueueUnavailable
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.local.valkey_server import free_port

pytestmark = [pytest.mark.redis, pytest.mark.chaos]

LEASE = {"lease_seconds": 1.0}
SLOW_MODEL = "synthetic?step_ms=10"
LONG = {"prompt": "go on", "max_tokens": 150, "ignore_eos": True, "seed": 7}
SHORT = {"prompt": "short", "max_tokens": 5, "ignore_eos": True}


async def check_through(url, database, trouble):
    """Run a long job while `trouble(received)` happens; it and a later one end undisturbed."""
    async with (
        running_worker(url, database, model=SLOW_MODEL, **LEASE),
        client_of(url, database) as client,
    ):
        job = await submit(client, "long", **LONG)
        received = Received()
        listening = asyncio.create_task(listen(client, job, received))
        await until(lambda: len(received.token_ids) >= 20)
        await trouble(received)
        result = await result_of(client, job)
        await asyncio.wait_for(listening, 90)
        later = await submit(client, "later", **LONG)
        undisturbed = await result_of(client, later)
        late = Received()
        await asyncio.wait_for(listen(client, later, late), 90)
    assert result.status is JobStatus.SUCCEEDED
    wanted = Wanted.of(undisturbed)
    assert (
        violations(database, {job: wanted, later: wanted}, {job: [received], later: [late]}) == []
    )


async def result_of(client, job, timeout_s=40):
    async with asyncio.timeout(timeout_s):
        while True:
            try:
                return await client.result(job, timeout=timeout_s)
            except QueueUnavailable:
                await asyncio.sleep(0.1)


async def test_jobs_survive_redis_away_for_longer_than_the_lease(make_valkey, make_proxy, tmp_path):
    proxy = make_proxy(make_valkey().port)

    async def trouble(received):
        proxy.cut(refuse=True)
        await asyncio.sleep(0.2)
        known = len(received.token_ids)
        await asyncio.sleep(2.0)
        assert len(received.token_ids) == known, "the cut was not felt"
        proxy.heal()

    await check_through(proxy.url, database_url(tmp_path), trouble)


async def test_jobs_survive_redis_frozen_for_longer_than_the_lease(
    make_valkey, make_proxy, tmp_path
):
    proxy = make_proxy(make_valkey().port)

    async def trouble(received):
        proxy.freeze()
        await asyncio.sleep(2.0)
        proxy.heal()

    await check_through(proxy.url, database_url(tmp_path), trouble)


@pytest.mark.parametrize("crash", [False, True])
async def test_jobs_survive_a_restart_of_redis_with_its_data(make_valkey, tmp_path, crash):
    server = make_valkey(settings={"appendfsync": "always"})

    async def trouble(received):
        await asyncio.to_thread(server.restart, crash=crash)

    await check_through(server.url, database_url(tmp_path), trouble)


async def test_jobs_survive_repeated_resets_of_connections(make_valkey, make_proxy, tmp_path):
    proxy = make_proxy(make_valkey().port)

    async def trouble(received):
        for _ in range(5):
            proxy.lose_replies(2)
            await asyncio.sleep(0.15)
            proxy.cut()
            await asyncio.sleep(0.1)
        proxy.heal()

    await check_through(proxy.url, database_url(tmp_path), trouble)


async def test_jobs_survive_a_slow_redis(make_valkey, make_proxy, tmp_path):
    proxy = make_proxy(make_valkey().port)

    async def trouble(received):
        proxy.delay(0.1)
        await asyncio.sleep(1.5)

    await check_through(proxy.url, database_url(tmp_path), trouble)


async def test_running_jobs_end_in_sql_if_redis_comes_back_empty(make_valkey, tmp_path):
    """Jobs that only Redis had are lost; the worker and the queue go on."""
    server, database = make_valkey(), database_url(tmp_path)
    async with (
        running_worker(server.url, database, model=SLOW_MODEL, **LEASE) as worker,
        client_of(server.url, database) as client,
    ):
        done = await client.submit(**SHORT)
        await client.result(done, timeout=90)
        await client.submit(**LONG)
        await until(lambda: len(worker.service._owned) == 1)
        await asyncio.to_thread(server.restart, keep=False)
        after = await result_of(client, await submit(client, "after", **SHORT))
        assert after.status is JobStatus.SUCCEEDED
        assert (await result_of(client, done)).status is JobStatus.SUCCEEDED, "SQL has it"
        await until(lambda: len(worker.service._owned) == 0)


async def refused_until_repaired(server, database, *, spoil, repair, says):
    async with (
        running_worker(server.url, database, model=SLOW_MODEL, **LEASE) as worker,
        client_of(server.url, database) as client,
    ):
        job = await client.submit(**LONG)
        await until(lambda: len(worker.service._owned) == 1)
        await asyncio.to_thread(spoil)
        with pytest.raises(QueueUnavailable, match=says):
            await client.submit(prompt="x" * 10_000)
        await asyncio.sleep(1.5)
        await asyncio.to_thread(repair)
        assert (await result_of(client, job)).status is JobStatus.SUCCEEDED
        after = await result_of(client, await submit(client, "after", **SHORT))
        assert after.status is JobStatus.SUCCEEDED


async def test_a_full_redis_refuses_submits_in_a_sentence_until_it_has_room(make_valkey, tmp_path):
    server = make_valkey(settings={"maxmemory-policy": "noeviction"})
    await refused_until_repaired(
        server,
        database_url(tmp_path),
        spoil=lambda: server.configure(maxmemory=1),
        repair=lambda: server.configure(maxmemory=0),
        says="OOM|memory",
    )


async def test_a_read_only_redis_refuses_submits_in_a_sentence_until_it_is_writable(
    make_valkey, tmp_path
):
    server = make_valkey()

    def role(*primary):
        with server.client() as client:
            client.execute_command("REPLICAOF", *primary)

    await refused_until_repaired(
        server,
        database_url(tmp_path),
        spoil=lambda: role("127.0.0.1", free_port()),
        repair=lambda: role("NO", "ONE"),
        says="READONLY|read.only",
    )
