"""A whole worker inside the test's event loop: real queue, real SQL, the real engine in a thread or
a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.databases import migrated_sqlite
from tests.support.engine_thread import EngineThread
from tokenmill import AsyncClient
from tokenmill_worker.app import Worker
from tokenmill_worker.builders import start_of
from tokenmill_worker.engines import serve_of
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.queue.job_stream import JobStream, StreamOptions
from tokenmill_worker.settings import Settings, load_settings

QUEUE = "q"


def database_url(folder: Path, name: str = "tokenmill") -> str:
    """Return the URL of a migrated SQLite database."""
    return migrated_sqlite(folder / f"{name}.db")


def settings(redis_url: str, database: str, **changes: Any) -> Settings:
    """Return the settings of a model-free worker with short times; `changes` are settings."""
    values: dict[str, Any] = {
        "redis_url": redis_url, "database_url": database, "queue": QUEUE, "model": "synthetic",
        "lease_seconds": 2.0, "drain_seconds": 5.0, "log_level": "warning",
    }  # fmt: skip
    if not changes.get("model", "synthetic").startswith("synthetic") and (
        changes.get("engine", "own") == "own"
    ):
        values["max_memory_gib"] = 0.1
    return load_settings(values | changes, strict=False)


def thread_host(config: EngineConfig) -> Callable[[], EngineThread]:
    start = start_of(config)
    return lambda: EngineThread(partial(serve_of(start.engine), start))


class PatientStream(JobStream):
    """A queue that redelivers a job however often its workers vanish, even without a token."""

    def __init__(
        self, client: Any, keys: Any, worker_id: str, options: StreamOptions, **others: Any
    ) -> None:
        options = dataclasses.replace(options, max_deliveries=10_000, max_crashes=10_000)
        super().__init__(client, keys, worker_id, options, **others)


@contextlib.asynccontextmanager
async def running_worker(
    redis_url: str,
    database: str,
    *,
    in_process: bool = False,
    stream_type: type[JobStream] = JobStream,
    **changes: Any,
) -> AsyncIterator[Worker]:
    """Run a worker that is ready to claim inside the block, and drain it after it."""
    chosen = settings(redis_url, database, **changes)
    host = None if in_process else thread_host(chosen.engine_config())
    worker = Worker(chosen, host, stream_type=stream_type)
    task = asyncio.create_task(worker.serve())
    ready = asyncio.create_task(worker.ready.wait())
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        ready.cancel()
        await task
    try:
        yield worker
    finally:
        worker.drain()
        assert await asyncio.wait_for(task, 60) == 0


@contextlib.asynccontextmanager
async def client_of(redis_url: str, database: str | None = None) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(redis_url, queue=QUEUE, database=database) as client:
        yield client
