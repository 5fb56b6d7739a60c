"""`ops/bench queue`: measures the queue alone, with a model-free engine, beside Celery and arq.

Each system gets a fresh Valkey and one worker process. Measured are jobs per second, submitted one
by one and many at once, memory per waiting job, and the whole way: submit, run, publish every token
on a channel of the job, read every result. Rounds alternate; figures are medians. Our results are
stored in SQLite too, in one transaction with the usage; the other systems keep theirs in Valkey.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import redis
from rich.console import Console

from ops.benchmarks.measure.figures import alternate, medians
from ops.benchmarks.measure.tables import show
from ops.benchmarks.peers import queue_driver
from ops.benchmarks.peers.environments import ROOT, python_with
from ops.demonstration.stack import DemoStack
from tokenmill import AsyncClient, Client
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import ValkeyServer

COLUMNS = {
    "submit_one_jobs_s": ("submitted singly\njobs/s", ""),
    "submit_many_jobs_s": ("together\njobs/s", ""),
    "jobs_s": ("whole way\njobs/s", ""),
    "bytes_per_job": ("a waiting job\nbytes", ""),
}
ARQ = "arq==0.28.0"
QUEUE = "bench"
ROOM = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_blocks": 16_384}
WARM_UP = 50  # jobs
LOG = ROOT / ".cache" / "bench-queue.log"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peer", action="append", default=[], choices=("celery", "arq"), help="repeatable"
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    console = Console(stderr=True)
    systems: dict[str, TokenmillQueue | Peer] = {"tokenmill": TokenmillQueue()}
    LOG.parent.mkdir(parents=True, exist_ok=True)
    with LOG.open("wb") as log, console.status("") as status:
        for name in options.peer:
            is_ours = name == "celery"
            python = Path(sys.executable) if is_ours else python_with(ARQ, name, status.update)
            systems[name] = Peer(name, python, log)

        def measure_one(name: str, number: int) -> dict[str, float]:
            status.update(f"round {number + 1} of {options.rounds}: {name}")
            return measure(systems[name], options.jobs, options.tokens)

        rounds = alternate(list(systems), options.rounds, measure_one)
    results = {name: medians(done) for name, done in rounds.items()}
    title = f"{options.jobs} jobs of {options.tokens} tokens, one worker; medians of rounds"
    show(Console(), title, results, COLUMNS)
    return {"results": {"queue": results}, "rounds": {"queue": rounds}}


def measure(system: TokenmillQueue | Peer, jobs: int, tokens: int) -> dict[str, float]:
    """Run one round of one system."""
    with _server() as server, redis.Redis.from_url(server.url) as probe:
        few = max(1, jobs // 4)
        one_by_one = few / system.submit("one", server.url, few, tokens)
        probe.flushall()
        before = _used_memory(probe)
        together = jobs / system.submit("many", server.url, jobs, tokens)
        kept = (_used_memory(probe) - before) / jobs
    return {
        "submit_one_jobs_s": one_by_one,
        "submit_many_jobs_s": together,
        "jobs_s": jobs / system.whole_way(jobs, tokens),
        "bytes_per_job": kept,
    }


def _server() -> ValkeyServer:
    return ValkeyServer(at_death=signal.SIGKILL)


def _used_memory(probe: redis.Redis) -> float:
    found: Any = probe.info("memory")
    return float(found["used_memory"])


class TokenmillQueue:
    def submit(self, how: str, url: str, jobs: int, tokens: int) -> float:
        """Submit jobs, `one` by one or `many` together; return the seconds taken."""
        with Client(url, queue=QUEUE) as client:
            started = time.perf_counter()
            if how == "many":
                client.submit_many(_job(number, tokens) for number in range(jobs))
            else:
                for number in range(jobs):
                    client.submit(**_job(number, tokens))
            return time.perf_counter() - started

    def whole_way(self, jobs: int, tokens: int) -> float:
        """Return the seconds from the first submit to the last result."""
        with DemoStack("synthetic", QUEUE, ROOM) as stack:
            stack.start(lambda _: None)
            asyncio.run(_run_all(stack, WARM_UP, tokens))
            return asyncio.run(_run_all(stack, jobs, tokens))


async def _run_all(stack: DemoStack, jobs: int, tokens: int) -> float:
    async with AsyncClient(stack.redis_url, queue=QUEUE, database=stack.database_url) as client:
        started = time.perf_counter()
        handles = await client.submit_many(_job(number, tokens) for number in range(jobs))
        results = await asyncio.gather(
            *(client.result(str(handle), timeout=300) for handle in handles)
        )
        seconds = time.perf_counter() - started
    assert [result.usage.completion_tokens for result in results] == [tokens] * jobs
    return seconds


def _job(number: int, tokens: int) -> dict[str, Any]:
    prompt = queue_driver.PROMPT.format(number)
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}


class Peer:
    """Another queue; its worker and its producer are processes of `peers/queue_driver.py`."""

    def __init__(self, name: str, python: Path, log: BinaryIO) -> None:
        self._driver, self._log = [str(python), queue_driver.__file__, name], log

    def submit(self, how: str, url: str, jobs: int, tokens: int) -> float:
        command = [*self._driver, how, url, str(jobs), str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{command[2]} failed: {done.stderr.strip()[-300:]}")
        return float(done.stdout.splitlines()[-1])

    def whole_way(self, jobs: int, tokens: int) -> float:
        with _server() as server:
            command = [*self._driver, "worker", server.url]
            worker = GuardedProcess(command, at_death=signal.SIGKILL, output=self._log)
            try:
                self.submit("whole", server.url, WARM_UP, tokens)
                return self.submit("whole", server.url, jobs, tokens)
            finally:
                worker.end(signal.SIGTERM)
