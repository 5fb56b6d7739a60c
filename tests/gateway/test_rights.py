"""A gateway under the users of ops/deploy: of `redis/users.acl` and of `postgres/gateway.sql`.

Each of its calls works, and its role of PostgreSQL can do nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psycopg
import pytest

from tests.e2e.test_acl import (
    CLUSTER,
    CONNECTION,
    PUBSUB,
    RULES,
    SCRIPTS,
    commands_of,
    named,
    refusals,
)
from tests.e2e.test_acl import guarded as guarded
from tests.e2e.test_acl import queue_user as queue_user
from tests.gateway.conftest import MODEL, new_key, running_gateway
from tests.gateway.hosted_batches import begun, ended, jsonl, line, running
from tests.gateway.test_keys import keys
from tests.support.postgres import PostgresServer
from tests.support.valkey import ControlledValkey
from tests.support.waiting import until
from tests.support.worker import QUEUE, running_worker
from tokenmill.sql.engine import open_engine
from tokenmill.transport import scripts
from tokenmill_schemas.tables import jobs
from tokenmill_worker.record import migrate
from tokenmill_worker.settings import load_settings
from tokenmill_worker.tasks.batches import BatchRuns

pytestmark = pytest.mark.redis
RIGHTS = Path(__file__).parents[2] / "ops/deploy/postgres/gateway.sql"
ASKED: dict[str, Any] = {"model": MODEL, "input": "Hi", "max_output_tokens": 6}
CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6,
}  # fmt: skip
# What the gateway sends beside scripts: reads of jobs, logs and workers, the search for queues, and
# limits that it gives a queue.
READING = {"get", "hmget", "smembers", "xrange", "time", "scan", "hsetnx"}


@pytest.fixture
def owned_url(postgres: PostgresServer, postgres_url: str) -> str:
    """A migrated database in which the gateway's role has its rights; the URL is its owner's."""
    migrate.upgrade(postgres_url)
    with psycopg.connect(plain(postgres_url)) as connection:
        for _ in range(2):  # the file may be run again
            connection.execute(RIGHTS.read_bytes())
    return postgres_url


def plain(url: str) -> str:
    return url.replace("+psycopg", "")


def as_gateway(url: str) -> str:
    return url.replace("//tokenmill@", "//gateway@")


@pytest.fixture
def runs(guarded: ControlledValkey, owned_url: str, tmp_path: Path) -> Iterator[BatchRuns]:
    """The batches of a process of the tasks, with its own user."""
    url = named("tasks", guarded.url)
    files = str(tmp_path / "files")
    settings = load_settings({"redis_url": url, "database_url": owned_url, "files": files})
    engine = open_engine(owned_url)
    with contextlib.closing(BatchRuns(settings, engine, time.time, contextlib.nullcontext)) as runs:
        yield runs
    engine.dispose()


async def answers(client: Any) -> None:
    """Have answers of each form: plain, streamed, resumed, continued, cancelled, deleted."""
    first = await client.responses.create(**ASKED)
    events = [each async for each in await client.responses.create(**ASKED, stream=True)]
    response = events[-1].response
    resumed = await client.responses.retrieve(response.id, stream=True, starting_after=2)
    assert [each.sequence_number async for each in resumed] == list(range(3, len(events)))
    assert (await client.responses.retrieve(first.id)).output_text == first.output_text
    await client.responses.input_items.list(first.id)
    await client.responses.create(**ASKED, previous_response_id=first.id)
    await client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    long = ASKED | {"max_output_tokens": 4_000, "extra_body": {"ignore_eos": True}}
    waiting = await client.responses.create(**long, background=True)
    assert (await client.responses.retrieve(waiting.id)).status in ("queued", "in_progress")
    await client.responses.cancel(waiting.id)
    assert await client.chat.completions.create(**CHAT)
    assert [each async for each in await client.chat.completions.create(**CHAT, stream=True)]
    again = {"extra_headers": {"Idempotency-Key": "k"}}
    ids = {(await client.chat.completions.create(**CHAT, **again)).id for _ in range(2)}
    assert len(ids) == 1
    await client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2)


async def batches(client: Any) -> None:
    """Have a batch answered and one cancelled; list, read and delete files."""
    one = await ended(client, (await begun(client, jsonl(line("a"), line("b", n=-1)))).id)
    assert (one.status, one.request_counts.completed) == ("completed", 1)
    assert (await client.files.content(one.output_file_id)).text
    other = await begun(client, jsonl(*(line(f"l{n}", max_tokens=900) for n in range(40))))
    await client.batches.cancel(other.id)
    assert (await ended(client, other.id)).status == "cancelled"
    assert len((await client.batches.list()).data) == 2
    files = (await client.files.list()).data
    await client.files.retrieve(files[0].id)
    for file in files:
        await client.files.delete(file.id)
    assert (await client.files.list()).data == []


async def test_a_gateway_does_all_of_its_work_as_its_own_users(
    guarded: ControlledValkey, owned_url: str, runs: BatchRuns, tmp_path: Path
) -> None:
    text = new_key(owned_url, "acme")
    own = as_gateway(owned_url)
    variables = {"TOKENMILL_REDIS_URL": named("gateway", guarded.url)}
    keys("limit", "acme", "--rate", "50", "--burst", "500", **variables)  # for every queue
    async with (
        running_worker(named("worker", guarded.url), owned_url, lease_seconds=30),
        running_gateway(
            named("gateway", guarded.url),
            own,
            is_open=False,
            models={},
            files=str(tmp_path / "files"),
        ) as gateway,
        gateway.client(text) as client,
        running(runs),
    ):

        async def is_listed() -> bool:
            return bool((await client.models.list()).data)

        await until(is_listed)  # once its worker has told its name
        await answers(client)
        await batches(client)
        assert MODEL in [model.id for model in (await client.models.list()).data]
        usage = "/organization/usage/completions?start_time=0&limit=1"
        await client.get(usage, cast_to=object)
        limits = "limit", "acme", "--concurrency", "9"
        said = await asyncio.to_thread(lambda: keys(*limits, **variables))
        assert QUEUE in said
        limited = await client.responses.with_raw_response.create(**ASKED)
        assert limited.headers["x-ratelimit-limit-requests"] == "500"
        ready = await client.get(f"{gateway.url}/readyz", cast_to=object)
        assert ready == {"status": "ok"}
    assert refusals(guarded) == []


def test_every_right_of_the_gateway_s_user_is_used() -> None:
    line = next(line for line in RULES.splitlines() if line.startswith("user gateway "))
    granted = set(re.findall(r"\+(\S+)", line))
    used = SCRIPTS | commands_of(scripts.SUBMIT, scripts.CANCEL, scripts.LOOK) | READING
    assert granted == used | CONNECTION | CLUSTER | PUBSUB
    assert "resetkeys ~tm:{*}:* resetchannels &tm:{*}:* -@all" in line


FORBIDDEN = (
    "DELETE FROM usage",
    "UPDATE usage SET completion_tokens = 0",
    "DELETE FROM jobs",
    "UPDATE jobs SET result = '\\x00'",
    "UPDATE jobs SET text = 'forged'",
    "UPDATE jobs SET state = 'failed'",
    "UPDATE jobs SET tenant = 'mine'",
    "UPDATE batches SET output_file = 'file-other'",
    "DELETE FROM batches",
    "INSERT INTO api_keys SELECT * FROM api_keys",
    "UPDATE api_keys SET permission = 'all'",
    "UPDATE tenant_webhooks SET url = 'http://elsewhere'",
    "SELECT * FROM webhooks",
    "INSERT INTO jobs SELECT * FROM jobs",
    "TRUNCATE files",
    "DROP TABLE files",
    "ALTER TABLE jobs DISABLE TRIGGER ALL",
)


def test_the_gateway_s_role_can_neither_forge_nor_remove_what_others_record(
    owned_url: str,
) -> None:
    insert_job(owned_url)
    new_key(owned_url, "acme")
    with psycopg.connect(plain(as_gateway(owned_url)), autocommit=True) as connection:
        for statement in FORBIDDEN:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(statement.encode())
        emptied = connection.execute("UPDATE jobs SET text = NULL, result = NULL")
        assert emptied.rowcount == 1
    with psycopg.connect(plain(owned_url)) as connection:  # its owner is not bound
        assert connection.execute("UPDATE jobs SET text = 'written'").rowcount == 1


def insert_job(url: str) -> None:
    engine = open_engine(url)
    words = ("id", "queue", "model", "tenant", "priority", "state", "worker_id")
    numbers = ("attempts", "created_ms", "started_ms", "finished_ms")
    row: dict[str, Any] = dict.fromkeys(words, "x") | dict.fromkeys(numbers, 1)
    with engine.begin() as connection:
        connection.execute(jobs.insert().values(**row, text="answer", result=b"answer"))
    engine.dispose()
