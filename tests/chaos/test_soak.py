"""A long run of the model-free engine with faults all along: no job is lost or doubled, and memory
stays flat.

`--soak-seconds` says how long jobs are submitted, of which each fifth, or every 8 s, has a fault;
`--soak-jobs 1000000` gives their number instead. One worker is spared from the faults, so that its
memory can be followed over the whole run.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import sqlalchemy

from tests.chaos.checker import Received, left_in_redis
from tests.chaos.fault_injector import FAST, LEASE_S, FaultInjector, WorkerGroup
from tests.chaos.processes import WorkerProcess
from tests.chaos.server_faults import ServerFaults
from tests.support.valkey import ControlledValkey
from tests.support.worker import database_url, running_worker
from tokenmill import AsyncClient
from tokenmill.errors import QueueFull, QueueUnavailable
from tokenmill_worker.record import migrate

pytestmark = [
    pytest.mark.redis,
    pytest.mark.postgres,
    pytest.mark.chaos,
    pytest.mark.soak,
    pytest.mark.timeout(6 * 3600),
    # When the server dies, SQLAlchemy forgets a pool's idle connections without closing them.
    pytest.mark.filterwarnings(
        "ignore:.*psycopg.Connection.*was deleted while still open:ResourceWarning"
    ),
]

SETTINGS: dict[str, Any] = {
    **FAST.settings,
    "model": "synthetic",
    "max_num_seqs": 128,
    "result_ttl_seconds": 60,
}
GROUP = WorkerGroup(FAST.queue, 1, ("thread", "process"), SETTINGS)
NUM_KINDS = 20
BATCH = 250
QUEUE_LIMIT = 4_000
LISTENED = 500  # one job in so many has a subscriber
FAULT_EVERY_S = 8.0
SAMPLE_EVERY_S = 2.0
FLAT_FROM_S = 240.0  # memory is judged in runs of at least this length
MAX_GROWTH = 1.10
SLACK_BYTES = 16 << 20


def kind_of(number: int) -> dict[str, Any]:
    number %= NUM_KINDS
    return {
        "prompt": f"question {number} " * (1 + number % 3), "max_tokens": 2 + number % 9,
        "seed": number,
        "temperature": 0.0 if number % 2 else 0.9, "stream": number % 4 == 0,
        "tenant": f"t{number % 3}", "session": f"s{number}" if number % 2 else "",
        "priority": ("interactive", "standard", "bulk")[number % 3],
    }  # fmt: skip


def print_line(words: str) -> None:
    print(f"soak: {words}", flush=True)  # noqa: T201


@dataclasses.dataclass(slots=True)
class Memory:
    """Bytes over time, of each process that lives through the whole run."""

    worker: WorkerProcess
    valkey: ControlledValkey
    samples: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_EVERY_S)
            for name, size in await asyncio.to_thread(self._sizes):
                self.samples.setdefault(name, []).append(size)

    def _sizes(self) -> list[tuple[str, int]]:
        sizes = [("client", psutil.Process().memory_info().rss)]
        try:
            with self.valkey.client(socket_timeout=1) as client:
                sizes.append(("valkey", int(client.info("memory")["used_memory"])))
        except redis.RedisError:
            pass  # it is down: the run does that
        sizes.append(("worker", psutil.Process(self.worker.process.pid).memory_info().rss))
        engine = self.worker.engine()
        if engine is not None:
            sizes.append(("engine", engine.memory_info().rss))
        return sizes

    def growths(self) -> dict[str, tuple[int, int]]:
        """Return the medians of the second and of the last quarter of the run."""
        quarters = {
            name: len(sizes) // 4 for name, sizes in self.samples.items() if len(sizes) >= 8
        }
        return {
            name: (
                int(statistics.median(self.samples[name][quarter : 2 * quarter])),
                int(statistics.median(self.samples[name][-quarter:])),
            )
            for name, quarter in quarters.items()
        }

    def problems(self) -> Iterator[str]:
        for name, (early, late) in self.growths().items():
            if late > MAX_GROWTH * early + SLACK_BYTES:
                yield (
                    f"the memory of {name} grew from {early / 2**20:.0f} to {late / 2**20:.0f} MiB"
                )


async def submit_all(
    client: AsyncClient, seconds: float, num_jobs: int, listeners: Listeners
) -> int:
    """Submit batches until the number or the time is reached; an interrupted batch is repeated
    under the same ids.
    """
    until = time.monotonic() + seconds
    for first in itertools.count(0, BATCH):
        if (first >= num_jobs) if num_jobs else (time.monotonic() >= until):
            return first
        jobs = [
            {**kind_of(number), "job_id": f"j{number}"} for number in range(first, first + BATCH)
        ]
        while True:
            try:
                await client.submit_many(jobs)
                break
            except QueueFull as refusal:
                jobs = jobs[len(refusal.accepted) :]
                await asyncio.sleep(0.05)
            except QueueUnavailable:
                await asyncio.sleep(0.2)
        listeners.attend(
            [f"j{number}" for number in range(first, first + BATCH) if number % LISTENED == 0]
        )
    raise AssertionError("unreachable")


class Listeners:
    """Subscribers of a few jobs; `received` is kept until it has been compared with the row."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()
        self.received: dict[str, Received] = {}

    def attend(self, jobs: list[str]) -> None:
        for job in jobs:
            task = asyncio.create_task(self._listen(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _listen(self, job: str) -> None:
        received = self.received[job] = Received()
        async for chunk in self._client.stream(job):
            received.receive(chunk)

    async def wait_for_ends(self) -> None:
        await asyncio.wait_for(asyncio.gather(*self._tasks), 120)


async def disturb(
    injector: FaultInjector,
    servers: ServerFaults,
    chance: random.Random,
    is_over: asyncio.Event,
    every_s: float,
) -> None:
    """Cause faults until `is_over` is set.

    The last one is finished: a worker left frozen would keep its row locks.
    """
    faults = [
        injector.kill_worker, injector.freeze_worker, injector.kill_engine, injector.drain_worker,
        servers.cut_connections,
        servers.crash_valkey, servers.freeze_valkey, servers.crash_postgres,
        servers.cut_postgres,
    ]  # fmt: skip
    bag: list[Any] = []
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_over.wait(), chance.uniform(0.5, 1.5) * every_s)
            return
        bag = bag or chance.sample(faults, len(faults))
        await bag.pop()()


def compared(
    database: str, number: int, answers: list[Any], received: dict[str, Received]
) -> list[str]:
    """Compare the jobs: one row with the kind's answer, one usage row, subscribers with that
    answer.
    """
    found: list[str] = []
    engine = sqlalchemy.create_engine(database)
    with engine.connect().execution_options(yield_per=10_000) as connection:
        seen: Counter[str] = Counter()
        for job, state, text in connection.execute(
            sqlalchemy.text("select id, state, text from jobs")
        ):
            kind = int(job[1:]) % NUM_KINDS
            seen["rows"] += 1
            seen["wrong rows"] += (state, text) != ("succeeded", answers[kind].text)
            collected = received.get(job)
            if collected is not None:
                seen["wrong subscribers"] += bool(collected.problems) or (
                    collected.status,
                    collected.text,
                ) != (
                    state,
                    text,
                )
        count = "select count(*), sum(completion_tokens) from usage"
        usage, tokens = connection.execute(sqlalchemy.text(count)).one()
    engine.dispose()
    due = sum(answers[index % NUM_KINDS].usage.completion_tokens for index in range(number))
    if seen["rows"] != number or usage != number or tokens != due:
        found.append(
            f"{number} jobs have {seen['rows']} rows, {usage} rows of usage, {tokens} tokens of "
            f"{due}"
        )
    found += [f"{seen[name]} {name}" for name in ("wrong rows", "wrong subscribers") if seen[name]]
    return found


async def test_a_long_run_with_faults_loses_no_job_and_memory_stays_flat(
    make_valkey: Any,
    own_postgres: Any,
    redis_url: str,
    tmp_path: Path,
    soak_seconds: float,
    soak_jobs: int,
) -> None:
    (tmp_path / "calm").mkdir()
    calm = database_url(tmp_path / "calm")
    async with (
        running_worker(redis_url, calm, queue=GROUP.queue, **SETTINGS),
        AsyncClient(redis_url, queue=GROUP.queue, database=calm) as client,
    ):
        ids = [await client.submit(**kind_of(number)) for number in range(NUM_KINDS)]
        answers = [await client.result(job, timeout=60) for job in ids]
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    database = own_postgres.create_database()
    migrate.upgrade(database)
    valkey = make_valkey(settings={"appendfsync": "always"})
    injector = FaultInjector(valkey.url, database, tmp_path, chance, (GROUP,))
    servers = ServerFaults(valkey, own_postgres, chance, injector.survived, 1.5 * LEASE_S)
    steady = WorkerProcess(
        "steady", valkey.url, database, tmp_path / "steady.log", queue=GROUP.queue,
        in_process=True,
        queue_limit=QUEUE_LIMIT, **SETTINGS,
    )  # fmt: skip
    memory = Memory(steady, valkey)
    started = time.monotonic()
    tasks = [asyncio.create_task(injector.keep_running())]
    try:
        async with AsyncClient(valkey.url, queue=GROUP.queue, database=database) as client:
            await injector.wait_until_ready()
            listeners = Listeners(client)
            tasks.append(asyncio.create_task(memory.watch()))
            is_over = asyncio.Event()
            every_s = FAULT_EVERY_S if soak_jobs else min(FAULT_EVERY_S, soak_seconds / 5)
            disturbing = asyncio.create_task(disturb(injector, servers, chance, is_over, every_s))
            tasks.append(disturbing)
            number = await submit_all(client, soak_seconds, soak_jobs, listeners)
            is_over.set()
            await disturbing
            await wait_for_rows(database, number, 300)
            await listeners.wait_for_ends()
        seconds = time.monotonic() - started
        for task in tasks:
            task.cancel()
        steady.ask_to_end()
        assert await steady.wait() == 0, steady.words[-3000:]
        await asyncio.gather(*tasks, return_exceptions=True)
        await injector.drain_all()
        found = injector.problems + await asyncio.to_thread(
            compared, database, number, answers, listeners.received
        )
        with valkey.client() as server:
            states = dict.fromkeys([f"j{index}" for index in range(number)], "succeeded")
            found += [
                str(item)
                for item in left_in_redis(server, GROUP.queue, states)
                if "counted" in item.words
            ]
    finally:
        for task in tasks:
            task.cancel()
        steady.end()
        injector.end()
    grown = {
        name: f"{early >> 20} → {late >> 20} MiB"
        for name, (early, late) in memory.growths().items()
    }
    print_line(
        f"seed {seed}: {number} jobs, {sum(injector.survived.values())} faults, "
        f"{len(listeners.received)} subscribers, "
        f"{seconds:.0f} s; memory "
        f"{grown if seconds >= FLAT_FROM_S else 'not judged, the run is too short'}"
    )
    if seconds >= FLAT_FROM_S:
        found += memory.problems()
    assert found == []


async def wait_for_rows(database: str, number: int, timeout_s: float) -> None:
    engine = sqlalchemy.create_engine(database)
    try:
        async with asyncio.timeout(timeout_s):
            while await asyncio.to_thread(_num_rows, engine) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.5)
    finally:
        engine.dispose()


def _num_rows(engine: sqlalchemy.Engine) -> int:
    try:
        with engine.connect() as connection:
            return int(
                connection.execute(sqlalchemy.text("select count(*) from jobs")).scalar_one()
            )
    except sqlalchemy.exc.OperationalError:
        return 0  # the server comes back
