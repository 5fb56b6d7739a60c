"""An answer keeps the sampling defaults of its first worker after `kill -9`, on a worker with
others.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker import client_of, database_url, running_worker

pytestmark = [pytest.mark.redis, pytest.mark.chaos, pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
MODEL = "synthetic?step_ms=20"
JOBS: list[dict[str, Any]] = [
    {"prompt": "one", "ignore_eos": True, "seed": 1},
    {"prompt": "two", "ignore_eos": True, "seed": 2, "stream": False},
    {"prompt": "three", "ignore_eos": True, "seed": 3, "n": 2},
    {"prompt": "four", "ignore_eos": True, "seed": 4, "temperature": 1.0},
]


def write(folder: Path, **values: object) -> str:
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps(values))
    return str(folder)


async def test_the_next_worker_keeps_the_first_worker_s_sampling_defaults(
    redis_url: str, tmp_path: Path
) -> None:
    first = write(tmp_path / "first", do_sample=False, top_k=7, max_new_tokens=120)
    other = write(tmp_path / "other", temperature=1.5, max_new_tokens=90)
    (tmp_path / "calm").mkdir()
    calm = database_url(tmp_path / "calm")
    async with (
        running_worker(redis_url, calm, model="synthetic", generation_config=first),
        client_of(redis_url, calm) as client,
    ):
        ids = [await client.submit(**job) for job in JOBS]
        wanted = [await client.result(job, timeout=60) for job in ids]
    database = database_url(tmp_path)
    async with client_of(redis_url, database) as client:
        jobs = [await client.submit(**job) for job in JOBS]
        doomed = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.chaos.plain_worker", "doomed", redis_url, database,
            f"model={MODEL}", f"generation_config={first}", cwd=ROOT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                while min([(await client.status(job)).tokens for job in jobs]) < 40:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        finally:
            doomed.send_signal(signal.SIGKILL)
            await doomed.wait()
        async with running_worker(redis_url, database, model=MODEL, generation_config=other):
            results = [await client.result(job, timeout=60) for job in jobs]
    for result, expected in zip(results, wanted, strict=True):
        assert result.params == expected.params
        assert [c.token_ids for c in result.choices] == [c.token_ids for c in expected.choices]
        assert result.params is not None
        assert (result.params.top_k, result.params.max_tokens) == (7, 120)
    assert [r.params.temperature for r in results if r.params] == [0.0, 0.0, 0.0, 1.0]
    assert all(result.attempt > 1 or result.worker_id != "doomed" for result in results)
