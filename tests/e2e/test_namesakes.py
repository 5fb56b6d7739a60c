"""Two workers run under one name: the first ends with a reason, and no job hangs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker import client_of, database_url, running_worker, settings, thread_host
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.app import Worker
from tokenmill_worker.errors import Replaced

pytestmark = pytest.mark.redis

SAME: dict[str, Any] = {
    "worker_id": "same",
    "max_num_seqs": 3,
    "model": "synthetic?step_ms=5&mean_tokens=1000000000000",
}


async def test_the_first_of_two_workers_with_one_name_ends_and_no_job_hangs(
    redis_url: str, tmp_path: Path
) -> None:
    database = database_url(tmp_path)
    chosen = settings(redis_url, database, **SAME)
    first = Worker(chosen, thread_host(chosen.engine_config()))
    serving = asyncio.create_task(first.serve())
    await asyncio.wait_for(first.ready.wait(), 60)
    async with client_of(redis_url, database) as client:
        jobs = await client.submit_many([{"prompt": "hello", "max_tokens": 300}] * 6)
        await anext(client.stream(jobs[0]))
        async with running_worker(redis_url, database, **SAME):
            with pytest.raises(Replaced, match="worker_id of its own"):
                await asyncio.wait_for(serving, 60)
            results = [await client.result(job, timeout=60) for job in jobs]
    assert {result.status for result in results} == {JobStatus.SUCCEEDED}
    assert [result.usage.completion_tokens for result in results] == [300] * 6
