"""Streams that yield all chunks that are there, and silent streams that are looked at together."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.valkey import ControlledValkey
from tests.support.waiting import until
from tests.support.worker import QUEUE, client_of, database_url, running_worker
from tokenmill import AsyncClient
from tokenmill.errors import JobNotFound
from tokenmill.operations.async_driver import MOST_AT_ONCE
from tokenmill.operations.io_requests import ClientOptions
from tokenmill_schemas.result import JobStatus

pytestmark = pytest.mark.redis
LONG: dict[str, Any] = {"prompt": "go on", "max_tokens": 300, "ignore_eos": True, "seed": 7}


async def test_batches_hold_what_a_stream_has_while_it_runs_and_after_its_end(
    redis_url: str, tmp_path: Path
) -> None:
    database = database_url(tmp_path)
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        job = await client.submit(**LONG)
        running = [batch async for batch in client.batches(job)]
        ended = [batch async for batch in client.batches(job)]
        result = await client.result(job)
    for batches in (running, ended):
        assert all(1 <= len(batch) <= MOST_AT_ONCE for batch in batches)
        tokens = [token for batch in batches for chunk in batch for token in chunk.token_ids]
        assert tuple(tokens) == result.token_ids
    assert len(ended) < 300


async def test_silent_streams_are_looked_at_together_until_something_changes(
    valkey: ControlledValkey, redis_url: str, tmp_path: Path
) -> None:
    options = ClientOptions(idle_s=0.1, retry_for_s=0.1, unserved_s=None)
    async with AsyncClient(redis_url, queue=QUEUE, options=options) as client:
        jobs = await client.submit_many({"prompt": f"{number}"} for number in range(40))
        streams = [asyncio.create_task(anext(client.batches(job))) for job in jobs]
        with valkey.client() as server:

            def calls(command: str) -> int:
                found: Any = server.info("commandstats")
                return int(found.get(f"cmdstat_{command}", {}).get("calls", 0))

            server.config_resetstat()
            await until(lambda: calls("xrange") >= 40)  # each has looked once for itself
            await until(lambda: calls("evalsha") >= 4)
            before = calls("xrange"), calls("evalsha")
            await until(lambda: calls("evalsha") >= before[1] + 4)
            assert calls("xrange") == before[0]
            server.delete(client.keys.job(jobs[0]))
            with pytest.raises(JobNotFound):
                await asyncio.wait_for(streams[0], 30)
        await asyncio.gather(*(client.cancel(job) for job in jobs[1:]))
        ends = await asyncio.gather(*streams[1:])
    assert {end[-1].status for end in ends} == {JobStatus.CANCELLED}
