"""The cache on disk outlives a worker: a successor on its host reads the blocks of a running
answer, and computes none of its prompt again.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.processes import WorkerProcess
from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill_schemas.result import JobStatus

pytestmark = [
    pytest.mark.redis, pytest.mark.chaos, pytest.mark.model, pytest.mark.timeout(300),
]  # fmt: skip

PROMPT = [100 + (n * n * 31) % 4000 for n in range(400)]
NUM_BLOCKS = len(PROMPT) // 16
MODEL: dict[str, Any] = {
    "model": "smollm2-135m-instruct", "max_memory_gib": 0.2, "num_threads": 1,
    "verify_model": False,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(WorkerProcess.ask_to_end, id="drained", marks=pytest.mark.long),
        pytest.param(WorkerProcess.kill, id="killed"),
    ],
)
async def test_a_successor_reads_the_blocks_of_a_running_answer(
    redis_url: str, tmp_path: Path, leave: Callable[[WorkerProcess], None]
) -> None:
    database, disk = database_url(tmp_path), tmp_path / "disk"
    settings = {**MODEL, "cache_disk": str(disk)}
    first = WorkerProcess(
        "first", redis_url, database, tmp_path / "log", in_process=True, drain_seconds=0, **settings
    )
    fields: dict[str, Any] = {
        "prompt_ids": PROMPT, "max_tokens": 96, "temperature": 0.8, "seed": 7, "ignore_eos": True,
    }  # fmt: skip
    async with client_of(redis_url, database) as client:
        job = await client.submit(**fields)
        stream = client.stream(job)
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.end >= 8:
                break
        await until(lambda: len([*disk.rglob("*.kv")]) >= NUM_BLOCKS)
        leave(first)
        await first.wait()
        assert list(first.problems()) == []
        async with running_worker(
            redis_url, database, worker_id="next", in_process=True, **settings
        ) as worker:
            chunks += [chunk async for chunk in stream]
            result = await client.result(job, timeout=120)
            num_read = worker.service.health.stats.disk_blocks_read
            undisturbed = await client.submit(**fields, tenant="other")
            expected = await client.result(undisturbed, timeout=120)
    assert result.status is JobStatus.SUCCEEDED
    assert num_read >= NUM_BLOCKS - 1, "its last block may be computed again"
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == list(result.token_ids) == list(expected.token_ids)
