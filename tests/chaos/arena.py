"""Real servers and real worker processes, and what may befall them: killed, frozen, drained, cut off, restarted.

Each fault is a coroutine that leaves the arena able to work again, some at once, some after a while. Which
come, and when, is the caller's business; so is what is true at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.support.postgres import PostgresServer
from tests.support.valkey import ValkeyServer
from worker.tether import Tether

ROOT = Path(__file__).parents[2]
LEASE_S = 1.0
PATIENCE_S = 40.0


class WorkerProcess:
    """One worker; `descendants` remembers every process that it ever had."""

    def __init__(self, name: str, redis_url: str, database: str, log: Path, **settings: object) -> None:
        values = [f"{key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "tests.chaos.plain_worker", name, redis_url, database, *values]
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._tether = Tether(command, at_death=signal.SIGKILL, cwd=ROOT, output=output)

    @property
    def process(self) -> Any:
        return self._tether.process

    @property
    def is_alive(self) -> bool:
        return self._tether.is_alive

    @property
    def words(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.Error:
            return []

    async def wait(self, timeout_s: float = PATIENCE_S) -> int:
        deadline = time.monotonic() + timeout_s
        while self.is_alive:
            if time.monotonic() > deadline:
                self.send(signal.SIGUSR1)
                await asyncio.sleep(1)
                raise TimeoutError(f"worker {self.name} does not end: {self.words[-6000:]}")
            await asyncio.sleep(0.05)
        return int(self.process.wait())

    def end(self) -> None:
        self._tether.end(signal.SIGKILL)


class Arena:
    """`num_workers` workers over one Valkey and one PostgreSQL; `survived` counts the faults."""

    def __init__(
        self, valkey: ValkeyServer, postgres: PostgresServer, database: str, folder: Path, chance: random.Random
    ) -> None:
        self.valkey = valkey
        self.postgres = postgres
        self.database = database
        self.survived: Counter[str] = Counter()
        self.problems: list[str] = []
        self.workers: list[WorkerProcess] = []
        self._folder = folder
        self._chance = chance
        self._numbers = itertools.count(1)
        self._busy: set[str] = set()  # workers that are in the middle of a fault
        self._descendants: dict[int, psutil.Process] = {}

    def start_worker(self) -> WorkerProcess:
        """Every third has its engine in a process of its own."""
        number = next(self._numbers)
        worker = WorkerProcess(
            f"w{number}", self.valkey.url, self.database, self._folder / f"w{number}.log",
            model="synthetic?step_ms=8", lease_seconds=LEASE_S, heartbeat_seconds=LEASE_S / 4, poll_seconds=0.2,
            drain_seconds=1.0, max_num_seqs=32, max_crashes=50, engine_host="thread" if number % 3 else "process",
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    def _pick(self) -> WorkerProcess | None:
        free = [worker for worker in self.workers if worker.is_alive and worker.name not in self._busy]
        if not free:
            return None
        worker = self._chance.choice(free)
        self._descendants |= {child.pid: child for child in worker.children()}
        return worker

    # ── faults ──

    async def kill_worker(self) -> None:
        if (worker := self._pick()) is not None:
            worker.send(signal.SIGKILL)
            await worker.wait()
            self.start_worker()
            self.survived["workers killed"] += 1

    async def kill_engine(self) -> None:
        """Of a worker that has one; the worker itself goes on."""
        for worker in [w for w in self.workers if w.is_alive and w.name not in self._busy]:
            engines = [child for child in worker.children() if "python" in child.name()]
            self._descendants |= {child.pid: child for child in engines}
            if engines:
                with contextlib.suppress(psutil.Error):
                    engines[0].kill()
                    self.survived["engines killed"] += 1
                return

    async def freeze_worker(self) -> None:
        """Longer than its lease: it wakes as one whose jobs are others'."""
        if (worker := self._pick()) is not None:
            self._busy.add(worker.name)
            worker.send(signal.SIGSTOP)
            await asyncio.sleep(LEASE_S * self._chance.uniform(1.5, 3))
            worker.send(signal.SIGCONT)
            self._busy.discard(worker.name)
            self.survived["workers frozen past their lease"] += 1

    async def drain_worker(self) -> None:
        if (worker := self._pick()) is not None:
            self._busy.add(worker.name)
            self.start_worker()
            worker.send(signal.SIGTERM)
            status = await worker.wait()
            if status not in (0, -signal.SIGTERM):  # the latter: it had not yet got as far as listening
                self.problems.append(f"drained worker {worker.name} ended with {status}: {worker.words[-1500:]}")
            self.survived["workers drained"] += 1

    async def cut_connections(self) -> None:
        def cut() -> None:
            with contextlib.suppress(redis.RedisError), self.valkey.client() as client:
                for kind in ("normal", "pubsub"):
                    client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

        await asyncio.to_thread(cut)
        self.survived["all connections cut"] += 1

    async def crash_valkey(self) -> None:
        await asyncio.to_thread(self.valkey.restart, crash=True)
        self.survived["Valkey killed"] += 1

    async def crash_postgres(self) -> None:
        """SIGKILL to the server; its children hold the data for a moment longer."""

        def crash() -> None:
            self.postgres.kill()
            time.sleep(self._chance.uniform(0.0, 0.5))
            for attempt in range(20):
                try:
                    self.postgres.start()
                except RuntimeError:
                    if attempt == 19:
                        raise
                    time.sleep(0.3)
                else:
                    return

        await asyncio.to_thread(crash)
        self.survived["PostgreSQL killed"] += 1

    # ── the end ──

    async def drain_all(self) -> None:
        for worker in self.workers:
            self._descendants |= {child.pid: child for child in worker.children()}
            worker.send(signal.SIGTERM)
        for worker in self.workers:
            await worker.wait()

    def left_processes(self, timeout_s: float = 5.0) -> list[str]:
        """Engines whose worker is gone must go too."""
        _, alive = psutil.wait_procs(list(self._descendants.values()), timeout=timeout_s)
        return [f"process {child.pid} is left" for child in alive]

    def end(self) -> None:
        for worker in self.workers:
            worker.send(signal.SIGCONT)
            worker.end()
