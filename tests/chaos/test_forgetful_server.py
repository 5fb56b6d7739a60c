"""The server forgets its last second while answers of several choices are streamed, and workers are
killed: every subscriber gets each token of each choice once, whether it stays, or hangs up and
comes back with its position.

The server forgets as after a crash with `appendfsync everysec`: everything that it holds goes back,
in one transaction, to what it held a moment before, and its connections break. `--rounds` says how
many times jobs are submitted.
"""

import asyncio
import random
import uuid

import pytest

from tests.chaos.checker import Received, Wanted, violations
from tests.chaos.clients import listen, listen_in_a_thread
from tests.chaos.processes import WorkerProcess, environment
from tests.chaos.workload import undisturbed
from tests.support.worker import QUEUE, client_of, database_url, running_worker
from tokenmill import Client

pytestmark = [pytest.mark.redis, pytest.mark.chaos, pytest.mark.timeout(7200)]

EVERYTHING = """
local held = {}
for _, name in ipairs(redis.call('KEYS', '*')) do
  for _, value in ipairs({name, math.max(0, redis.call('PTTL', name)), redis.call('DUMP', name)}) do
    held[#held + 1] = value
  end
end
return held
"""
MODEL = {
    "model": "synthetic?step_ms=8",
    "max_num_seqs": 16,
    "lease_seconds": 2.0,
}
FORGETS = 3  # times in a round
COMMON = {"temperature": 0.9, "ignore_eos": True}
KINDS = [
    {"prompt": "three", "n": 3, "max_tokens": 160, "seed": 1, **COMMON},
    {
        "prompt": "three to a stop",
        "n": 3,
        "max_tokens": 160,
        "seed": 2,
        "stop": ("ea", "o t", "nn", " h"),
        **COMMON,
    },
    {"prompt": "three of other lengths", "n": 3, "max_tokens": 200, "seed": 3, "temperature": 0.9},
    {"prompt": "two in pieces", "n": 2, "max_tokens": 160, "seed": 4, "stream": False, **COMMON},
    {"prompt": "one", "max_tokens": 200, "seed": 5, **COMMON},
]


class ForgetfulServer:
    """A Valkey that can lose its last writes; it counts the lost log entries of running jobs."""

    def __init__(self, valkey):
        self._redis = valkey.client()
        self.num_lost = 0

    def remember(self):
        flat = self._redis.eval(EVERYTHING, 0)
        return list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))

    def forget_since(self, held):
        before = self._entries()
        with self._redis.pipeline(transaction=True) as transaction:
            transaction.flushall()
            for name, ttl_ms, value in held:
                transaction.restore(name, ttl_ms, value)
            transaction.execute()
        for kind in ("normal", "pubsub"):
            self._redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
        after = self._entries()
        self.num_lost += sum(max(0, before[name] - after.get(name, 0)) for name in before)

    def _entries(self):
        return {name: self._redis.xlen(name) for name in self._redis.scan_iter("*:log:*")}

    def close(self):
        self._redis.close()


class Workers:
    """Two processes; one that is killed is replaced at once."""

    def __init__(self, url, database, folder):
        self._url, self._database, self._folder = url, database, folder
        self._env = environment(folder, uuid.uuid4().hex)
        self.num_killed = -2
        self._workers = []
        for _ in range(2):
            self._start()

    def _start(self):
        self.num_killed += 1
        name = f"w{self.num_killed + 2}"
        log = self._folder / f"{name}.log"
        worker = WorkerProcess(
            name, self._url, self._database, log, env=self._env, queue=QUEUE,
            drain_seconds=1.0, **MODEL, max_crashes=1000, patient=True,
        )  # fmt: skip
        self._workers.append(worker)

    def kill_one(self, chance):
        ready = [worker for worker in self._workers if worker.is_ready]
        if len(ready) == 2:
            worker = chance.choice(ready)
            worker.kill()
            worker.end()
            self._workers.remove(worker)
            self._start()

    async def until_ready(self):
        async with asyncio.timeout(120):
            while not all(worker.is_ready for worker in self._workers):  # noqa: ASYNC110 - they are processes
                await asyncio.sleep(0.1)

    def end(self):
        for worker in self._workers:
            worker.end()


def attend(client, threaded, job, chance):
    """Read a job with three subscribers: one stays, two disconnect and resume.

    One of those two uses the threaded client every other time.
    """
    received = [Received(), Received(), Received()]
    tasks = [listen(client, job, received[0])]
    tasks += [
        listen(client, job, each, leave_after=lambda: chance.randint(1, 12))
        for each in received[1:]
    ]
    if chance.random() < 0.2:
        received.append(Received())
        tasks.append(asyncio.to_thread(listen_in_a_thread, threaded, job, received[-1]))
    return received, [asyncio.create_task(task) for task in tasks]


async def inject_faults(server, workers, chance):
    for _ in range(FORGETS):
        held = server.remember()
        await asyncio.sleep(chance.uniform(0.1, 1.0))
        dies = chance.random()
        if dies < 0.3:
            workers.kill_one(chance)
        server.forget_since(held)
        if dies > 0.7:
            workers.kill_one(chance)
        await asyncio.sleep(chance.uniform(0.0, 0.4))


async def test_choices_survive_a_server_that_loses_writes(make_valkey, redis_url, tmp_path, rounds):
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    (tmp_path / "calm").mkdir()
    calm = database_url(tmp_path / "calm")
    async with running_worker(redis_url, calm, **MODEL), client_of(redis_url, calm) as client:
        answers = await undisturbed(client, KINDS)
    database, valkey = database_url(tmp_path), make_valkey(persistent=False)
    server, workers = ForgetfulServer(valkey), Workers(valkey.url, database, tmp_path)
    wanted, received = {}, {}
    try:
        await workers.until_ready()
        threaded = Client(valkey.url, queue=QUEUE, database=database)
        async with client_of(valkey.url, database) as client:
            for _ in range(rounds):
                tasks = []
                for kind, answer in zip(KINDS, answers, strict=True):
                    job = str(await client.submit(**kind))
                    wanted[job] = Wanted.of(answer, stops=tuple(kind.get("stop", ())))
                    received[job], listening = attend(client, threaded, job, chance)
                    tasks += listening
                await asyncio.sleep(chance.uniform(0.1, 0.6))
                await inject_faults(server, workers, chance)
                async with asyncio.timeout(180):
                    await asyncio.gather(*tasks)
        threaded.close()
        found = violations(database, wanted, received)
    finally:
        workers.end()
        server.close()
    collected = sum(len(each) for each in received.values())
    print(  # noqa: T201
        f"chaos: seed {seed}, {rounds} rounds: {len(wanted)} jobs, {collected} subscribers, "
        f"{server.num_lost} log entries forgotten, {workers.num_killed} workers killed, "
        f"{len(found)} violations",
        flush=True,
    )
    assert found == [], f"seed {seed}"
    assert server.num_lost > 0, "the server lost nothing that a worker had to append again"
