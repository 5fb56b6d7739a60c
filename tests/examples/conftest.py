"""The example backend as a process of its own."""

import asyncio
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.browser import ROOT
from tests.support.worker import QUEUE, database_url
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import free_port

START_S = 60.0


class Backend:
    """`python -m ops.examples.fastapi_app`, on one port through all its restarts."""

    def __init__(self, redis_url: str, database: str, log: Path) -> None:
        self.database = database
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._environment = {
            "TOKENMILL_REDIS_URL": redis_url,
            "TOKENMILL_QUEUE": QUEUE,
            "TOKENMILL_DATABASE_URL": database,
            "PORT": str(self.port),
        }
        self._child: GuardedProcess | None = None

    async def start(self) -> None:
        command = [sys.executable, "-m", "ops.examples.fastapi_app"]
        with self._log.open("ab") as log:
            environment = os.environ | self._environment  # noqa: TID251
            self._child = GuardedProcess(
                command, at_death=signal.SIGKILL, cwd=ROOT, env=environment, output=log
            )
        async with asyncio.timeout(START_S):
            while not await asyncio.to_thread(self._answers):
                assert self._child.is_alive, self._log.read_text()
                await asyncio.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/openapi.json", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._child is not None:
            self._child.end(number, START_S)
            self._child = None


@pytest.fixture
def database(tmp_path: Path) -> str:
    return database_url(tmp_path)


@pytest.fixture
async def backend(redis_url: str, database: str, tmp_path: Path) -> AsyncIterator[Backend]:
    server = Backend(redis_url, database, tmp_path / "backend.log")
    await server.start()
    yield server
    await asyncio.to_thread(server.stop)
