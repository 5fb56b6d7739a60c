"""All faults at random, over a real Valkey and PostgreSQL.

Workers are killed, frozen, drained, cut off and restarted. Jobs and subscribers come in meanwhile.
At the end an independent checker counts.

`--rounds 2` is the short form, `--rounds 200` the long one. The seed is printed; `CHAOS_SEED`
repeats a run's choices, not its timing.
"""

import asyncio
import dataclasses
import gc
import os
import random
import time

import pytest
import sqlalchemy

from tests.chaos.checker import Violation, left_in_redis, states_of, violations
from tests.chaos.clients import Subscribers, cancel, submit
from tests.chaos.fault_injector import FAST, REAL, FaultInjector
from tests.chaos.witness import Witness
from tests.chaos.workload import (
    NUM_KINDS,
    NUM_REAL_KINDS,
    Workload,
    kind_of_job,
    kind_of_real_job,
    undisturbed,
)
from tests.support.leaks import leaked_keys
from tests.support.worker import database_url, running_worker
from tokenmill import AsyncClient, Client
from tokenmill_worker.record import migrate

pytestmark = [
    pytest.mark.redis,
    pytest.mark.postgres,
    pytest.mark.chaos,
    pytest.mark.model,
    pytest.mark.timeout(7200),
    # When the server dies, SQLAlchemy forgets a pool's idle connections without closing them.
    pytest.mark.filterwarnings(
        "ignore:.*psycopg.Connection.*was deleted while still open:ResourceWarning"
    ),
]

SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1 << 32)  # noqa: TID251
MIN_JOBS = 300
MIN_FAULTS = 20
LONG = 20  # rounds from which on the real model has two workers


def print_line(words):
    print(f"chaos: {words}", flush=True)  # noqa: T201


async def answers_of(redis_url, folder, kinds, **settings):
    folder.mkdir()
    database = database_url(folder)
    async with (
        running_worker(redis_url, database, **settings),
        AsyncClient(redis_url, queue=str(settings["queue"]), database=database) as client,
    ):
        return await undisturbed(client, kinds)


@pytest.fixture
async def workloads(redis_url, tmp_path):
    """Workloads of the model-free and the real engine, with the answers of an undisturbed run."""
    chance = random.Random(SEED)
    kinds = [kind_of_job(number) for number in range(NUM_KINDS)]
    real_kinds = [kind_of_real_job(number) for number in range(NUM_REAL_KINDS)]
    fast, real = await asyncio.gather(
        answers_of(redis_url, tmp_path / "fast", kinds, queue=FAST.queue),
        answers_of(
            redis_url,
            tmp_path / "real",
            real_kinds,
            queue=REAL.queue,
            in_process=True,
            **{**REAL.settings, "lease_seconds": 30},
        ),
    )
    return Workload(kinds, fast, chance), Workload(real_kinds, real, chance, with_poison=False)


class Load:
    """All parties at one queue: producers that submit and cancel, subscribers, and the witness."""

    def __init__(self, url, database, queue, workload, chance):
        self.queue = queue
        self.wanted = {}
        self.problems = []
        self._url = url
        self._database = database
        self._workload = workload
        self._chance = chance
        self._cancelling = []

    async def __aenter__(self):
        self.client = await AsyncClient(
            self._url, queue=self.queue, database=self._database
        ).__aenter__()
        self.threaded = Client(self._url, queue=self.queue, database=self._database)
        self.subscribers = Subscribers(self.client, self.threaded, self._chance)
        self.witness = Witness(self._url, self.queue)
        self._witnessing = asyncio.create_task(self.witness.run())
        return self

    async def __aexit__(self, *_):
        self._witnessing.cancel()
        await asyncio.gather(self._witnessing, *self._cancelling, return_exceptions=True)
        await self.witness.close()
        self.threaded.close()
        await self.client.close()

    async def submit(self, number):
        """Submit that many jobs, ten at a time."""
        for first in range(0, number, 10):
            await asyncio.gather(*(self._submit_one() for _ in range(min(10, number - first))))

    async def _submit_one(self):
        ask = self._workload.next()
        key = f"{self.queue}-{self._chance.getrandbits(64)}"
        calls = [submit(self.client, key, **ask.arguments) for _ in range(1 + ask.is_asked_twice)]
        ids = set(await asyncio.gather(*calls))
        job = ids.pop()
        if ids:
            self.problems.append(Violation("duplicate", f"key {key} made the jobs {job} and {ids}"))
        self.wanted[job] = ask.wanted
        self.subscribers.attend(job)
        if ask.cancel_after_s is not None:
            self._cancelling.append(asyncio.create_task(self._cancel(job, ask.cancel_after_s)))

    async def _cancel(self, job, after_s):
        """Cancel a job. If the answer is "cancelled", the job must end as cancelled."""
        if await cancel(self.client, job, after_s) == "cancelled":
            self.wanted[job] = dataclasses.replace(
                self.wanted[job], states=frozenset({"cancelled"})
            )


