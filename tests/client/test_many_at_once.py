"""One client waits for hundreds of jobs and reads hundreds of streams, as in a web backend."""

from __future__ import annotations

import asyncio

import pytest

from tokenmill import AsyncClient

pytestmark = pytest.mark.redis


async def test_hundreds_of_tasks_share_a_few_connections(redis_url: str) -> None:
    async with AsyncClient(redis_url, queue="q") as client:
        jobs = await client.submit_many(
            {"prompt": f"{number}", "max_tokens": 1} for number in range(400)
        )
        waiting = [asyncio.create_task(client.result(str(job), timeout=60)) for job in jobs[:200]]
        reading = [asyncio.create_task(_first_chunk(client, str(job))) for job in jobs[200:]]
        states = await asyncio.gather(*(client.status(str(job)) for job in jobs))
        assert {state.status.value for state in states} == {"queued"}
        await asyncio.gather(*(client.cancel(str(job)) for job in jobs))
        results = await asyncio.gather(*waiting)
        assert {result.status.value for result in results} == {"cancelled"}
        assert set(await asyncio.gather(*reading)) == {"cancelled"}


async def _first_chunk(client: AsyncClient, job: str) -> str:
    async for chunk in client.stream(job):
        if chunk.status is not None:
            return chunk.status.value
    return "no end"
