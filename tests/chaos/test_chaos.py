"""All faults at random, over a real Valkey and PostgreSQL.

Workers are killed, frozen, drained, cut off and restarted. Jobs and subscribers come in meanwhile.
At the end an independent checker counts.

`--rounds 2` is the short form, `--rounds 200` the long one. From 20 rounds on, two workers serve a
real model too, whose steps take long. The seed is printed; `CHAOS_SEED` repeats a run's choices,
not its timing.
"""

import asyncio
import contextlib
import dataclasses
import gc
import os
import random
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from tests.chaos.checker import Violation, left_in_redis, states_of, violations
from tests.chaos.clients import Subscribers, cancel, submit
from tests.chaos.fault_injector import FAST, LEASE_S, REAL, TINY, FaultInjector
from tests.chaos.recorded_times import wrong_times
from tests.chaos.server_faults import NetworkFaults, ServerFaults
from tests.chaos.unended import describe
from tests.chaos.witness import Witness
from tests.chaos.workload import (
    NUM_KINDS,
    NUM_REAL_KINDS,
    NUM_TINY_KINDS,
    Workload,
    kind_of_job,
    kind_of_real_job,
    kind_of_tiny_job,
    undisturbed,
    with_drawn_prompt,
)
from tests.support import tiny_llama
from tests.support.leaks import leaked_keys
from tests.support.lifecycle import missing
from tests.support.postgres import PostgresServer, PostgresUnavailable
from tests.support.small_disk import mounted
from tests.support.valkey import ControlledValkey
from tests.support.worker import database_url, running_worker
from tokenmill import AsyncClient, Client
from tokenmill.transport.server_clock import ServerClock
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
MIN_JOBS = 150
MIN_FAULTS = 18
MIN_TINY_JOBS = 24
DISK_MB = 256
LONG = 20  # rounds from which on the real model has workers


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
async def workloads(redis_url, tmp_path, rounds):
    """Workloads of the model-free engine, the drawn model and, in a long run, the real one, with
    the answers of an undisturbed run.
    """
    chance = random.Random(SEED)
    kinds = [kind_of_job(number) for number in range(NUM_KINDS)]
    kinds = [
        with_drawn_prompt(kind, chance) if number % 2 else kind for number, kind in enumerate(kinds)
    ]
    tiny_kinds = [
        with_drawn_prompt(kind_of_tiny_job(number), chance) for number in range(NUM_TINY_KINDS)
    ]
    model = str(tiny_llama.save(tmp_path / "model"))
    slow = {"in_process": True, "lease_seconds": 30}
    tiny_settings = {**TINY.settings, **slow, "queue": TINY.queue, "model": model}
    fast, tiny = await asyncio.gather(
        answers_of(redis_url, tmp_path / "fast", kinds, queue=FAST.queue),
        answers_of(redis_url, tmp_path / "tiny", tiny_kinds, **tiny_settings),
    )
    found = [
        Workload(kinds, fast, chance),
        Workload(tiny_kinds, tiny, chance, with_poison=False),
    ]
    if rounds >= LONG:
        real_kinds = [kind_of_real_job(number) for number in range(NUM_REAL_KINDS)]
        settings = {**REAL.settings, **slow, "queue": REAL.queue}
        real = await answers_of(redis_url, tmp_path / "real", real_kinds, **settings)
        found.append(Workload(real_kinds, real, chance, with_poison=False))
    return found