async def test_chaos(make_valkey, own_postgres, workloads, tmp_path, rounds):
    chance = random.Random(SEED + 1)
    database = own_postgres.create_database()
    migrate.upgrade(database)
    valkey = make_valkey(settings={"appendfsync": "always"})
    groups = (FAST, dataclasses.replace(REAL, size=2 if rounds >= LONG else 1))
    injector = FaultInjector(valkey, own_postgres, database, tmp_path, chance, groups)
    started = time.monotonic()
    print_line(f"seed {SEED}, {rounds} rounds")
    keeping_up = asyncio.create_task(injector.keep_running())
    try:
        async with (
            Load(valkey.url, database, FAST.queue, workloads[0], chance) as fast,
            Load(valkey.url, database, REAL.queue, workloads[1], chance) as real,
        ):
            loads = (fast, real)
            await injector.wait_until_ready()
            await inject_faults(injector, loads, rounds, chance)
            await wait_for_rows(injector, sum(len(load.wanted) for load in loads), 120 + rounds)
            for load in loads:
                await load.subscribers.wait_for_ends(90)
            keeping_up.cancel()
            await asyncio.gather(keeping_up, return_exceptions=True)
            await injector.drain_all()
            found = await asyncio.to_thread(find_violations, injector, loads)
    finally:
        keeping_up.cancel()
        injector.end()
    report(injector, loads, found, time.monotonic() - started)
    gc.collect()  # while the filter above holds
    assert found == [], f"seed {SEED}"


async def inject_faults(injector, loads, rounds, chance):
    """Rounds of jobs and faults; no fault comes again before every other has come."""
    fast, real = loads
    per_round = max(3, -(-MIN_FAULTS // rounds))
    bag = []
    for number in range(rounds):
        storm = []
        jobs = asyncio.create_task(fast.submit(max(30, -(-MIN_JOBS // rounds))))
        real_jobs = asyncio.create_task(real.submit(max(1, 12 // rounds)))
        for _ in range(per_round):
            await asyncio.sleep(chance.uniform(0.1, 1.0))
            bag = bag or chance.sample(injector.faults, len(injector.faults))
            storm.append(asyncio.create_task(bag.pop()()))
        await asyncio.gather(jobs, real_jobs, *storm)
        if number % 10 == 9:
            count = sum(injector.survived.values())
            print_line(
                f"round {number + 1}: {count} faults, {len(fast.wanted)} + {len(real.wanted)} "
                "jobs accepted"
            )


async def wait_for_rows(injector, number, timeout_s):
    """Wait until every accepted job is recorded.

    After the timeout every worker reports what it does.
    """
    engine = sqlalchemy.create_engine(injector.database)
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            with engine.connect() as connection:
                if (
                    connection.execute(sqlalchemy.text("select count(*) from jobs")).scalar()
                    >= number
                ):
                    return
            await asyncio.sleep(0.5)
    finally:
        engine.dispose()
    injector.ask_what_they_do()
    await asyncio.sleep(2)


def find_violations(injector, loads):
    wanted = {job: item for load in loads for job, item in load.wanted.items()}
    received = {job: item for load in loads for job, item in load.subscribers.received.items()}
    found = [Violation("wrong", words) for words in injector.problems]
    found += violations(injector.database, wanted, received)
    with injector.valkey.client() as redis:
        found += [Violation("wrong", words) for words in leaked_keys(redis)]
        for load in loads:
            states = states_of(injector.database, load.queue)
            found += (
                load.problems + left_in_redis(redis, load.queue, states) + load.witness.violations()
            )
    return found


def report(injector, loads, found, seconds):
    fast, real = loads
    survived = ", ".join(f"{count} × {name}" for name, count in sorted(injector.survived.items()))
    kinds = [item.kind for item in found]
    print_line(
        f"{sum(injector.survived.values())} faults survived ({survived}; {injector.num_started} "
        "workers started); "
        f"{len(fast.wanted)} jobs on the model-free engine and {len(real.wanted)} on the real "
        "model, "
        f"{fast.witness.num_heard + real.witness.num_heard} chunks overheard, in {seconds:.0f} s: "
        f"{kinds.count('loss')} losses, {kinds.count('duplicate')} duplicates, "
        f"{kinds.count('wrong')} other violations"
    )
    for item in found[:40]:
        print_line(f"  {item}")
