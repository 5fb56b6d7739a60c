"""The whole service as a measured engine: Valkey, a worker and its engine, SQLite, and subscribers.

Every part is a process of its own, as in production; the subscribers, one per job, share this
process. A round is timed from the first submit to the last subscriber's end, which includes SQL's
commit before it. Each round is a tenant of its own, so that it finds no prefix of an earlier one.
All processes are on one machine and read one monotonic clock.
"""

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ops.benchmarks.measure.figures import Arrivals
from ops.benchmarks.measure.protocol import EngineOptions, MeasuredEngine, Round, serve
from ops.benchmarks.measure.workload_files import WorkloadRequest
from ops.benchmarks.peers.stamped_worker import NOTED_SEED
from tokenmill import AsyncClient
from tokenmill_worker.engines import kind_for, kind_named
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import ValkeyServer
from tokenmill_worker.record import migrate
from tokenmill_worker.settings import (
    Settings,
    child_environment,
    load_settings,
)

QUEUE = "bench"
START_TIMEOUT_S = 300.0
NOTED_ONE_IN = 8  # jobs; noting all of them would cost half a percent of the tokens

Passage = dict[int, float]  # number of tokens so far → time


class ReceivedTokens:
    """Tokens that one subscriber received, with the time of the first and the last.

    For a noted job, `times` has the time at which each number of tokens was reached.
    """

    def __init__(self, job: str, is_noted: bool) -> None:
        self.job = job
        self.tokens: list[int] = []
        self.first_s = self.last_s = 0.0  # monotonic
        self.times: Passage | None = {} if is_noted else None

    def take(self, tokens: Sequence[int], now: float) -> None:
        if not self.tokens:
            self.first_s = now
        self.tokens += tokens
        self.last_s = now
        if self.times is not None:
            self.times[len(self.tokens)] = now


