"""Limits and refusals as a producer meets them, with a whole worker behind: rates, places, depth,
size, and a server that takes no writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.valkey import ControlledValkey
from tests.support.worker import client_of, database_url, running_worker
from tokenmill import InvalidRequest, QueueFull, RateLimited
from tokenmill.errors import QueueUnavailable
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.app import Worker

pytestmark = [pytest.mark.redis, pytest.mark.chaos]

SHORT: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
SLOW_MODEL = "synthetic?step_ms=5"


async def test_a_tenant_runs_at_most_its_limit_of_jobs_while_other_tenants_pass(
    redis_url: str, tmp_path: Path
) -> None:
    """Jobs of other tenants pass the waiting ones."""
    seen: list[int] = []
    async with (
        running_worker(redis_url, database_url(tmp_path), model=SLOW_MODEL, tenant_max_running=2),
        client_of(redis_url) as client,
    ):
        greedy = await client.submit_many(
            [{"prompt": f"{n}", "tenant": "greedy"} | SHORT for n in range(12)]
        )
        modest = [await client.submit(prompt="x", tenant=f"modest-{n}", **SHORT) for n in range(2)]

        async def look() -> None:
            while True:
                running = [
                    job for job in await client.list(JobStatus.RUNNING) if job.job_id in greedy
                ]
                seen.append(len(running))

        looking = asyncio.create_task(look())
        for job in modest:
            await client.result(job, timeout=60)
        waiting = [job for job in greedy if not (await client.status(job)).status.is_final]
        results = [await client.result(job, timeout=60) for job in greedy]
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    assert {result.status for result in results} == {JobStatus.SUCCEEDED}
    assert max(seen) == 2
    assert waiting, "the others had to wait for a tenant at its limit"


async def test_submits_beyond_the_limits_of_a_worker_s_settings_are_refused(
    redis_url: str, tmp_path: Path
) -> None:
    limits: dict[str, Any] = {
        "queue_limit": 5,
        "tenant_jobs_per_minute": 8.0,
        "max_payload_bytes": 4_000,
    }
    async with client_of(redis_url) as client:
        async with running_worker(redis_url, database_url(tmp_path), **limits):
            first = await client.submit(prompt="x", **SHORT)
            await client.result(first, timeout=60)
        with pytest.raises(InvalidRequest, match="the queue's limit is 4000"):
            await client.submit(prompt="x" * 5_000)
        for n in range(5):
            await client.submit(prompt="x", tenant=f"t{n}", **SHORT)
        with pytest.raises(QueueFull, match="holds 5 waiting standard jobs and its limit is 5"):
            await client.submit(prompt="x", tenant="t6", **SHORT)
        await client.set_queue_limit(0)
        await client.submit_many([{"prompt": "x", "tenant": "t0"} | SHORT] * 7)
        with pytest.raises(RateLimited, match="tenant 't0' submits faster than it may") as caught:
            await client.submit(prompt="x", tenant="t0", **SHORT)
        assert 0 < caught.value.retry_after <= 60 / 8
        for job in await client.list():
            await client.cancel(job.job_id)
        # to write the cancelled ones down
        async with running_worker(redis_url, database_url(tmp_path)):
            while await client.list():  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def redis_problem(worker: Worker) -> str | None:
    return next(check.problem() for check in worker.reporter.checks() if check.name == "redis")


async def test_a_full_server_fails_the_health_check_until_it_has_room(
    make_valkey: Callable[..., ControlledValkey], tmp_path: Path
) -> None:
    server = make_valkey(settings={"maxmemory-policy": "noeviction"})
    lease: dict[str, Any] = {"lease_seconds": 1.0}

    async def until(is_well: bool) -> None:
        async with asyncio.timeout(60):
            while (redis_problem(worker) is None) != is_well:  # noqa: ASYNC110 - a check has no event
                await asyncio.sleep(0.02)

    async with (
        running_worker(server.url, database_url(tmp_path), model=SLOW_MODEL, **lease) as worker,
        client_of(server.url) as client,
    ):
        await until(is_well=True)
        job = await client.submit(prompt="x", max_tokens=400, ignore_eos=True)
        await asyncio.to_thread(server.configure, maxmemory=1)
        await until(is_well=False)
        with pytest.raises(QueueUnavailable, match="maxmemory"):
            await client.submit(prompt="y")
        await asyncio.to_thread(server.configure, maxmemory=0)
        await until(is_well=True)
        result = await client.result(job, timeout=60)
    assert (result.status, result.usage.completion_tokens) == (JobStatus.SUCCEEDED, 400)
