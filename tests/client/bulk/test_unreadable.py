"""A result that cannot be read becomes one line of the error file; the run goes on or resumes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import msgspec
import pytest
import sqlalchemy

from tests.client.bulk.support import BulkSetup, completion, names, read, result, write
from tests.client.bulk.test_store import BATCH, _finished
from tests.support.databases import migrated_sqlite
from tests.support.large import DAMAGED
from tests.support.queue import Queue, close_queue, end_of, open_queue
from tokenmill import Client
from tokenmill.bulk import open_store
from tokenmill.sql.engine import open_engine
from tokenmill_schemas.codec import decode_request
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.record import ResultStore

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


async def answer_badly(queue: Queue) -> None:
    """Answer the first line well, the second with a damaged result, the third with no valid job."""
    worker, num_left = queue.worker(), 3
    while num_left:
        for delivery in await worker.claim(num_left):
            key, line = queue.keys.job(delivery.job_id), delivery.job_id.rpartition("-")[2]
            if line == "1":
                end = end_of(delivery, 3)
                metadata = decode_request(delivery.payload).metadata
                named = msgspec.structs.replace(end.result, metadata=metadata)
                await worker.finish([dataclasses.replace(end, result=named)])
            elif line == "2":
                await queue.redis.hset(
                    key, mapping={"state": "succeeded", "settled": "1", "result": DAMAGED}
                )
            else:
                await queue.redis.set(key, "no job")
            num_left -= 1
        await asyncio.sleep(0.05)


async def test_a_run_writes_unreadable_results_as_errors_and_ends(
    tmp_path: Path, redis_url: str
) -> None:
    setup = BulkSetup(tmp_path, redis_url, None)
    path = write(tmp_path / "in.jsonl", [completion(f"line-{number}") for number in (1, 2, 3)])
    queue = await open_queue(redis_url)
    answering = asyncio.create_task(answer_badly(queue))
    batch = await setup.run(path)
    await answering
    await queue.redis.delete(*(queue.keys.job(f"{batch.id}-{line}") for line in (2, 3)))
    await close_queue(queue)
    assert (batch.totals.completed, batch.totals.failed) == (1, 2)
    assert names(setup.paths.output) == ["line-1"]
    assert sorted(names(setup.paths.errors)) == ["line-2", "line-3"]
    assert {line["error"]["code"] for line in read(setup.paths.errors)} == {"result_unreadable"}


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        url = migrated_sqlite(tmp_path / "tokenmill.db")
    else:
        url = str(request.getfixturevalue("migrated_postgres_url"))
    return url


async def test_a_line_with_an_unreadable_row_counts_as_ended(redis_url: str, url: str) -> None:
    store = ResultStore(url, queue="q")
    await store.record([_finished(result("batch_1", line)) for line in (1, 2, 3)])
    await store.close()
    engine = open_engine(url)
    with engine.begin() as connection:
        damage = sqlalchemy.text("UPDATE jobs SET result = :it WHERE id = 'batch_1-2'")
        connection.execute(damage, {"it": DAMAGED})
    engine.dispose()
    with Client(redis_url, queue="q", database=url) as client:
        batches = open_store(client)
        batches.create(BATCH)
        found = await asyncio.to_thread(lambda: list(batches.results("batch_1")))
        known = await asyncio.to_thread(lambda: batches.recorded(["batch_1-2", "batch_1-3"]))
        batches.close()
    assert [(end.job_id, end.status) for end in found] == [
        ("batch_1-1", JobStatus.SUCCEEDED),
        ("batch_1-2", JobStatus.FAILED),
        ("batch_1-3", JobStatus.SUCCEEDED),
    ]
    assert found[1].error is not None
    assert (found[1].error.code, found[1].metadata["custom_id"]) == ("result_unreadable", "line-2")
    assert known.keys() == {"batch_1-2", "batch_1-3"}
