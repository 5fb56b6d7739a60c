"""Systems that `ops/bench queue` compares: our queue, Celery and arq, each on a server of its own.

A system submits jobs, runs one worker and reads the results, each as its documentation recommends.
Every worker publishes every token on a channel of the job, so that the traffic is the same.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import redis

from ops.benchmarks.peers.environments import PeerEnvironment
from ops.demonstration.stack import DemoStack
from tokenmill import AsyncClient, Client
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import ValkeyServer

ARQ_VERSION = "0.28.0"
DRIVERS = Path(__file__).parent / "peers"
QUEUE = "bench"
ROOM = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "num_blocks": 16_385}
_WARM_UP = 50  # jobs

Say = Callable[[str], None]


class QueueSystem(Protocol):
    def submit(self, url: str, jobs: int, tokens: int, together: bool) -> float:
        """Submit jobs one by one, or together where the system can; return the seconds taken."""

    def whole_way(self, jobs: int, tokens: int) -> dict[str, float]:
        """Return `jobs_s`, `tokens_s` and `commands_per_job`."""


def systems(log: BinaryIO, say: Say) -> dict[str, Callable[[], QueueSystem]]:
    """Return how to make each system; `log` receives the output of the workers."""

    def arq() -> QueueSystem:
        python = PeerEnvironment("arq").ensure([f"arq=={ARQ_VERSION}"], say)
        return Peer([str(python), str(DRIVERS / "arq_driver.py")], log)

    return {
        "tokenmill": Tokenmill,
        "celery": lambda: Peer([sys.executable, str(DRIVERS / "celery_driver.py")], log),
        "arq": arq,
    }


def measure(system: QueueSystem, jobs: int, tokens: int) -> dict[str, float]:
    """Run one round of one system."""
    with (
        ValkeyServer(at_death=signal.SIGKILL) as server,
        redis.Redis.from_url(server.url) as probe,
    ):
        few = max(1, jobs // 4)
        one_by_one = few / system.submit(server.url, few, tokens, together=False)
        probe.flushall()
        before = _info(probe, "memory", "used_memory")
        together = jobs / system.submit(server.url, jobs, tokens, together=True)
        kept = (_info(probe, "memory", "used_memory") - before) / jobs
    handed_in = {
        "submit_one_jobs_s": one_by_one,
        "submit_many_jobs_s": together,
        "bytes_per_job": kept,
    }
    return handed_in | system.whole_way(jobs, tokens)


class Tokenmill:
    """Our queue. Results are stored in SQLite too, in one transaction with the usage.

    The other systems keep results in Valkey only.
    """

    def submit(self, url: str, jobs: int, tokens: int, together: bool) -> float:
        with Client(url, queue=QUEUE) as client:
            started = time.perf_counter()
            if together:
                client.submit_many(_job(number, tokens) for number in range(jobs))
            else:
                for number in range(jobs):
                    client.submit(**_job(number, tokens))
            return time.perf_counter() - started

    def whole_way(self, jobs: int, tokens: int) -> dict[str, float]:
        with DemoStack("synthetic", QUEUE, ROOM) as stack:
            stack.start(lambda _: None)
            asyncio.run(_run_all(stack, _WARM_UP, tokens))
            with _counted(stack.redis_url) as commands:
                seconds = asyncio.run(_run_all(stack, jobs, tokens))
        return _rates(seconds, commands, jobs, tokens)


async def _run_all(stack: DemoStack, jobs: int, tokens: int) -> float:
    async with AsyncClient(stack.redis_url, queue=QUEUE, database=stack.database_url) as client:
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
    prompt = f"Question {number}: why is the sky blue?"
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}


class Peer:
    """Another queue; its worker and its producer are processes of its `driver`."""

    def __init__(self, driver: list[str], log: BinaryIO) -> None:
        self._driver, self._log = driver, log

    def submit(self, url: str, jobs: int, tokens: int, together: bool) -> float:
        return self._drive("many" if together else "one", url, jobs, tokens)

    def whole_way(self, jobs: int, tokens: int) -> dict[str, float]:
        with ValkeyServer(at_death=signal.SIGKILL) as server, ExitStack() as undo:
            command = [*self._driver, "worker", server.url]
            worker = GuardedProcess(command, at_death=signal.SIGKILL, output=self._log)
            undo.callback(worker.end, signal.SIGTERM)
            self._drive("whole", server.url, _WARM_UP, tokens)
            with _counted(server.url) as commands:
                seconds = self._drive("whole", server.url, jobs, tokens)
        return _rates(seconds, commands, jobs, tokens)

    def _drive(self, what: str, url: str, jobs: int, tokens: int) -> float:
        command = [*self._driver, what, url, str(jobs), str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{self._driver[-1]} failed: {done.stderr.strip()[-300:]}")
        return float(json.loads(done.stdout.splitlines()[-1])["seconds"])


def _rates(seconds: float, commands: list[float], jobs: int, tokens: int) -> dict[str, float]:
    return {
        "jobs_s": jobs / seconds,
        "tokens_s": jobs * tokens / seconds,
        "commands_per_job": commands[0] / jobs,
    }


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
