"""/metrics of a gateway, and several processes on one port."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.gateway.conftest import MODEL, running_gateway
from tests.gateway.test_guide import is_ready
from tests.support.waiting import until
from tests.support.worker import running_worker
from tokenmill.sql.engine import open_engine
from tokenmill_schemas.tables import batches
from tokenmill_worker.local.valkey_server import free_port
from tokenmill_worker.tasks.batches import open_batches

pytestmark = pytest.mark.redis


async def test_metrics_count_requests_by_call_and_status(redis_url: str, database: str) -> None:
    port = free_port()
    async with (
        running_worker(redis_url, database),
        running_gateway(redis_url, database, metrics_port=port, host="127.0.0.1") as gateway,
        gateway.client() as client,
    ):
        chat: Any = [{"role": "user", "content": "Hello"}]
        await client.chat.completions.create(model=MODEL, messages=chat, max_tokens=4)
        with pytest.raises(Exception, match="no model"):
            await client.chat.completions.create(model="other", messages=chat)
        url = f"http://127.0.0.1:{port}/metrics"
        text = await asyncio.to_thread(lambda: urllib.request.urlopen(url).read().decode())
    call = 'tokenmill:gateway_requests_total{call="POST /v1/chat/completions",status='
    assert f'{call}"200"}} 1.0' in text
    assert f'{call}"404"}} 1.0' in text
    assert "tokenmill:gateway_streams 0.0" in text


@pytest.mark.slow
async def test_processes_share_a_port_and_one_that_ends_is_started_again(
    redis_url: str, database: str
) -> None:
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "tokenmill"), "gateway", "--open", "--port", str(port),
        "--redis-url", redis_url, "--database-url", database, "--processes", "2",
    ]  # fmt: skip
    process = await asyncio.to_thread(subprocess.Popen, command)

    def serving() -> list[psutil.Process]:
        found = []
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
                if child.net_connections():
                    found.append(child)
        return found

    try:
        await until(lambda: len(serving()) == 2)
        assert await is_ready(port)
        killed = serving()[0]
        killed.kill()
        await until(lambda: len(serving()) == 2 and killed.pid not in [p.pid for p in serving()])
        assert await is_ready(port)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.wait()


def test_open_batches_are_counted_by_state_with_their_lines(database: str) -> None:
    engine = open_engine(database)
    row: dict[str, Any] = dict.fromkeys(("queue", "model", "tenant", "endpoint"), "x")
    row |= {"total": 3, "completed": 1, "failed": 0, "created_ms": 1}
    states = {"a": ("in_progress", 5), "b": ("in_progress", 5), "c": ("completed", None)}
    with engine.begin() as connection:
        for name, (state, due_ms) in states.items():
            connection.execute(batches.insert().values(**row, id=name, state=state, due_ms=due_ms))
    found = open_batches(engine)
    engine.dispose()
    assert found.counts["in_progress"] == 2
    assert sum(found.counts.values()) == 2
    assert found.lines == {"completed": 2, "failed": 0, "waiting": 4}
