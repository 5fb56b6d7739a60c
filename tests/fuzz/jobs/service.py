"""The service under fuzz: a Valkey, an SQLite file and one worker with its engine in a process; and
what is seen of it from outside, by processes, log and rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from tests.chaos.processes import ROOT, WorkerProcess
from tests.support import tiny_llama
from tests.support.valkey import ControlledValkey
from tests.support.worker import database_url

QUEUE: Final = "fuzz"
MOST_DEATHS: Final = 20
READY_S: Final = 300.0
_SETTINGS: Final[dict[str, Any]] = {
    "queue": QUEUE, "in_process": True, "dtype": "float32", "num_threads": 1,
    "max_num_seqs": 32, "lease_seconds": 10,
    "stall_seconds": 20, "result_ttl_seconds": 120,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class EndRow:
    """The end of a job, as SQL has it."""

    state: str
    error_code: str
    error_message: str
    text: str


class FuzzedService:
    """Started and ended by `async with`. A worker that dies is started again, and counted."""

    def __init__(self, folder: Path, model: str = "") -> None:
        self.deaths: list[str] = []
        self.engines: set[int] = set()
        self._folder = folder
        self._model = model or str(tiny_llama.save(folder / "model"))
        self._valkey = ControlledValkey(persistent=False)
        self._database = database_url(folder)
        self._watching: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return self._valkey.url

    @property
    def database(self) -> str:
        return self._database

    @property
    def log(self) -> str:
        return (self._folder / "worker.log").read_text("utf-8", "replace")

    @property
    def num_replaced(self) -> int:
        """The number of engines beyond one for each worker process."""
        return max(0, len(self.engines) - 1 - len(self.deaths))

    async def __aenter__(self) -> Self:
        self._valkey.start()
        self._worker = self._start_worker()
        async with asyncio.timeout(READY_S):
            while not self._worker.is_ready:
                if not self._worker.is_alive:
                    raise RuntimeError(f"the worker did not start: {self.log[-3000:]}")
                await asyncio.sleep(0.1)
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        self._worker.end()
        self._valkey.stop()

    def _start_worker(self) -> WorkerProcess:
        log = self._folder / "worker.log"
        return WorkerProcess(
            "fuzzed", self.url, self._database, log, model=self._model, **_SETTINGS
        )

    async def _watch(self) -> None:
        while True:
            if (engine := await asyncio.to_thread(self._worker.engine)) is not None:
                self.engines.add(engine.pid)
            if not self._worker.is_alive:
                self.deaths.append(f"status {self._worker.process.poll()}: {self.log[-2500:]}")
                self._worker.end()
                if len(self.deaths) >= MOST_DEATHS:
                    return
                self._worker = self._start_worker()
            await asyncio.sleep(0.5)

    @property
    def has_given_up(self) -> bool:
        """True after so many deaths that nothing more will end."""
        return len(self.deaths) >= MOST_DEATHS

    def _query(self, statement: str) -> list[Any]:
        path = self._database.removeprefix("sqlite:///")
        with contextlib.closing(sqlite3.connect(path, timeout=30)) as connection:
            return connection.execute(statement).fetchall()

    def num_rows(self) -> int:
        return int(self._query("select count(*) from jobs")[0][0])

    def rows(self) -> dict[str, EndRow]:
        columns = "id, state, error_code, error_message, text"
        found = self._query(f"select {columns} from jobs where tenant <> 'probe'")
        return {row[0]: EndRow(*(value or "" for value in row[1:])) for row in found}

    def billed(self) -> list[str]:
        return [row[0] for row in self._query("select job_id from usage where tenant <> 'probe'")]


class FirstTokens:
    """The probe's process, and the milliseconds to its first tokens."""

    def __init__(self, service: FuzzedService) -> None:
        self.undisturbed: list[float] = []
        self.beside: list[float] = []
        self._service = service

    async def __aenter__(self) -> Self:
        command = [sys.executable, "-m", "tests.fuzz.jobs.probe", self._service.url, QUEUE]
        self._process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._into = self.undisturbed
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        await asyncio.gather(self._reading, return_exceptions=True)

    def fuzz_begins(self) -> None:
        self._into = self.beside

    async def _read(self) -> None:
        assert self._process.stdout is not None, "it has a pipe"
        async for line in self._process.stdout:
            self._into.append(float(line))
