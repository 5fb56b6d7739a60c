"""Systems that `ops/bench queue` compares: our queue, Celery and arq, each on a server of its own.

A system submits jobs, runs one worker and reads the results, each as its documentation recommends.
Every worker publishes every token on a channel of the job, so that the traffic is the same.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, BinaryIO, ClassVar

import redis

from ops.benchmarks.peers.environments import ROOT, PeerEnvironment
from ops.benchmarks.peers.whole_way import QUEUE, WholeWay
from ops.benchmarks.queue.peers import celery_app
from tokenmill import AsyncClient, Client
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import ValkeyServer

ARQ_VERSION = "0.28.0"
SYNTHETIC = "synthetic"
PACED = "synthetic?step_ms=20"  # 32 sequences then produce 1,600 tokens a second
_WARM_UP = 50
_START_TIMEOUT_S = 120.0

Say = Callable[[str], None]


class QueueSystem(ABC):
    """Runs one round of one system."""

    name: ClassVar[str]

    def __init__(self, say: Say, log: BinaryIO) -> None:
        """Set up; `log` receives the output of the workers."""
        self._say, self._log = say, log

    def measure(self, jobs: int, tokens: int) -> dict[str, float]:
        with (
            ValkeyServer(at_death=signal.SIGKILL) as server,
            redis.Redis.from_url(server.url) as probe,
        ):
            self._say(f"{self.name}: handing in")
            few = jobs // 4
            figures = {"submit_one_jobs_s": few / self.submit_one_by_one(server.url, few, tokens)}
            probe.flushall()
            before = _info(probe, "memory", "used_memory")
            figures["submit_many_jobs_s"] = jobs / self.submit_many(server.url, jobs, tokens)
            figures["bytes_per_job"] = (_info(probe, "memory", "used_memory") - before) / jobs
            probe.flushall()
            probe.script_flush()
        return figures | self.whole_way(jobs, tokens)

    @abstractmethod
    def submit_one_by_one(self, url: str, jobs: int, tokens: int) -> float:
        """Submit the jobs one after the other; return the seconds taken."""

    @abstractmethod
    def submit_many(self, url: str, jobs: int, tokens: int) -> float:
        """Submit the jobs together where the system can; return the seconds taken."""

    @abstractmethod
    def whole_way(self, jobs: int, tokens: int) -> dict[str, float]:
        """Return `jobs_s`, `tokens_s`, `commands_per_job` and further figures of this system."""


class Tokenmill(QueueSystem):
    """Our queue. Results are stored in SQLite too, in one transaction with the usage.

    The other systems keep results in Valkey only.
    """

    name = "tokenmill"

    def submit_one_by_one(self, url: str, jobs: int, tokens: int) -> float:
        with Client(url, queue=QUEUE) as client:
            started = time.perf_counter()
            for number in range(jobs):
                client.submit(**_job(number, tokens))
            return time.perf_counter() - started

    def submit_many(self, url: str, jobs: int, tokens: int) -> float:
        with Client(url, queue=QUEUE) as client:
            started = time.perf_counter()
            client.submit_many(_job(number, tokens) for number in range(jobs))
            return time.perf_counter() - started

    def whole_way(self, jobs: int, tokens: int) -> dict[str, float]:
        self._say(f"{self.name}: a worker starts")
        service = WholeWay.model_free(SYNTHETIC, self._log)
        try:
            service.stream_jobs(_WARM_UP, tokens)
            self._say(f"{self.name}: the whole way")
            with _counted(service.url) as commands:
                seconds = asyncio.run(_run_all(service.url, service.database, jobs, tokens))
            self._say(f"{self.name}: with subscribers")
            chunks_s = service.stream_jobs(min(jobs, 64), 4 * tokens)["chunks_s"]
        finally:
            service.close()
        return {"jobs_s": jobs / seconds, "tokens_s": jobs * tokens / seconds,
                "commands_per_job": commands[0] / jobs,
                **self._at_pace(tokens), "chunks_s": chunks_s}  # fmt: skip

    def _at_pace(self, tokens: int) -> dict[str, float]:
        """Measure waiting times beside an engine whose steps take time, as a model's steps do."""
        service = WholeWay.model_free(PACED, self._log)
        try:
            service.stream_jobs(8, tokens)
            return service.stream_jobs(32, 8 * tokens) | service.single_jobs(20)
        finally:
            service.close()


async def _run_all(url: str, database: str, jobs: int, tokens: int) -> float:
    async with AsyncClient(url, queue=QUEUE, database=database) as client:
        started = time.perf_counter()
        handles = await client.submit_many(_job(number, tokens) for number in range(jobs))
        results = await asyncio.gather(
            *(client.result(str(handle), timeout=300) for handle in handles)
        )
        seconds = time.perf_counter() - started
    wrong = [result for result in results if result.usage.completion_tokens != tokens]
    if wrong:
        raise RuntimeError(f"{len(wrong)} jobs have not the tokens that were asked for")
    return seconds


