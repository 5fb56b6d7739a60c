"""A worker process with vLLM on a real queue, which a test kills in the middle of answers."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from tests.chaos.checker import Received, Wanted, violations
from tests.chaos.clients import listen
from tests.chaos.processes import WorkerProcess, environment
from tests.support.valkey import ControlledValkey
from tests.support.vllm import ARGUMENTS, VLLM, with_vllm
from tests.support.waiting import until
from tests.support.worker import client_of, database_url
from tokenmill import AsyncClient
from tokenmill_worker.engines.own.model.model_files import resolve

START_S: Final = 600.0  # of vLLM, on a busy machine
CUT: Final = 20  # tokens of each answer that are there before a test kills
VLLM_SETTINGS: Final[dict[str, object]] = {
    "engine": "vllm", "engine_python": VLLM, "engine_arg": ARGUMENTS,
}  # fmt: skip
OWN: Final[dict[str, object]] = {"engine": "own", "num_threads": 1, "max_memory_gib": 0.1}
PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 10, "maxLength": 30},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2000},
        "works": {
            "type": "array",
            "items": {"type": "string", "minLength": 5, "maxLength": 20},
            "minItems": 3,
            "maxItems": 4,
        },
    },
    "required": ["name", "born", "works"],
    "additionalProperties": False,
}
JOBS: Final[tuple[dict[str, Any], ...]] = (
    {
        "messages": [{"role": "user", "content": "Tell me of the rivers of Europe."}],
        "max_tokens": 80,
        "temperature": 0.0,
        "ignore_eos": True,
    },
    {
        "messages": [{"role": "user", "content": "Name a poet."}],
        "response_format": {"json_schema": PERSON},
        "max_tokens": 200,
        "temperature": 0.0,
    },
)


class Service:
    """A queue and a database, and one worker at a time. `settings` are those of workers.

    One `beside` another has its queue and its database.
    """

    def __init__(
        self,
        folder: Path,
        valkey: ControlledValkey,
        *plugins: str,
        beside: Service | None = None,
        **settings: object,
    ) -> None:
        self.url = valkey.url
        self.database: str = beside.database if beside else database_url(folder)
        self.wanted: dict[str, Wanted] = {}  # of all jobs
        self.received: dict[str, list[Received]] = {}
        self._calm: list[Wanted] = []
        self._folder, self._settings = folder, settings
        self._env = with_vllm(environment(folder, folder.name), *plugins)
        self._numbers = itertools.count()
        self.worker: WorkerProcess | None = None

    @property
    def temporary(self) -> Path:
        """The folder of its workers' temporary files."""
        return self._folder / "tmp"

    def start(self, **settings: object) -> WorkerProcess:
        """Start a worker, if none is there; of vLLM, unless settings say otherwise."""
        if self.worker is None or not self.worker.is_alive:
            name = f"{self._folder.name}-{next(self._numbers)}"
            defaults = {"model": resolve("smollm2-135m-instruct"), "max_num_seqs": 4}
            values = {**defaults, **(settings or VLLM_SETTINGS), **self._settings}
            self.worker = WorkerProcess(
                name, self.url, self.database, self._folder / f"{name}.log", env=self._env,
                in_process=True, dtype="float32",
                max_model_len=512, lease_seconds=5.0, log_level="info", **values,
            )  # fmt: skip
        return self.worker

    def engine(self, number: int = 1) -> psutil.Process:
        """Return the process of the worker's engine, when its `number`-th is ready."""
        assert self.worker is not None
        limit = time.monotonic() + START_S
        while self.num_engines < number:
            assert self.worker.is_alive, self.worker.words[-3_000:]
            assert time.monotonic() < limit, self.worker.words[-3_000:]
            time.sleep(0.1)
        found = self.worker.engine()
        assert found is not None, self.worker.words[-3_000:]
        return found

    @property
    def num_engines(self) -> int:
        """Return how many engines of the worker have been ready."""
        return self.worker.words.count("Engine ready: ") if self.worker else 0

    @asynccontextmanager
    async def jobs_in_the_middle(self) -> AsyncIterator[AsyncClient]:
        """Submit JOBS; run the block when each has CUT tokens. Behind it they must end as
        undisturbed ones, without a gap and without a repeated token.
        """
        async with client_of(self.url, self.database) as client:
            if not self._calm:
                calm = [await client.submit(**job) for job in JOBS]
                self._calm = [Wanted.of(await client.result(job, timeout=START_S)) for job in calm]
                self.wanted |= zip(calm, self._calm, strict=True)
            async with asyncio.TaskGroup() as listening:
                while any(one.ended for one in await self._begun(client, listening)):
                    pass  # the engine was faster than this test
                yield client
            for job in self.received:
                await client.result(job, timeout=60)
        assert violations(self.database, self.wanted, self.received) == []

    async def _begun(self, client: AsyncClient, listening: asyncio.TaskGroup) -> list[Received]:
        """Submit JOBS and wait until each has CUT tokens."""
        begun = []
        for job, wanted in zip(JOBS, self._calm, strict=True):
            name, received = await client.submit(**job), Received()
            self.wanted[name], self.received[name] = wanted, [received]
            listening.create_task(listen(client, name, received))
            begun.append(received)
        await until(lambda: all(one.num_tokens >= CUT for one in begun), timeout_s=START_S)
        return begun

    def end(self) -> None:
        if self.worker is not None:
            self.worker.end()
