"""Everything at once, at random: workers over a real Valkey and a real PostgreSQL, killed, frozen, drained, cut off
and restarted, while jobs come in and people listen. At the end a checker of its own counts.

`--rounds 3` is the short form. The seed is printed; `CHAOS_SEED` repeats a run's choices, not its timing.
"""

import asyncio
import gc
import os
import random
import time

import pytest
import sqlalchemy

from tests.chaos.arena import Arena
from tests.chaos.audience import Audience, submit
from tests.chaos.checker import violations
from tests.support.leaks import leaked_keys
from tests.support.worker import client_of, database_url, running_worker
from worker.record import migrate

pytestmark = [
    pytest.mark.redis,
    pytest.mark.postgres,
    pytest.mark.chaos,
    pytest.mark.timeout(3600),
    # When the server dies, SQLAlchemy forgets a pool's idle connections without closing them.
    pytest.mark.filterwarnings("ignore:.*psycopg.Connection.*was deleted while still open:ResourceWarning"),
]

NUM_WORKERS = 3
NUM_KINDS = 24
SEED = int(os.environ.get("CHAOS_SEED", "0")) or random.SystemRandom().randrange(1 << 32)  # noqa: TID251


def kind_of_job(number):
    """Greedy and sampled, streamed and not, short and long, of several tenants."""
    job = {"prompt": f"question {number}", "max_tokens": 20 + 7 * number, "ignore_eos": True, "seed": number}
    job |= {"temperature": 0.0 if number % 3 == 0 else 0.9, "tenant": f"t{number % 4}"}
    if number % 5 == 0:
        job |= {"stream": False, "priority": "bulk"}
    return job


async def undisturbed(redis_url, folder):
    """What each kind of job answers when nothing happens."""
    database = database_url(folder)
    async with running_worker(redis_url, database), client_of(redis_url, database) as client:
        ids = [await client.submit(**kind_of_job(number)) for number in range(NUM_KINDS)]
        return [await client.result(job, timeout=60) for job in ids]


async def test_chaos(make_valkey, own_postgres, redis_url, tmp_path, rounds):
    chance = random.Random(SEED)
    answers = await undisturbed(redis_url, tmp_path)
    database = own_postgres.create_database()
    migrate.upgrade(database)
    valkey = make_valkey(settings={"appendfsync": "always"})
    arena = Arena(valkey, own_postgres, database, tmp_path, chance)
    started = time.monotonic()
    print(f"chaos: seed {SEED}, {rounds} rounds")  # noqa: T201
    try:
        async with client_of(valkey.url, database) as client:
            audience = Audience(client, chance)
            expected = await rage(arena, client, audience, answers, rounds, chance)
            await wait_for_rows(database, len(expected), 90 + rounds)
            await audience.hear_the_end(60)
            await arena.drain_all()
    finally:
        arena.end()
    found = arena.problems + violations(database, expected, audience.told)
    with valkey.client() as left:
        found += leaked_keys(left)
        found += [f"{key!r} is left" for key in left.scan_iter() if b":log:" in key or b":held:" in key]
        found += [f"{key!r} still has entries" for key in left.scan_iter("*:jobs:*") if left.xlen(key)]
    found += arena.left_processes()
    report(arena, expected, found, time.monotonic() - started)
    gc.collect()  # while the filter above holds
    assert found == [], f"seed {SEED}"


async def rage(arena, client, audience, answers, rounds, chance):
    """Rounds of jobs and faults; returns what each accepted job must answer."""
    expected = {}
    faults = [
        arena.kill_worker, arena.kill_engine, arena.freeze_worker, arena.drain_worker,
        arena.cut_connections, arena.crash_valkey, arena.crash_postgres,
    ]  # fmt: skip
    for _ in range(NUM_WORKERS):
        arena.start_worker()
    bag = []
    for _ in range(rounds):
        storm = asyncio.create_task(faults_of_a_round(bag, faults, chance))
        for _ in range(max(40, 300 // rounds)):
            number = len(expected)
            job = await submit(client, f"key-{number}", **kind_of_job(number % NUM_KINDS))
            expected[job] = answers[number % NUM_KINDS]
            audience.attend(job)
        await storm
        if not any(worker.is_alive for worker in arena.workers):
            arena.start_worker()
    return expected


async def faults_of_a_round(bag, faults, chance):
    """Three, the last two at once; no fault comes again before every other has come."""
    for together in (1, 2):
        await asyncio.sleep(chance.uniform(0.2, 1.5))
        if len(bag) < together:
            bag += chance.sample(faults, len(faults))
        await asyncio.gather(*(bag.pop(0)() for _ in range(together)))


async def wait_for_rows(database, number, timeout_s):
    engine = sqlalchemy.create_engine(database)
    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            with engine.connect() as connection:
                if connection.execute(sqlalchemy.text("select count(*) from jobs")).scalar() >= number:
                    return
            await asyncio.sleep(0.5)
    finally:
        engine.dispose()


def report(arena, expected, found, seconds):
    losses = sum("has no" in line or "heard no end" in line for line in found)
    duplicates = sum("rows" in line or "a chunk a" in line for line in found)
    survived = ", ".join(f"{count} × {name}" for name, count in sorted(arena.survived.items()))
    print(  # noqa: T201
        f"chaos: {sum(arena.survived.values())} faults survived ({survived}); {len(expected)} jobs in {seconds:.0f} s, "
        f"{losses} losses, {duplicates} duplicates, {len(found)} violations"
    )
    for line in found[:30]:
        print(f"  {line}")  # noqa: T201