def _job(number: int, tokens: int) -> dict[str, Any]:
    return {
        "prompt": f"Question {number}: why is the sky blue?",
        "max_tokens": tokens,
        "ignore_eos": True,
    }


class CeleryTasks(QueueSystem):
    """Celery: one task per job, early acknowledgement, results in Valkey.

    The solo pool makes it one process, as ours is.
    """

    name = "celery"

    def submit_one_by_one(self, url: str, jobs: int, tokens: int) -> float:
        task = celery_app.make_task(url)
        started = time.perf_counter()
        for number in range(jobs):
            task.delay(f"Question {number}: why is the sky blue?", tokens)
        return time.perf_counter() - started

    submit_many = submit_one_by_one  # Celery has no call for many tasks

    def whole_way(self, jobs: int, tokens: int) -> dict[str, float]:
        from celery.result import ResultSet

        with ValkeyServer(at_death=signal.SIGKILL) as server, ExitStack() as undo:
            command = [sys.executable, "-m", "celery", "-A",
                       "ops.benchmarks.queue.peers.celery_app", "worker",
                       "--pool", "solo", "--loglevel", "error", "--without-gossip",
                       "--without-mingle"]  # fmt: skip
            worker = GuardedProcess(command, at_death=signal.SIGKILL,
                            env=os.environ | {"BENCH_BROKER": server.url},
                            output=self._log)  # fmt: skip
            undo.callback(worker.end, signal.SIGTERM)
            task = celery_app.make_task(server.url)
            ResultSet([task.delay("warm up", tokens) for _ in range(_WARM_UP)]).join_native(
                timeout=_START_TIMEOUT_S
            )
            self._say(f"{self.name}: the whole way")
            with _counted(server.url) as commands:
                started = time.perf_counter()
                answers = ResultSet(
                    [
                        task.delay(f"Question {number}: why is the sky blue?", tokens)
                        for number in range(jobs)
                    ]
                ).join_native(timeout=600)
                seconds = time.perf_counter() - started
        _check(len(answers), jobs)
        return {
            "jobs_s": jobs / seconds,
            "tokens_s": jobs * tokens / seconds,
            "commands_per_job": commands[0] / jobs,
        }


class Arq(QueueSystem):
    """arq, in an environment of its own, built on first use; its driver prints seconds as JSON."""

    name = "arq"

    def submit_one_by_one(self, url: str, jobs: int, tokens: int) -> float:
        return self._drive(url, "one", jobs, tokens)

    def submit_many(self, url: str, jobs: int, tokens: int) -> float:
        return self._drive(url, "many", jobs, tokens)

    def whole_way(self, jobs: int, tokens: int) -> dict[str, float]:
        with ValkeyServer(at_death=signal.SIGKILL) as server, ExitStack() as undo:
            worker = GuardedProcess(
                [*self._driver(), "worker", server.url], at_death=signal.SIGKILL, output=self._log
            )
            undo.callback(worker.end, signal.SIGTERM)
            self._drive(server.url, "whole", _WARM_UP, tokens)
            self._say(f"{self.name}: the whole way")
            with _counted(server.url) as commands:
                seconds = self._drive(server.url, "whole", jobs, tokens)
        return {
            "jobs_s": jobs / seconds,
            "tokens_s": jobs * tokens / seconds,
            "commands_per_job": commands[0] / jobs,
        }

    def _driver(self) -> list[str]:
        python = PeerEnvironment("arq").ensure([f"arq=={ARQ_VERSION}"], self._say)
        return [str(python), str(ROOT / "ops" / "benchmarks" / "queue_peers" / "arq_driver.py")]

    def _drive(self, url: str, what: str, jobs: int, tokens: int) -> float:
        command = [*self._driver(), what, url, str(jobs), str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"arq's driver failed: {done.stderr.strip()[-300:]}")
        return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def _check(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{found} results of {wanted}")


@contextmanager
def _counted(url: str) -> Iterator[list[float]]:
    """Count the commands that the server runs inside the block; those inside scripts do not count.

    The yielded list holds the number when the block ends.
    """
    counted = [0.0]
    with redis.Redis.from_url(url) as probe:
        before = _info(probe, "stats", "total_commands_processed")
        yield counted
        counted[0] = _info(probe, "stats", "total_commands_processed") - before - 1


def _info(probe: "redis.Redis", section: str, name: str) -> float:
    found: Any = probe.info(section)
    return float(found[name])
