"""Injects faults into worker processes and their engines: kills, freezes, drains, no memory, wall
clocks that jump; `server_faults.py` has those of the servers and of the network.

Each fault is a coroutine. It leaves the injector able to work again, at once or after a while.
`keep_running` replaces workers that are gone, as an orchestrator would. The caller chooses the
faults and their times, and checks what holds at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.processes import WorkerProcess, environment, marked_processes
from tests.support.wall_clock import WallClock

LEASE_S = 2.0
JUMPS_S = (90, -90, 3_600, -3_600)  # of a wall clock


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """Workers of one queue. `engines` lists in turn where their engines run."""

    queue: str
    size: int
    engines: tuple[str, ...]
    settings: dict[str, object]


FAST = WorkerGroup(
    "q", 3, ("process", "thread"),
    {"model": "synthetic?step_ms=8", "max_num_seqs": 16,
     "lease_seconds": LEASE_S},
)  # fmt: skip
REAL = WorkerGroup(
    "real", 2, ("process",),
    {
        "model": "smollm2-135m-instruct", "dtype": "float32", "num_threads": 1,
        "max_num_seqs": 4, "max_memory_gib": 0.1, "lease_seconds": 3 * LEASE_S,
    },
)  # fmt: skip
TINY = WorkerGroup(  # its model is a folder of the run's own
    "tiny", 1, ("process",),
    {
        "dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_memory_gib": 0.1,
        "lease_seconds": 3 * LEASE_S,
    },
)  # fmt: skip


class FaultInjector:
    """Workers of several groups, the fast one first; `survived` counts the faults.

    `url` and `database` are the addresses that the workers are given.
    """

    def __init__(
        self,
        url: str,
        database: str,
        folder: Path,
        chance: random.Random,
        groups: tuple[WorkerGroup, ...],
    ) -> None:
        self.url = url
        self.database = database
        self.groups = groups
        self.survived: Counter[str] = Counter()
        self.problems: list[str] = []
        self.num_started = 0
        self._workers: list[tuple[WorkerGroup, WorkerProcess]] = []
        self._folder = folder
        self._chance = chance
        self._mark = uuid.uuid4().hex
        self._env = environment(folder, self._mark)
        self._numbers = {group.queue: itertools.count() for group in groups}
        self._frozen: set[str] = set()
        self._clocks: dict[str, WallClock] = {}  # by the worker's name
        self.producers_clock = WallClock(folder / "producers-clock")
        self._others = tuple(group.queue for group in groups if group.queue != FAST.queue)

    @property
    def faults(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            self.kill_worker, self.kill_worker, self.kill_other_worker, self.kill_every_worker,
            self.freeze_worker,
            self.kill_engine, self.kill_other_engine, self.freeze_engine, self.signal_engine,
            self.starve_engine,
            self.drain_worker, self.drain_other_worker, self.hurry_worker,
            self.move_clock, self.move_other_clock, self.move_producers_clock,
        ]  # fmt: skip

    # ── workers ──

    @property
    def workers(self) -> list[WorkerProcess]:
        return [worker for _, worker in self._workers]

    async def keep_running(self) -> None:
        """Keep every group at its size: start a worker for each that has ended, until cancelled."""
        while True:
            for gone in [item for item in self._workers if not item[1].is_alive]:
                self._workers.remove(gone)
                self.problems += gone[1].problems()
                gone[1].end()
            for group in self.groups:
                serving = [w for t, w in self._workers if t is group and not w.is_leaving]
                for _ in range(group.size - len(serving)):
                    self._start_worker(group)
            await asyncio.sleep(0.1)

    def _start_worker(self, group: WorkerGroup) -> None:
        number = next(self._numbers[group.queue])
        in_process = group.engines[number % len(group.engines)] == "process"
        name = f"{group.queue}{number}"
        clock = self._clocks[name] = WallClock(self._folder / f"{name}-clock")
        worker = WorkerProcess(
            name, self.url, self.database, self._folder / f"{name}.log",
            env=clock.environment(self._env), queue=group.queue,
            in_process=in_process, drain_seconds=1.0, max_crashes=6,
            **group.settings,
        )  # fmt: skip
        if not in_process:  # a poisonous prompt takes the whole process with it
            worker.may_end_with.add(-signal.SIGKILL)
        self._workers.append((group, worker))
        self.num_started += 1

    def _serving(self, *queues: str) -> list[WorkerProcess]:
        return [
            worker
            for group, worker in self._workers
            if worker.is_alive
            and not worker.is_leaving
            and worker.name not in self._frozen
            and group.queue in queues
        ]

    def _pick(self, *queues: str) -> WorkerProcess | None:
        serving = self._serving(*queues)
        return self._chance.choice(serving) if serving else None

    async def _pick_engine(self, *queues: str) -> psutil.Process | None:
        """Pick the engine of a worker that has been ready.

        A worker whose first engine cannot load ends and reports it, so it is no target.
        """
        for _ in range(50):
            ready = [worker for worker in self._serving(*queues) if worker.is_ready]
            engines = [engine for worker in ready if (engine := worker.engine()) is not None]
            if engines:
                return self._chance.choice(engines)
            await asyncio.sleep(0.2)
        return None

    async def wait_until_ready(self, timeout_s: float = 120.0) -> None:
        """Wait until at least one worker of each group is ready."""
        async with asyncio.timeout(timeout_s):
            for group in self.groups:
                while not any(w.is_ready for w in self._serving(group.queue)):  # noqa: ASYNC110 - it is a process
                    await asyncio.sleep(0.1)

    # ── faults of workers ──

    async def _kill(self, *queues: str) -> None:
        if (worker := self._pick(*queues)) is not None:
            worker.kill()
            self.survived["workers killed"] += 1

    async def kill_worker(self) -> None:
        await self._kill(FAST.queue)

    async def kill_other_worker(self) -> None:
        await self._kill(*self._others)

    async def kill_every_worker(self) -> None:
        for worker in self._serving(FAST.queue, *self._others):
            worker.kill()
        self.survived["all workers killed"] += 1

    async def freeze_worker(self) -> None:
        """Stop a worker for longer than its lease, so that its jobs belong to others when it
        continues.
        """
        if (worker := self._pick(FAST.queue)) is not None:
            self._frozen.add(worker.name)
            worker.send(signal.SIGSTOP)
            await asyncio.sleep(LEASE_S * self._chance.uniform(1.2, 2))
            worker.send(signal.SIGCONT)
            self._frozen.discard(worker.name)
            self.survived["workers frozen past their lease"] += 1

    async def _drain(self, *queues: str) -> None:
        if (worker := self._pick(*queues)) is not None:
            worker.ask_to_end()
            await worker.wait()
            self.survived["workers drained"] += 1

    async def drain_worker(self) -> None:
        await self._drain(FAST.queue)

    async def drain_other_worker(self) -> None:
        await self._drain(*self._others)

    async def hurry_worker(self) -> None:
        """Send SIGTERM twice, the second time within the grace period."""
        if (worker := self._pick(FAST.queue)) is not None:
            worker.ask_to_end()
            await asyncio.sleep(self._chance.uniform(0.0, 0.5))
            number = self._chance.choice([signal.SIGTERM, signal.SIGINT])
            # it may come when the event loop, and its handlers, are gone already
            worker.may_end_with.add(-number)
            worker.ask_to_end(number)
            await worker.wait()
            self.survived["workers hurried out"] += 1

    # ── wall clocks: they stay wrong, and the next jump adds to this one ──

    def _jump(self, clock: WallClock, whose: str) -> None:
        seconds = self._chance.choice(JUMPS_S)
        clock.jump(seconds)
        self.survived[f"{whose} wall clock moved by {seconds} s"] += 1

    async def _move_clock(self, *queues: str) -> None:
        """Move the wall clock of a worker and of its engine."""
        if (worker := self._pick(*queues)) is not None:
            self._jump(self._clocks[worker.name], "a worker's")

    async def move_clock(self) -> None:
        await self._move_clock(FAST.queue)

    async def move_other_clock(self) -> None:
        await self._move_clock(*self._others)

    async def move_producers_clock(self) -> None:
        self._jump(self.producers_clock, "the producers'")

    # ── faults of engines: the worker itself goes on ──

    async def _signal_engine(self, number: int, what: str, *queues: str) -> None:
        if (engine := await self._pick_engine(*queues)) is not None:
            with contextlib.suppress(psutil.Error):
                engine.send_signal(number)
                self.survived[what] += 1

    async def kill_engine(self) -> None:
        await self._signal_engine(signal.SIGKILL, "engines killed", FAST.queue)

    async def kill_other_engine(self) -> None:
        await self._signal_engine(signal.SIGKILL, "engines killed", *self._others)

    async def signal_engine(self) -> None:
        """Send SIGTERM and SIGINT to an engine; only its worker decides when it ends."""
        for number in (signal.SIGTERM, signal.SIGINT):
            await self._signal_engine(number, "engines sent SIGTERM and SIGINT", *self._others)

    async def freeze_engine(self) -> None:
        if (engine := await self._pick_engine(FAST.queue, *self._others)) is not None:
            with contextlib.suppress(psutil.Error):
                engine.send_signal(signal.SIGSTOP)
                await asyncio.sleep(self._chance.uniform(0.5, 2 * LEASE_S))
                self.survived["engines frozen"] += 1
            with contextlib.suppress(psutil.Error):
                engine.send_signal(signal.SIGCONT)

    async def starve_engine(self) -> None:
        """Allow an engine no more memory than it has, for a while; what it asks for is refused."""
        if (engine := await self._pick_engine(*self._others, FAST.queue)) is not None:
            for _, worker in self._workers:
                worker.has_starved |= worker.engine() == engine
            with contextlib.suppress(psutil.Error):
                _, most = engine.rlimit(psutil.RLIMIT_AS)
                engine.rlimit(psutil.RLIMIT_AS, (engine.memory_info().vms // 2, most))
                await asyncio.sleep(self._chance.uniform(0.5, 2.0))
                self.survived["engines without memory"] += 1
                engine.rlimit(psutil.RLIMIT_AS, (most, most))

    # ── the end ──

    async def drain_all(self) -> None:
        """Drain all workers and record a problem for each one that does not end in order.

        Problems are a wrong exit status, a timeout, and processes or temporary files that are left.
        """
        workers, self._workers = [worker for _, worker in self._workers], []
        for worker in workers:
            worker.ask_to_end()
        for worker in workers:
            try:
                await worker.wait()
            except TimeoutError as error:
                self.problems.append(str(error))
                worker.kill()
            self.problems += worker.problems()
            worker.end()
        _, alive = await asyncio.to_thread(
            psutil.wait_procs, marked_processes(self._mark), timeout=30
        )
        self.problems += [f"process {process.pid} is left" for process in alive]
        self.problems += [f"file {path} is left" for path in (self._folder / "tmp").iterdir()]

    def end(self) -> None:
        for _, worker in self._workers:
            worker.send(signal.SIGCONT)
            worker.end()
        for process in marked_processes(self._mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
