"""The gateway's guide, block by block, with a real process of each command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import GUIDES, ROOT, blocks
from tests.support.waiting import until
from tests.support.worker import QUEUE, running_worker
from tokenmill_worker.local.valkey_server import free_port

pytestmark = [pytest.mark.redis, pytest.mark.slow]
PAGE = GUIDES / "gateway.md"
NAME = "smollm2-135m-instruct"


async def test_the_guide_of_the_gateway_runs(
    redis_url: str, database: str, tmp_path: Path, allowed_keys: list[str]
) -> None:
    allowed_keys += ["tm:tasks:*", "tm:{*}:meta"]
    (commands, _), (curl, _), (python, _), (batch, _) = [
        (text, language) for language, text in blocks(PAGE) if language in ("sh", "python")
    ]  # fmt: skip
    port = free_port()
    variables = os.environ | {  # noqa: TID251 - the children's
        "TOKENMILL_REDIS_URL": redis_url,
        "TOKENMILL_DATABASE_URL": database,
        "TOKENMILL_GATEWAY_PORT": str(port),
        "TOKENMILL_GATEWAY_MODEL": f"{NAME}={QUEUE}",
        "TOKENMILL_FILES": str(tmp_path / "files"),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # noqa: TID251
    }

    def run(*command: str) -> str:
        done = subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    create, serve = commands.splitlines()
    key = await asyncio.to_thread(run, *create.split())
    async with running_worker(redis_url, database, aliases=f"{NAME}=synthetic"):
        process = subprocess.Popen(serve.split(), env=variables, cwd=tmp_path)  # noqa: ASYNC220
        try:
            await until(lambda: is_ready(port))
            variables["OPENAI_API_KEY"] = key
            for page in (ROOT / "README.md", GUIDES / "quickstart.md"):
                assert curl in [text for _, text in blocks(page)]  # the same command
            asked = curl.replace(":8080", f":{port}").replace("curl ", "curl -sS ")
            answer = json.loads(await asyncio.to_thread(run, "bash", "-c", asked))
            assert answer["status"] in ("completed", "incomplete")
            code = python.replace(":8080", f":{port}").replace("tmk-…", key)
            lines = (await asyncio.to_thread(run, sys.executable, "-c", code)).splitlines()
            assert lines[0] == "0 response.created"
            assert [int(line.split()[0]) for line in lines] == list(range(len(lines)))
            line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
            body = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            (tmp_path / "in.jsonl").write_text(json.dumps(line | {"body": body}))
            code = batch.replace(":8080", f":{port}").replace("tmk-…", key)
            with tasks(variables, tmp_path):
                answer = json.loads(await asyncio.to_thread(run, sys.executable, "-c", code))
            assert answer["response"]["status_code"] == 200
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 60) == 0
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def tasks(variables: dict[str, str], folder: Path) -> Iterator[None]:
    process = subprocess.Popen(("tokenmill", "tasks"), env=variables, cwd=folder)
    try:
        yield
    finally:
        process.terminate()
        assert process.wait(60) == 0


async def is_ready(port: int) -> bool:
    def ask() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    return await asyncio.to_thread(ask)
