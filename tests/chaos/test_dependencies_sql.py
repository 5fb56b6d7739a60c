"""PostgreSQL away or killed: finished jobs wait, intake stops at a full buffer, and all is recorded
afterwards.
"""

import asyncio
import gc
import json
import signal
import urllib.error
import urllib.request
from functools import partial

import pytest

from tests.support.waiting import until
from tests.support.worker import client_of, running_worker
from tokenmill_schemas.result import JobStatus
from tokenmill_worker import app
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.record import migrate
from tokenmill_worker.record.finalizer import Finalizer, FinalizerLimits

pytestmark = [
    pytest.mark.redis,
    pytest.mark.postgres,
    pytest.mark.chaos,
    pytest.mark.filterwarnings(
        "ignore:.*psycopg.Connection.*was deleted while still open:ResourceWarning"
    ),
]


def health(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30) as reply:
            return reply.status, json.load(reply)["checks"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["checks"]


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGQUIT])
async def test_finished_jobs_wait_for_postgres_and_intake_stops(
    own_postgres, redis_url, monkeypatch, with_signal
):
    database = own_postgres.create_database()
    migrate.upgrade(database)
    port = free_port()
    limits = FinalizerLimits(max_buffered=6, max_group=3)
    monkeypatch.setattr(app, "Finalizer", partial(Finalizer, limits=limits))

    async def is_full():
        status, checks = await asyncio.to_thread(health, port)
        return status == 503 and checks["sql"] != "ok" and checks["buffer"] != "ok"

    async def is_well():
        return (await asyncio.to_thread(health, port))[0] == 200

    async with (
        running_worker(redis_url, database, max_num_seqs=2, metrics_port=port) as worker,
        client_of(redis_url) as client,
    ):
        first = await client.submit(prompt="before", max_tokens=5)
        assert (await client.result(first, timeout=30)).status is JobStatus.SUCCEEDED
        await asyncio.to_thread(own_postgres.halt, with_signal)
        jobs = [
            await client.submit(prompt=f"job {i}", max_tokens=5, ignore_eos=True) for i in range(40)
        ]
        await until(is_full)
        await asyncio.sleep(0.5)
        assert not worker.service.credits()
        waiting = [job for job in jobs if (await client.status(job)).status is JobStatus.QUEUED]
        assert len(waiting) >= 20, "intake did not stop"
        assert not [job for job in jobs if (await client.status(job)).status.is_final], (
            "reported before it was recorded"
        )
        await asyncio.to_thread(own_postgres.start)
        results = [await client.result(job, timeout=90) for job in jobs]
        await until(is_well)
    assert {result.status for result in results} == {JobStatus.SUCCEEDED}
    gc.collect()