@pytest.fixture
def servers(tmp_path):
    """Yield a Valkey and a PostgreSQL whose data lie on small disks, and the disks.

    Without the right to mount, which CI must have, the data lie in usual folders and no disk gets
    full.
    """
    with contextlib.ExitStack() as stack:
        disks = {}
        for name in ("valkey", "postgres"):
            folder = Path(tempfile.mkdtemp(prefix=f"tokenmill-{name}-"))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            with contextlib.suppress(PermissionError):
                disks[name] = stack.enter_context(mounted(folder, DISK_MB))
        if len(disks) < 2 and os.environ.get("CI") == "true":  # noqa: TID251 - the tests' own switch
            pytest.fail("CI must have it: the right to mount small disks")
        try:
            directory = disks["postgres"].folder if "postgres" in disks else None
            own = {"max_wal_size": "64MB", "min_wal_size": "32MB"}
            postgres = PostgresServer(own, directory=directory).start()
        except PostgresUnavailable as error:
            missing(str(error))
        stack.callback(postgres.stop)
        directory = disks["valkey"].folder if "valkey" in disks else None
        valkey = ControlledValkey(directory, settings={"appendfsync": "always"}).start()
        stack.callback(valkey.stop)
        yield valkey, postgres, disks if len(disks) == 2 else {}


@pytest.fixture
def proxies(servers, make_proxy):
    """Proxies by the names of those whom they connect."""
    valkey, postgres, _ = servers
    return {
        "workers and Valkey": make_proxy(valkey.port),
        "clients and Valkey": make_proxy(valkey.port),
        "workers and PostgreSQL": make_proxy(postgres.port),
    }


class Load:
    """All parties at one queue: producers that submit and cancel, subscribers, and the witness.
    `clock` is the producers' wall clock.
    """

    def __init__(self, url, direct_url, database, clock, queue, workload, chance):
        self.queue = queue
        self.wanted = {}
        self.problems = []
        self._url = url
        self._direct_url = direct_url
        self._database = database
        self._workload = workload
        self._chance = chance
        self._clock = clock
        self._cancelling = []

    async def __aenter__(self):
        self.client = await AsyncClient(
            self._url, queue=self.queue, database=self._database
        ).__aenter__()
        self.threaded = Client(self._url, queue=self.queue, database=self._database)
        for client in (self.client, self.threaded):
            client.clock = ServerClock(wall=lambda: self._clock.now_ns(time.time_ns()))
        self.subscribers = Subscribers(self.client, self.threaded, self._chance)
        self.witness = Witness(self._direct_url, self.queue)
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


async def test_no_promise_is_broken_under_random_faults(
    servers, proxies, workloads, tmp_path, rounds
):
    chance = random.Random(SEED + 1)
    valkey, postgres, disks = servers
    database = postgres.create_database()
    migrate.upgrade(database)
    port = proxies["workers and PostgreSQL"].port
    through_proxy = database.replace(f":{postgres.port}/", f":{port}/")
    tiny = dataclasses.replace(TINY, settings={**TINY.settings, "model": str(tmp_path / "model")})
    groups = (FAST, tiny, REAL)[: len(workloads)]
    injector = FaultInjector(
        proxies["workers and Valkey"].url, through_proxy, tmp_path, chance, groups
    )
    all_faults = [
        *injector.faults,
        *ServerFaults(valkey, postgres, chance, injector.survived, 1.5 * LEASE_S, disks).all,
        *NetworkFaults(proxies, chance, injector.survived).all,
    ]
    started, began_ms = time.monotonic(), time.time() * 1000
    print_line(f"seed {SEED}, {rounds} rounds")
    keeping_up = asyncio.create_task(injector.keep_running())
    url = proxies["clients and Valkey"].url
    shared = (url, valkey.url, through_proxy, injector.producers_clock)
    try:
        async with contextlib.AsyncExitStack() as stack:
            loads = [
                await stack.enter_async_context(Load(*shared, group.queue, workload, chance))
                for group, workload in zip(groups, workloads, strict=True)
            ]
            await injector.wait_until_ready()
            await inject_faults(injector, all_faults, loads, rounds, chance)
            unended = await wait_for_rows(injector, valkey, database, loads, 120 + rounds)
            for load in loads:
                await load.subscribers.wait_for_ends(90)
            keeping_up.cancel()
            await asyncio.gather(keeping_up, return_exceptions=True)
            await injector.drain_all()
            found = await asyncio.to_thread(
                find_violations, injector, valkey, database, loads, began_ms
            )
    finally:
        keeping_up.cancel()
        injector.end()
    report(injector, loads, found, time.monotonic() - started)
    gc.collect()  # while the filter above holds
    assert found == [], f"seed {SEED}\n{unended}"


