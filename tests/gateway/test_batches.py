"""Batches through OpenAI's client: a real worker answers the lines, the tasks run the batch."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.conftest import MODEL, Gateway, new_key, running_gateway
from tests.gateway.hosted_batches import (
    BODIES,
    CHAT,
    TEXT,
    begun,
    ended,
    jsonl,
    line,
    lines_of,
    running,
)
from tests.support.waiting import until
from tests.support.worker import QUEUE, running_worker
from tokenmill.files.file_table import FileTable
from tokenmill.sql.engine import open_engine
from tokenmill_schemas.tables import batches, tenant_webhooks, webhooks
from tokenmill_worker.settings import load_settings
from tokenmill_worker.tasks.batches import LEASE_MS, BatchRuns

pytestmark = pytest.mark.redis


@pytest.fixture
async def gateway(redis_url: str, database: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_gateway(
        redis_url, database, is_open=False, files=str(tmp_path / "files"), batch_lines=50
    ) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Gateway, database: str) -> AsyncIterator[Any]:
    async with gateway.client(new_key(database, "acme")) as client:
        yield client


@pytest.fixture
def runs(redis_url: str, database: str, tmp_path: Path) -> Any:
    """The batches of a process of `tokenmill tasks`."""
    settings = load_settings(
        {"redis_url": redis_url, "database_url": database, "files": str(tmp_path / "files")}
    )
    engine = open_engine(database)
    with contextlib.closing(BatchRuns(settings, engine, time.time, contextlib.nullcontext)) as runs:
        yield runs
    engine.dispose()


async def test_a_batch_of_each_endpoint_answers_every_line_once(
    client: Any, redis_url: str, database: str, runs: BatchRuns
) -> None:
    async with running_worker(redis_url, database), running(runs):
        for url in BODIES:
            content = jsonl(*(line(f"l{n}", url) for n in range(20)), line("bad", url, n=-1))
            asked = await begun(
                client,
                content,
                url,
                metadata={"a": "b"},
                output_expires_after={"anchor": "created_at", "seconds": 7200},
            )
            assert (asked.status, asked.metadata) == ("validating", {"a": "b"})
            done = await ended(client, asked.id)
            counts = done.request_counts
            assert (done.status, done.model) == ("completed", MODEL)
            assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
            assert done.usage.output_tokens == 80
            assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
            assert done.expires_at == done.created_at + 86_400
            answers = await lines_of(client, done.output_file_id)
            assert set(answers) == {f"l{n}" for n in range(20)}
            assert all(each["response"]["status_code"] == 200 for each in answers.values())
            errors = await lines_of(client, done.error_file_id)
            assert errors["bad"]["response"]["status_code"] == 400
            output = await client.files.retrieve(done.output_file_id)
            assert (output.purpose, output.filename) == (
                "batch_output",
                f"{done.id}_output.jsonl",
            )
            assert output.expires_at == output.created_at + 7200


async def test_a_cancelled_batch_keeps_its_answers_and_may_be_cancelled_again(
    client: Any, redis_url: str, database: str, runs: BatchRuns
) -> None:
    content = jsonl(*(line(f"l{n}") for n in range(3)), line("long", max_tokens=10_000))
    async with running(runs):
        asked = await begun(client, content)

        async def is_fed() -> bool:
            return str((await client.batches.retrieve(asked.id)).status) == "in_progress"

        await until(is_fed)
        for _ in range(2):
            assert (await client.batches.cancel(asked.id)).status in ("cancelling", "cancelled")
        done = await ended(client, asked.id)
    assert (done.status, done.output_file_id) == ("cancelled", None)
    assert done.cancelled_at >= done.cancelling_at
    errors = await lines_of(client, done.error_file_id)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
    assert len(errors) == 4
    assert (await client.batches.cancel(asked.id)).status == "cancelled"


async def test_a_batch_that_is_cancelled_before_its_lines_are_read_ends_with_each_named(
    client: Any, runs: BatchRuns
) -> None:
    asked = await begun(client, jsonl(line("a"), line("b")))
    assert (await client.batches.cancel(asked.id)).status == "cancelling"
    async with running(runs):
        done = await ended(client, asked.id)
    assert (done.status, done.request_counts.total) == ("cancelled", 2)
    errors = await lines_of(client, done.error_file_id)
    assert {name: each["error"]["code"] for name, each in errors.items()} == dict.fromkeys(
        "ab", "batch_cancelled"
    )


async def test_a_batch_whose_time_is_over_expires_with_every_line_named(
    client: Any, runs: BatchRuns
) -> None:
    asked = await begun(client, jsonl(line("a"), line("b")), completion_window="1s")
    await asyncio.sleep(1.1)  # its deadline, and no worker
    async with running(runs):
        done = await ended(client, asked.id)
    assert done.status == "expired"
    errors = await lines_of(client, done.error_file_id)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    with pytest.raises(openai.BadRequestError, match="is expired already"):
        await client.batches.cancel(asked.id)


BAD_LINES: Any = [
    ([line("a"), line("a")], "duplicate_custom_id", 2),
    ([line("a"), line("b", TEXT)], "mismatched_url", 2),
    ([line("a"), line("b", model="other")], "mismatched_model", 2),
    ([line("a"), "no object"], "invalid_json_line", 2),
    ([line("a"), line("b", pad="x" * 9_000_000)], "line_too_long", 2),
]


async def test_a_file_with_a_line_that_is_no_request_fails_as_a_whole(
    client: Any, runs: BatchRuns
) -> None:
    async with running(runs):
        for lines, code, number in BAD_LINES:
            done = await ended(client, (await begun(client, jsonl(*lines))).id)
            assert (done.status, done.request_counts.total) == ("failed", 0)
            (error,) = done.errors.data
            assert (error.code, error.line) == (code, number)
            assert done.failed_at is not None


WRONG: Any = [
    (b"\n \n", {}, "has no line"),
    (b"{}\n", {}, "line 1: Missing required parameter: 'custom_id'"),
    (jsonl(line("a", TEXT)), {}, "url must be /v1/chat/completions"),
    (jsonl(line("a", model=None)), {}, "names no model"),
    (jsonl(line("a", pad="x" * 9_000_000)), {}, "line 1 has more than 8388608 bytes"),
    (jsonl(*[line(str(n)) for n in range(51)]), {}, "51 lines, and a batch at most 50"),
    (jsonl(line("a")), {"endpoint": "/v1/embeddings"}, "endpoint must be one of"),
    (jsonl(line("a")), {"completion_window": "soon"}, "a completion window is a number"),
    (jsonl(line("a")), {"completion_window": "99d"}, "at most 2592000 s"),
    (jsonl(line("a")), {"metadata": {"a": 1}}, "metadata must be an object of texts"),
    (jsonl(line("a")), {"extra_body": {"colour": 1}}, "'colour' is not supported"),
    (
        jsonl(line("a")),
        {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
        "from 3600 to 2592000",
    ),
]


async def test_a_wrong_batch_is_refused_in_a_sentence(client: Any) -> None:
    for content, change, says in WRONG:
        with pytest.raises(openai.BadRequestError, match=says):
            await begun(client, content, **change)
    assert (await client.batches.list()).data == []


async def test_a_batch_needs_a_file_of_its_tenant_a_known_model_and_a_key_that_writes(
    gateway: Gateway, client: Any, database: str
) -> None:
    file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    terms = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    async with gateway.client(new_key(database, "other")) as other:
        with pytest.raises(openai.NotFoundError, match=f"there is no '{file.id}' here"):
            await other.batches.create(**terms)
    async with gateway.client(new_key(database, "acme", permission="read")) as reader:
        with pytest.raises(openai.PermissionDeniedError):
            await reader.batches.create(**terms)
    with pytest.raises(openai.NotFoundError, match="there is no model 'none' here"):
        await begun(client, jsonl(line("a", model="none")))
    other = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="is batch, not user_data"):
        await client.batches.create(**{**terms, "input_file_id": other.id})


async def test_batches_are_listed_by_pages_and_only_to_their_tenant(
    gateway: Gateway, client: Any, database: str
) -> None:
    made = [(await begun(client, jsonl(line("a")))).id for _ in range(3)]
    assert {each.id async for each in client.batches.list(limit=1)} == set(made)
    headers = {"Authorization": f"Bearer {new_key(database, 'other')}"}
    unknown = f"batch_{'0' * 24}"
    async with httpx.AsyncClient(base_url=f"{gateway.url}/v1", headers=headers) as other:
        for method, path in (("GET", ""), ("POST", "/cancel")):
            foreign = await other.request(method, f"/batches/{made[0]}{path}")
            missing = await other.request(method, f"/batches/{unknown}{path}")
            assert foreign.status_code == missing.status_code == 404
            assert foreign.text.replace(made[0], unknown) == missing.text
        assert (await other.get("/batches")).json()["data"] == []


async def test_a_batch_with_the_same_idempotency_key_is_made_once(client: Any) -> None:
    file = await client.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    terms: dict[str, Any] = {
        "input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h",
        "extra_headers": {"Idempotency-Key": "k"},
    }  # fmt: skip
    first, second = [await client.batches.create(**terms) for _ in range(2)]
    assert first.id == second.id
    with pytest.raises(openai.UnprocessableEntityError):
        await begun(client, jsonl(line("a")), extra_headers={"Idempotency-Key": "k"})


async def test_a_batch_goes_on_with_a_file_that_is_deleted_meanwhile(
    client: Any, redis_url: str, database: str, runs: BatchRuns
) -> None:
    asked = await begun(client, jsonl(line("a"), line("b")))
    await client.files.delete(asked.input_file_id)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(asked.input_file_id)
    assert runs.remove_files() == 0
    async with running_worker(redis_url, database), running(runs):
        done = await ended(client, asked.id)
    assert (done.status, done.request_counts.completed) == ("completed", 2)
    assert runs.remove_files() == 1
    table = FileTable(database)
    assert table.find(asked.input_file_id) is None
    table.close()


async def test_a_batch_whose_input_is_gone_fails_in_a_sentence(
    client: Any, runs: BatchRuns, tmp_path: Path
) -> None:
    asked = await begun(client, jsonl(line("a")))
    (tmp_path / "files" / asked.input_file_id).unlink()
    async with running(runs):
        done = await ended(client, asked.id)
    assert (done.status, done.errors.data[0].code) == ("failed", "file_not_found")


async def test_the_end_of_a_batch_is_announced_to_its_tenant_s_url(
    client: Any, runs: BatchRuns, database: str
) -> None:
    engine = open_engine(database)
    with engine.begin() as connection:
        url = "https://example.org/hook"
        connection.execute(tenant_webhooks.insert().values(tenant="acme", url=url))
    failed = await begun(client, jsonl(line("a"), line("a")))
    late = await begun(client, jsonl(line("a")), completion_window="1s")
    await asyncio.sleep(1.1)  # its deadline
    async with running(runs):
        for each in (failed, late):
            await ended(client, each.id)
    with engine.begin() as connection:
        rows = connection.execute(webhooks.select()).mappings().all()
    assert {row["job_id"]: (row["event"], row["url"]) for row in rows} == {
        failed.id: ("batch.failed", url),
        late.id: ("batch.expired", url),
    }
    engine.dispose()


async def test_a_batch_is_due_again_when_its_lease_ends_and_no_two_tasks_hold_it(
    client: Any, runs: BatchRuns, redis_url: str, database: str
) -> None:
    asked = await begun(client, jsonl(line("a")))
    (lost,) = runs.claim()  # its process dies
    assert (lost.batch_id, lost.queue, runs.claim()) == (asked.id, QUEUE, [])
    engine = open_engine(database)
    with engine.begin() as connection:
        late = batches.c.due_ms - LEASE_MS - 1_000
        connection.execute(batches.update().values(due_ms=late))
    (held,) = runs.claim()
    async with running_worker(redis_url, database):
        await asyncio.to_thread(runs.run, lost)  # ends at once: another holds the batch
        assert (await client.batches.retrieve(asked.id)).status == "validating"
        await asyncio.to_thread(runs.run, held)
    assert (await client.batches.retrieve(asked.id)).status == "completed"
    with engine.begin() as connection:
        assert connection.execute(batches.select()).mappings().one()["due_ms"] is None
    engine.dispose()
