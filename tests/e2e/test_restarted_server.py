"""Restarts each server of this machine under the shipped configuration and list of users: every key
is there afterwards, and every job runs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from tests.support.other_servers import binary_of, every_server
from tests.support.valkey import ControlledValkey
from tests.support.worker import QUEUE, database_url, running_worker
from tokenmill import AsyncClient
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import JobResult, JobStatus
from tokenmill_worker.jobs import ChunkAppend, FinishedJob
from tokenmill_worker.queue.job_stream import JobStream, StreamOptions

pytestmark = pytest.mark.redis

FOLDER = Path(__file__).parents[2] / "ops" / "deploy" / "redis"
RULES = (FOLDER / "users.acl").read_text("utf-8")
KEYS = Keys(QUEUE)

MakeServer = Callable[..., ControlledValkey]


@pytest.fixture
def make_server(make_valkey: MakeServer, tmp_path: Path) -> MakeServer:
    """Start a server with ops/deploy/redis: `make_server("redis-server")`."""

    def make(server_name: str) -> ControlledValkey:
        users = tmp_path / "users.acl"
        users.write_text(RULES)
        settings = {"include": str(FOLDER / "redis.conf"), "aclfile": str(users)}
        return make_valkey(settings=settings, binary=binary_of(server_name))

    return make


def url(server: ControlledValkey, user: str) -> str:
    return f"redis://{user}:change-me-{user}@127.0.0.1:{server.port}/0"


def content(server: ControlledValkey) -> dict[bytes, Any]:
    """Return every key with its value and the moment of its end."""
    with server.client(username="operator", password="change-me-operator") as operator:
        return {
            key: (_value(operator, key), operator.pexpiretime(key))
            for key in operator.scan_iter(count=1_000)
        }


def _value(operator: Any, key: bytes) -> Any:
    kind = operator.type(key).decode()
    if kind != "stream":
        words = {
            "string": ("GET", key),
            "hash": ("HGETALL", key),
            "set": ("SMEMBERS", key),
            "zset": ("ZRANGE", key, 0, -1, "WITHSCORES"),
        }
        return operator.execute_command(*words[kind])
    groups = [
        (group["name"], group["last-delivered-id"], group["pending"])
        for group in operator.xinfo_groups(key)
    ]
    pending = [
        [(one["message_id"], one["consumer"], one["times_delivered"]) for one in page]
        for page in (operator.xpending_range(key, name, "-", "+", 100) for name, *_ in groups)
    ]
    return operator.xrange(key), groups, pending


async def fill(server: ControlledValkey) -> tuple[list[str], list[str]]:
    """Make jobs of every kind; returns those that still have to end, and those that have ended."""
    async with (
        AsyncClient(url(server, "producer"), queue=QUEUE) as producer,
        redis.asyncio.Redis.from_url(url(server, "worker"), protocol=2) as connection,
    ):
        stream = JobStream(connection, KEYS, "w1", StreamOptions(lease_s=1.0))
        await stream.open()
        await producer.set_limits("acme", rate=1_000, concurrency=50, weight=2)
        jobs = [
            {"prompt": f"{n}", "tenant": tenant, "priority": priority, "max_tokens": 4}
            for n, tenant in enumerate(("", "acme", "globex"))
            for priority in ("interactive", "standard", "bulk")
        ]
        first = await producer.submit_many(jobs)
        taken = await stream.claim(4)
        chunks = [
            ChunkAppend(one.token, Chunk(job_id=one.job_id, index=0, token_ids=(7,), text="hi"), 0)
            for one in taken
        ]
        assert not await stream.append(chunks)
        ended = taken[:2]  # the other two go on running
        assert await stream.finish([_finished(one.job_id, one.token) for one in ended]) == [1, 1]
        more: list[dict[str, Any]] = [
            {"prompt": "keyed", "idempotency_key": "k", "tenant": "acme", "max_tokens": 4},
            {"prompt": "later", "not_before": time.time() + 1.5, "max_tokens": 4},
            {"prompt": "two", "n": 2, "seed": 1, "temperature": 1.0, "max_tokens": 4},
            {"prompt": "in time", "deadline": time.time() + 3_600, "max_tokens": 4},
        ]
        waiting = await producer.submit_many(more)
        cancelled = await producer.submit(prompt="cancelled", max_tokens=4)
        await producer.cancel(cancelled)
    done = [one.job_id for one in ended]
    return [str(job) for job in (*first, *waiting) if str(job) not in done], done


def _finished(job_id: str, token: int) -> FinishedJob:
    final = Chunk(job_id=job_id, index=1, finish_reason=FinishReason.STOP, status=_SUCCEEDED)
    return FinishedJob(token, JobResult(job_id=job_id, status=_SUCCEEDED), final)


_SUCCEEDED = JobStatus.SUCCEEDED


@every_server
@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restart_under_the_shipped_users_keeps_every_key_and_job(
    make_server: MakeServer, tmp_path: Path, server_name: str, with_signal: signal.Signals
) -> None:
    server = make_server(server_name)
    open_jobs, ended = await fill(server)
    before = content(server)
    server.restart(crash=with_signal is signal.SIGKILL)
    after = content(server)
    leases = {key for key in before if b":worker:" in key}  # they may end meanwhile
    assert {key: after.get(key) for key in before if key not in leases} == {
        key: value for key, value in before.items() if key not in leases
    }
    assert len(before) > 25
    database = database_url(tmp_path)
    async with (
        running_worker(url(server, "worker"), database, lease_seconds=1.0),
        AsyncClient(url(server, "producer"), queue=QUEUE) as producer,
    ):
        for job in open_jobs:
            assert (await producer.result(job, timeout=60)).status is _SUCCEEDED
        for job in ended:
            assert (await producer.result(job, timeout=60)).status is _SUCCEEDED