class WholeWay(MeasuredEngine):
    """The service on one machine; its parts reach the server by a Unix socket."""

    def __init__(self, options: EngineOptions) -> None:
        self._undo = ExitStack()
        folder = Path(
            self._undo.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-bench-"))
        )
        self._notes = folder / "notes"
        self._notes.touch()
        socket = folder / "valkey.sock"
        self._valkey = ValkeyServer(
            settings={"unixsocket": str(socket)}, at_death=signal.SIGKILL
        ).start()
        self._undo.callback(self._valkey.stop)
        self.url = f"unix://{socket}"
        self.database = f"sqlite:///{folder / 'results.db'}"
        migrate.upgrade(self.database)
        given, known = options.engine_settings(), kind_named(kind_for(options.model)).settings
        direct = {name: value for name, value in given.items() if name not in known}
        worker = "ops.benchmarks.peers.stamped_worker"
        command = [sys.executable, "-m", worker, str(self._notes), json.dumps(direct)]
        self._worker = GuardedProcess(
            command,
            at_death=signal.SIGKILL,
            env=child_environment(self._settings({n: given[n] for n in given if n in known})),
            output=sys.stderr.buffer,
        )
        self._undo.callback(self._worker.end, signal.SIGTERM)
        self._rounds = 0
        asyncio.run(self._wait_ready())
        self._loop = self._undo.enter_context(asyncio.Runner())
        # lives longer than a job, as a web backend's client does
        self._client = self._loop.run(self._connect())
        self._undo.callback(lambda: self._loop.run(self._client.close()))
        gc.collect()
        gc.freeze()  # garbage collection skips the benchmark's own objects from here on
        self.description = "Valkey (append-only), worker, SQLite (WAL), a subscriber per job"

    def _settings(self, engine: Mapping[str, Any]) -> Settings:
        service = {"redis_url": self.url, "database_url": self.database, "queue": QUEUE}
        return load_settings(service | dict(engine))

    async def _connect(self) -> AsyncClient:
        return AsyncClient(self.url, queue=QUEUE, database=self.database)

    async def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        async with AsyncClient(self.url, queue=QUEUE) as client:
            while not any(status.model for status in await client.workers()):
                if not self._worker.is_alive or time.monotonic() > deadline:
                    raise RuntimeError("the worker did not get ready")
                await asyncio.sleep(0.1)

    def close(self) -> None:
        self._undo.close()

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        self._rounds += 1
        return self._loop.run(self._run(requests, f"round-{self._rounds}"))

    async def _run(self, requests: tuple[WorkloadRequest, ...], tenant: str) -> Round:
        offset = self._notes.stat().st_size
        client = self._client
        cpu_before, started = self._cpu(), time.monotonic()
        jobs = await client.submit_many(
            {
                "prompt_ids": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "tenant": tenant,
                "seed": None if index % NOTED_ONE_IN else NOTED_SEED,
            }
            for index, request in enumerate(requests)
        )
        arrivals = Arrivals()
        received = await asyncio.gather(
            *(
                _subscribe(client, ReceivedTokens(str(job), index % NOTED_ONE_IN == 0), arrivals)
                for index, job in enumerate(jobs)
            )
        )
        wall_s = time.monotonic() - started
        first_s, last_s = zip(*((each.first_s, each.last_s) for each in received), strict=True)
        cpu_s = {part: seconds - cpu_before[part] for part, seconds in self._cpu().items()}
        return Round(
            wall_s=wall_s,
            tokens=[each.tokens for each in received],
            first_s=[first - started for first in first_s],
            steady_tok_s=arrivals.steady_rate(first_s, last_s),
            latency_s=self._latencies(offset, received),
            cpu_s=cpu_s,
        )

    def _latencies(self, offset: int, received: list[ReceivedTokens]) -> list[float]:
        """Return the seconds of each noted chunk, from its step's end to its subscriber.

        Waits for the worker's notes, which it writes a moment after the last chunk.
        """
        noted = {each.job: each.times for each in received if each.times is not None}
        deadline = time.monotonic() + 10.0
        while True:
            step_ends = read_notes(self._notes, offset)
            if all(max(times) in step_ends.get(job, ()) for job, times in noted.items()):
                return latencies(step_ends, noted)
            if time.monotonic() > deadline:
                raise RuntimeError("the worker's notes are not complete")
            time.sleep(0.05)

    def _cpu(self) -> dict[str, float]:
        """Return each process's CPU seconds so far; the worker's exclude its engine's."""
        pids = {
            "worker": self._worker.process.pid,
            "server": self._valkey.pid,
            "subscribers": os.getpid(),
        }
        return {part: cpu_seconds(pid) for part, pid in pids.items()}


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads, ended ones included, in seconds."""
    return time.clock_gettime(~pid << 3 | 2)  # its CPU clock, as clock_getcpuclockid(3) builds it


def read_notes(path: Path, offset: int) -> dict[str, Passage]:
    """Read the lines of a stamped worker from byte `offset` on.

    Returns, for each noted job, the end of the step that gave its nth token. The first time counts:
    a token that is given again was late before.
    """
    step_ends: dict[str, Passage] = {}
    with path.open("rb") as file:
        file.seek(offset)
        text = file.read().decode("ascii").rpartition("\n")[0]  # without a line half written
        for line in text.splitlines():
            end, job, count = line.split(" ")
            step_ends.setdefault(job, {}).setdefault(int(count), float(end))
    return step_ends


def latencies(step_ends: Mapping[str, Passage], received: Mapping[str, Passage]) -> list[float]:
    """Return seconds from a step's end to its tokens' reception, where both are known."""
    return [
        when - step_ends[job][count]
        for job, passage in received.items()
        for count, when in passage.items()
        if count in step_ends.get(job, ())
    ]


async def _subscribe(
    client: AsyncClient, received: ReceivedTokens, arrivals: Arrivals
) -> ReceivedTokens:
    async for chunk in client.stream(received.job):
        if chunk.token_ids:
            now = time.monotonic()
            received.take(chunk.token_ids, now)
            arrivals.add(now, len(chunk.token_ids))
        if chunk.error is not None:
            raise RuntimeError(f"a job failed: {chunk.error.message}")
    return received


if __name__ == "__main__":
    serve(WholeWay)
