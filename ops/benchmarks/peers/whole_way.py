"""The whole service as a measured engine: Valkey, a worker and its engine, SQLite, and subscribers.

Every part is a process of its own, as in production; the subscribers, one per job, share this
process. A round is timed from the first submit to the last subscriber's end, which includes SQL's
commit before it. Each round is a tenant of its own, so that it finds no prefix of an earlier one.
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
from typing import Any, BinaryIO, Self

from ops.benchmarks.measure.disturbance import cpu_seconds
from ops.benchmarks.measure.figures import of_round, percentile
from ops.benchmarks.measure.protocol import EngineOptions, Round, serve
from ops.benchmarks.measure.workload_files import Workload, WorkloadRequest
from ops.benchmarks.peers.worker_notes import NOTED_SEED, Notes
from tokenmill import AsyncClient
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import ValkeyServer
from tokenmill_worker.record import migrate

QUEUE = "bench"
START_TIMEOUT_S = 300.0
STREAM_FIGURES = (
    "latency_p50_ms",
    "latency_p99_ms",
    "calls_per_step",
    "script_ms",
    "cpu_worker_us",
    "cpu_server_us",
    "cpu_subscribers_us",
)
NOTED_ONE_IN = 8  # jobs; noting all of them would cost half a percent of the tokens


class Reading:
    """Tokens that one subscriber received, with the time of the first and the last.

    For a noted job, `times` has the time at which each number of tokens was reached.
    """

    def __init__(self, job: str, is_noted: bool) -> None:
        self.job = job
        self.tokens: list[int] = []
        self.first_s = self.last_s = 0.0  # monotonic
        self.times: dict[int, float] | None = {} if is_noted else None

    def take(self, tokens: Sequence[int], now: float) -> None:
        if not self.tokens:
            self.first_s = now
        self.tokens += tokens
        self.last_s = now
        if self.times is not None:
            self.times[len(self.tokens)] = now


class WholeWay:
    """The service on one machine.

    Its parts reach the server by a Unix socket, or by TCP as between machines if `by_tcp`.
    """

    def __init__(
        self,
        options: EngineOptions,
        log: BinaryIO | None = None,
        one_in: int = NOTED_ONE_IN,
        by_tcp: bool = False,
    ) -> None:
        self._one_in = one_in  # one job in so many is noted
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
        self.url = self._valkey.url if by_tcp else f"unix://{socket}"
        self.database = f"sqlite:///{folder / 'results.db'}"
        migrate.upgrade(self.database)
        settings = os.environ | self._settings(options)
        command = [sys.executable, "-m", "ops.benchmarks.peers.stamped_worker", str(self._notes)]
        self._worker = GuardedProcess(
            command, at_death=signal.SIGKILL, env=settings, output=log or sys.stderr.buffer
        )
        self._undo.callback(self._worker.end, signal.SIGTERM)
        self._rounds = 0
        asyncio.run(self._wait_ready())
        self._loop = self._undo.enter_context(asyncio.Runner())
        self._client = self._loop.run(
            self._connect()
        )  # lives longer than a job, as a web backend's client does
        self._undo.callback(lambda: self._loop.run(self._client.close()))
        gc.collect()
        gc.freeze()  # garbage collection skips the benchmark's own objects from here on
        link = "TCP" if by_tcp else "a Unix socket"
        self.description = (
            f"Valkey (append-only, by {link}), worker, SQLite (WAL), a subscriber per job"
        )

    @classmethod
    def model_free(cls, model: str, log: BinaryIO) -> Self:
        """Start the service with a model-free engine.

        It uses TCP, as its peers do. The worker's output goes to `log`.
        """
        options = EngineOptions(
            model=model, max_sequences=256, max_batch_tokens=8192, pool_tokens=1 << 18
        )
        return cls(options, log, one_in=1, by_tcp=True)

    def _settings(self, options: EngineOptions) -> dict[str, str]:
        fields: Mapping[str, object] = {
            "redis_url": self.url,
            "database_url": self.database,
            "queue": QUEUE,
            "model": options.model,
            "dtype": options.dtype,
            "block_size": 16,
            "max_num_batched_tokens": options.max_batch_tokens,
            "max_num_seqs": options.max_sequences,
            "num_threads": options.threads or None,
            **options.settings,
        }
        pool = {"num_blocks": options.pool_tokens // int(str(fields["block_size"])) + 1}
        given = {name: value for name, value in (pool | dict(fields)).items() if value is not None}
        return {
            f"TOKENMILL_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in given.items()
        }

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, requests: tuple[WorkloadRequest, ...]) -> Round:
        self._rounds += 1
        return self._loop.run(self._run(requests, f"round-{self._rounds}"))

    def stream_jobs(self, jobs: int, tokens: int) -> dict[str, float]:
        """Run jobs together, each with a subscriber.

        Returns chunks per second, a token's latency from engine to subscriber, and script calls.
        """
        requests = _plain_requests(jobs, tokens)
        done = self.run(requests)
        figures = of_round(Workload("plain", requests), done)
        return {
            "chunks_s": figures["output_tok_s"],
            "scripts_per_job": (done.script_calls or 0) / jobs,
            **{name: value for name, value in figures.items() if name in STREAM_FIGURES},
        }

    def single_jobs(self, count: int) -> dict[str, float]:
        """Run one job after the other on an idle worker.

        Returns the times from submit to the engine, and from submit to the subscriber's first
        token.
        """
        rounds = [self.run(_plain_requests(1, 4)) for _ in range(count)]
        waits = {
            "submit": [done.engine_s[0] for done in rounds],
            "start": [done.first_s[0] for done in rounds],
        }
        return {
            f"{name}_{rank}_ms": 1e3 * percentile(values, share)
            for name, values in waits.items()
            for rank, share in (("p50", 0.5), ("p99", 0.99))
        }

    async def _run(self, requests: tuple[WorkloadRequest, ...], tenant: str) -> Round:
        calls_before, seconds_before = self._scripts()
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
                "seed": None if index % self._one_in else NOTED_SEED,
            }
            for index, request in enumerate(requests)
        )
        readings = await asyncio.gather(
            *(
                _subscribe(client, Reading(str(job), index % self._one_in == 0))
                for index, job in enumerate(jobs)
            )
        )
        wall_s = time.monotonic() - started
        cpu_s = {part: seconds - cpu_before[part] for part, seconds in self._cpu().items()}
        notes = self._read_notes(offset, readings)
        calls, seconds = self._scripts()
        done = _round(started, wall_s, readings, notes)
        done.cpu_s = cpu_s
        done.script_calls, done.script_s = calls - calls_before, seconds - seconds_before
        received_at = {
            reading.job: reading.times for reading in readings if reading.times is not None
        }
        done.latency_s = notes.latencies(received_at)
        return done

    def _read_notes(self, offset: int, readings: list[Reading]) -> Notes:
        """Read the worker's notes; the worker writes its file a moment after the last chunk."""
        deadline = time.monotonic() + 10.0
        lengths = {
            reading.job: len(reading.tokens) for reading in readings if reading.times is not None
        }
        num_tokens = sum(len(reading.tokens) for reading in readings)
        while not (notes := Notes.read(self._notes, offset)).are_complete(lengths, num_tokens):
            if time.monotonic() > deadline:
                raise RuntimeError("the worker's notes are not complete")
            time.sleep(0.05)
        return notes

    def _cpu(self) -> dict[str, float]:
        """Return each process's CPU seconds so far; the worker's exclude its engine's."""
        pids = {
            "worker": self._worker.process.pid,
            "server": self._valkey.pid,
            "subscribers": os.getpid(),
        }
        return {part: cpu_seconds(pid) for part, pid in pids.items()}

    def _scripts(self) -> tuple[int, float]:
        """Return the number of script calls so far, and the server's seconds in them."""
        found = self._info("commandstats").get("cmdstat_evalsha", {})
        return int(found.get("calls", 0)), 1e-6 * float(found.get("usec", 0))

    def _info(self, section: str) -> Any:
        import redis

        with redis.Redis.from_url(self._valkey.url) as connection:
            return connection.info(section)


async def _subscribe(client: AsyncClient, reading: Reading) -> Reading:
    async for chunk in client.stream(reading.job):
        if chunk.token_ids:
            reading.take(chunk.token_ids, time.monotonic())
        if chunk.error is not None:
            raise RuntimeError(f"a job failed: {chunk.error.message}")
    return reading


def _plain_requests(count: int, tokens: int) -> tuple[WorkloadRequest, ...]:
    return tuple(
        WorkloadRequest(prompt=tuple(range(97, 113)), max_tokens=tokens) for _ in range(count)
    )


def _round(started: float, wall_s: float, readings: list[Reading], notes: Notes) -> Round:
    return Round(
        wall_s=wall_s,
        tokens=[reading.tokens for reading in readings],
        first_s=[reading.first_s - started for reading in readings],
        last_s=[reading.last_s - started for reading in readings],
        batch_sizes=list(notes.steps.values()),
        engine_s=[notes.submits[reading.job] - started for reading in readings],
    )


if __name__ == "__main__":
    serve(WholeWay)
