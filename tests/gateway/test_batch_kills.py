"""A process of the tasks is killed in the middle of a batch, and another goes on with it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import SLOW, running_gateway
from tests.support.waiting import until
from tests.support.worker import QUEUE, running_worker
from tokenmill.sql.engine import open_engine
from tokenmill_schemas.tables import batches, jobs

pytestmark = [pytest.mark.redis, pytest.mark.slow, pytest.mark.timeout(600)]
LINES = 300


async def test_each_line_is_answered_once_though_tasks_are_killed_in_the_middle(
    redis_url: str, database: str, tmp_path: Path, allowed_keys: list[str]
) -> None:
    allowed_keys += ["tm:tasks:*", "tm:{*}:meta"]
    files = str(tmp_path / "files")
    variables = os.environ | {  # noqa: TID251 - the children's
        "TOKENMILL_REDIS_URL": redis_url,
        "TOKENMILL_DATABASE_URL": database,
        "TOKENMILL_FILES": files,
        "TOKENMILL_QUEUE": QUEUE,
    }
    engine = open_engine(database)

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tokenmill.cli", "tasks"]
        return subprocess.Popen(command, env=variables, cwd=tmp_path, start_new_session=True)

    def kill(process: subprocess.Popen[bytes]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)
        with engine.begin() as connection:  # as if the time of its lease had passed
            connection.execute(batches.update().values(due_ms=0))

    body = {"model": SLOW, "prompt": "Hi", "max_tokens": 3, "ignore_eos": True}
    lines = [
        {"custom_id": f"l{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n in range(LINES)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    async with (
        running_worker(redis_url, database, model=SLOW),
        running_gateway(redis_url, database, models={SLOW: QUEUE}, files=files) as gateway,
        gateway.client() as client,
    ):
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        asked = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )

        async def now() -> Any:
            return await client.batches.retrieve(asked.id)

        for least in (1, LINES // 2):
            process = await asyncio.to_thread(start)

            async def is_under_way(least: int = least) -> bool:
                return bool((await now()).request_counts.completed >= least)

            await until(is_under_way, timeout_s=60, pause_s=0.1)
            assert (await now()).status == "in_progress"
            await asyncio.to_thread(kill, process)
        process = await asyncio.to_thread(start)

        async def is_over() -> bool:
            return bool((await now()).status == "completed")

        await until(is_over, timeout_s=90, pause_s=0.1)
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0
        done = await now()
        text = (await client.files.content(done.output_file_id)).text
        assert done.error_file_id is None
    names = [json.loads(each)["custom_id"] for each in text.splitlines()]
    assert sorted(names) == sorted(f"l{n}" for n in range(LINES))
    with engine.begin() as connection:
        assert len(connection.execute(jobs.select()).all()) == LINES
    engine.dispose()
