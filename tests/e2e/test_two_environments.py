"""A worker by a Python that lacks what our engine needs, which another Python has."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_llama
from tests.support.environments import OF_OUR_ENGINE, whole_python, without
from tests.support.worker import QUEUE, client_of, database_url
from tokenmill_schemas.result import JobStatus

pytestmark = [pytest.mark.redis, pytest.mark.timeout(600)]

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["up", "down"]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
MOVE = {"type": "function", "function": {"name": "move", "parameters": POINT, "strict": True}}


async def started(environment: dict[str, str], *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenmill.cli", *arguments,
        env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip


@pytest.fixture
def environment(redis_url: str, tmp_path: Path) -> dict[str, str]:
    return without(tmp_path / "site", *OF_OUR_ENGINE) | {
        "TOKENMILL_REDIS_URL": redis_url,
        "TOKENMILL_DATABASE_URL": database_url(tmp_path),
        "TOKENMILL_QUEUE": QUEUE,
        "TOKENMILL_MODEL": str(tiny_llama.save(tmp_path / "tiny")),
        "TOKENMILL_DTYPE": "float32",
        "TOKENMILL_NUM_THREADS": "1",
        "TOKENMILL_ATTENTION": "reference",
        "TOKENMILL_MAX_MEMORY_GIB": "0.1",
        "COLUMNS": "200",
    }


async def test_a_worker_without_torch_serves_every_kind_of_job_by_another_python_s_engine(
    environment: dict[str, str], redis_url: str, tmp_path: Path
) -> None:
    python = whole_python(tmp_path)
    worker = await started(environment, "worker", "--engine-python", python)
    try:
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Where?"}]}
        async with client_of(redis_url, environment["TOKENMILL_DATABASE_URL"]) as client:
            schema = {"type": "json_schema", "json_schema": {"schema": POINT, "strict": True}}
            jobs = [
                await client.submit(**chat, max_tokens=400, response_format=schema),
                await client.submit(
                    **chat, max_tokens=400, tools=[MOVE], tool_choice="required", seed=2
                ),
                await client.submit(
                    prompt="ab", max_tokens=8, n=2, logprobs=True, top_logprobs=2, echo=True
                ),
                await client.submit(
                    prompt="ab", max_tokens=8, no_repeat_ngram_size=2, logit_bias={"98": 1.0}
                ),
            ]
            results = asyncio.gather(*(client.result(job, timeout=500) for job in jobs))
            ended = asyncio.create_task(worker.wait())
            waiting: list[asyncio.Future[Any]] = [results, ended]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert not ended.done(), await worker.stdout.read() if worker.stdout else ""
            ended.cancel()
            found = await results
        assert [one.status for one in found] == [JobStatus.SUCCEEDED] * 4, found
        assert set(json.loads(found[0].text)) == {"x", "y"}
    finally:
        worker.terminate()
        printed, _ = await asyncio.wait_for(worker.communicate(), 60)
    assert worker.returncode == 0, printed.decode()
    assert "Traceback" not in printed.decode()
    assert "PyTorch" not in printed.decode()


async def test_a_worker_without_torch_names_the_extra_that_our_engine_needs(
    environment: dict[str, str],
) -> None:
    worker = await started(environment, "worker")
    printed, _ = await asyncio.wait_for(worker.communicate(), 300)
    assert worker.returncode == 2
    words = f"the engine own needs {', '.join(OF_OUR_ENGINE)}: {sys.executable} -m pip install"
    assert f"Error: {words} '.[engine]' in tokenmill's folder, or name" in printed.decode()
    assert "Traceback" not in printed.decode()


async def test_doctor_without_torch_names_the_extra_and_checks_the_rest(
    environment: dict[str, str],
) -> None:
    doctor = await started(environment, "doctor", "--json")
    printed, _ = await asyncio.wait_for(doctor.communicate(), 300)
    found = json.loads(printed)
    assert [one["words"] for one in found if one["severity"] == "error"] == [
        f"the engine own needs {', '.join(OF_OUR_ENGINE)}: {sys.executable} -m pip install "
        "'.[engine]' in tokenmill's folder, or name another environment's Python with "
        "--engine-python"
    ]
    assert {"redis", "sql", "model", "package"} <= {one["subject"] for one in found}