async def inject_faults(injector, all_faults, loads, rounds, chance):
    """Rounds of jobs and faults; no fault comes again before every other has come."""
    fast, *slow = loads
    per_round = max(3, -(-MIN_FAULTS // rounds))
    bag = []
    for number in range(rounds):
        storm = []
        jobs = asyncio.create_task(fast.submit(max(30, -(-MIN_JOBS // rounds))))
        others = [
            asyncio.create_task(load.submit(max(least, -(-number // rounds))))
            for load, (least, number) in zip(slow, ((8, MIN_TINY_JOBS), (1, 12)), strict=False)
        ]
        for _ in range(per_round):
            await asyncio.sleep(chance.uniform(0.1, 1.0))
            bag = bag or chance.sample(all_faults, len(all_faults))
            storm.append(asyncio.create_task(bag.pop()()))
        await asyncio.gather(jobs, *others, *storm)
        if number % 10 == 9:
            count = sum(injector.survived.values())
            accepted = " + ".join(str(len(load.wanted)) for load in loads)
            print_line(f"round {number + 1}: {count} faults, {accepted} jobs accepted")


async def wait_for_rows(injector, valkey, database, loads, timeout_s):
    """Wait until every accepted job is recorded. After the timeout, describe those that are not."""
    deadline = time.monotonic() + timeout_s
    while any((missing := {load.queue: unrecorded(database, load) for load in loads}).values()):
        if time.monotonic() > deadline:
            with valkey.client() as redis:
                return await describe(injector.workers, redis, missing)
        await asyncio.sleep(0.5)
    return ""


async def wait_for_sweeps(injector, valkey, loads, timeout_s):
    """Wait until the living workers have removed those that were killed."""
    deadline = time.monotonic() + timeout_s
    with valkey.client() as redis:
        while time.monotonic() < deadline:
            keys = [f"tm:{{{load.queue}}}:workers" for load in loads]
            registered = {name.decode() for key in keys for name in redis.smembers(key)}
            if registered <= {worker.name for worker in injector.workers if worker.is_alive}:
                return
            await asyncio.sleep(0.2)


def unrecorded(database, load):
    return sorted(load.wanted.keys() - states_of(database, load.queue).keys())


def find_violations(injector, valkey, database, loads, began_ms):
    wanted = {job: item for load in loads for job, item in load.wanted.items()}
    received = {job: item for load in loads for job, item in load.subscribers.received.items()}
    found = [Violation("wrong", words) for words in injector.problems]
    found += violations(database, wanted, received) + wrong_times(database, began_ms)
    with valkey.client() as redis:
        found += [Violation("wrong", words) for words in leaked_keys(redis)]
        for load in loads:
            states = states_of(database, load.queue)
            found += (
                load.problems + left_in_redis(redis, load.queue, states) + load.witness.violations()
            )
    return found


def report(injector, loads, found, seconds):
    survived = ", ".join(f"{count} × {name}" for name, count in sorted(injector.survived.items()))
    kinds = [item.kind for item in found]
    print_line(
        f"{sum(injector.survived.values())} faults survived ({survived}; {injector.num_started} "
        "workers started); "
        f"{' + '.join(f'{len(load.wanted)} {load.queue}' for load in loads)} jobs, "
        f"{sum(len(each) for load in loads for each in load.subscribers.received.values())} "
        "subscribers, "
        f"{sum(load.witness.num_heard for load in loads)} chunks overheard, in {seconds:.0f} s: "
        f"{kinds.count('loss')} losses, {kinds.count('duplicate')} duplicates, "
        f"{kinds.count('wrong')} other violations"
    )
    for item in found[:40]:
        print_line(f"  {item}")
