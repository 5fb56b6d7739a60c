"""A model split over two device workers of vLLM, on a CPU: the answers, and the death of one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.engines.vllm.parts import DEVICE_WORKER, group_of
from tests.support.vllm import VLLM, needs_vllm, with_vllm
from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill import AsyncClient
from tokenmill_worker.app import Worker
from tokenmill_worker.engines.own.model.model_files import resolve
from tokenmill_worker.engines.process.host import EngineProcess

pytestmark = [
    pytest.mark.redis, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(3_000), needs_vllm,
]  # fmt: skip
COUNT, CUT = 60, 10


@asynccontextmanager
async def serving(
    redis_url: str, database: str, size: int
) -> AsyncIterator[tuple[Worker, AsyncClient]]:
    """Run a worker whose vLLM has `size` device workers."""
    arguments = f"enforce-eager=true kv-cache-memory-bytes=268435456 tensor-parallel-size={size}"
    async with (
        running_worker(
            redis_url, database, in_process=True, model=str(resolve("gemma3-270m")),
            dtype="float32", max_model_len=256, max_num_seqs=2, lease_seconds=10.0, engine="vllm",
            engine_python=str(VLLM), engine_arg=arguments,
        ) as worker,
        client_of(redis_url, database) as client,
    ):  # fmt: skip
        yield worker, client


async def tokens_of(client: AsyncClient) -> AsyncIterator[int]:
    """Yield the tokens of a greedy answer as they come."""
    job = await client.submit(
        prompt="The rivers of Europe are", max_tokens=COUNT, temperature=0.0, ignore_eos=True
    )
    async for chunk in client.stream(job):
        for token in chunk.token_ids:
            yield token


async def test_two_device_workers_give_the_tokens_of_one_and_are_replaced_together(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in with_vllm({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}).items():
        monkeypatch.setenv(name, value)
    database = database_url(tmp_path)
    async with serving(redis_url, database, 1) as (_, client):
        expected = [token async for token in tokens_of(client)]
    assert len(expected) == COUNT
    async with serving(redis_url, database, 2) as (worker, client):
        assert [token async for token in tokens_of(client)] == expected
        host = worker.service.supervisor.host
        assert isinstance(host, EngineProcess)
        engine = host.pid or 0
        workers = [p for p in group_of(engine) if " ".join(p.cmdline()).startswith(DEVICE_WORKER)]
        assert len(workers) == 2
        received = []
        async for token in tokens_of(client):
            received.append(token)
            if len(received) == CUT:
                workers[1].kill()
                await until(lambda: not group_of(engine))
        assert received == expected
        assert worker.service.health.engine_restarts == 1
