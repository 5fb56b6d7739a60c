"""Describes what holds the jobs of a run that have no end yet: workers, engines, queues, jobs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import psutil

from tests.chaos.plain_worker import LISTENING
from tests.chaos.processes import WorkerProcess

SETTLE_S = 2.0  # for stacks to be written
MAX_JOBS = 10
LAST_LINES = 12


async def describe(
    workers: Iterable[WorkerProcess], redis: Any, unended: Mapping[str, Iterable[str]]
) -> str:
    """Return a text. `unended` has the ids of the jobs by queue; `redis` is a client."""
    logs = [(worker, worker.words) for worker in workers]
    for worker, log in logs:
        if LISTENING in log:  # else the signal would end it
            worker.send(signal.SIGUSR1)
    await asyncio.sleep(SETTLE_S)
    lines = [line for worker, log in logs for line in _of_worker(worker, log)]
    for queue, jobs in unended.items():
        lines += _of_queue(redis, queue, list(jobs))
    return "\n".join(lines)


def _of_worker(worker: WorkerProcess, log: str) -> Iterator[str]:
    life = "runs" if worker.is_alive else f"ended with {worker.process.poll()}"
    words = [life, "was ready" if worker.is_ready else "was never ready"]
    words += ["was asked to end"] * worker.is_leaving
    yield f"worker {worker.name}: {', '.join(words)}; {_of_engine(worker)}"
    yield from ("  " + line for line in log.splitlines()[-LAST_LINES:])
    yield from ("  " + line for line in worker.words[len(log) :].splitlines())


def _of_engine(worker: WorkerProcess) -> str:
    with contextlib.suppress(psutil.Error):
        if (engine := worker.engine()) is not None:
            names = [f"{thread.user_time:.1f} s" for thread in engine.threads()]
            return f"its engine's process is {engine.status()}, threads: {', '.join(names)}"
    return "no process of an engine"


def _of_queue(redis: Any, queue: str, jobs: list[str]) -> Iterator[str]:
    base = f"tm:{{{queue}}}:"
    yield f"queue {queue}: {len(jobs)} jobs without an end; {_text(redis.hgetall(f'{base}meta'))}"
    held = (f"held:{each}" for each in ("interactive", "standard", "bulk"))
    for name in ("requeued", "delayed", "unrecorded_ends", "ready", "ready:urgent", *held):
        yield f"  {name}: {_text(redis.zrange(f'{base}{name}', 0, 20, withscores=True))}"
    for worker in sorted(redis.smembers(f"{base}workers")):
        name = worker.decode()
        status = redis.get(f"{base}worker:{name}")
        owned = _text(redis.smembers(f"{base}owned:{name}"))
        said = _text(msgspec.msgpack.decode(status)) if status else "none"
        yield f"  worker {name} owns {owned}; its status: {said}"
    for job in jobs[:MAX_JOBS]:
        fields = redis.hgetall(f"{base}job:{job}")
        fields.pop(b"request", None)
        yield f"  job {job}: {_text(fields)}"


def _text(value: Any) -> str:
    match value:
        case bytes():
            return value.decode(errors="replace")
        case dict():
            return "{" + ", ".join(f"{_text(k)}: {_text(v)}" for k, v in value.items()) + "}"
        case list() | tuple() | set():
            return "[" + ", ".join(map(_text, value)) + "]"
    return str(value)
