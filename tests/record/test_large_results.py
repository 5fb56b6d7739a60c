"""A result above the limit of requests is recorded, found and read as any other; a damaged one
hides no other.
"""

from __future__ import annotations

import dataclasses

import pytest
from sqlalchemy import text

from tests.record.support import counts, finished
from tests.support.large import DAMAGED, large_result
from tokenmill.errors import UnreadableRecord
from tokenmill.sql import SqlResults
from tokenmill.sql.engine import open_engine
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record import ResultStore


def large(job_id: str) -> FinishedJob:
    return dataclasses.replace(finished(job_id), result=large_result(job_id, tenant="acme"))


def damage(url: str, job_id: str) -> None:
    engine = open_engine(url)
    with engine.begin() as connection:
        connection.execute(
            text("UPDATE jobs SET result = :it WHERE id = :id"), {"it": DAMAGED, "id": job_id}
        )
    engine.dispose()


async def test_a_large_result_is_recorded_once_and_found(store: ResultStore, url: str) -> None:
    job, small = large("a"), finished("b")
    assert (await store.record([job])).written == {"a"}
    again = await store.record([job, small])
    assert again.written == {"b"}
    assert again.existing == {"a": job.result}
    assert not again.refused
    assert await store.find(["a", "b"]) == {"a": job.result, "b": small.result}
    assert counts(url) == (2, 2, 2, 2)
    results = SqlResults(url)
    assert results.get("a") == job.result
    results.close()


async def test_a_row_that_cannot_be_decoded_counts_as_recorded(
    store: ResultStore, url: str
) -> None:
    """The repeated commit is acknowledged with the answer of this attempt; the row stays."""
    job, small = finished("a"), finished("b")
    await store.record([job, small])
    damage(url, "a")
    again = await store.record([job, finished("c")])
    assert again.written == {"c"}
    assert again.existing == {"a": job.result}
    assert not again.refused
    assert counts(url) == (3, 3, 3, 3)


async def test_a_damaged_row_does_not_hide_the_others(store: ResultStore, url: str) -> None:
    small = finished("b")
    await store.record([finished("a"), small])
    damage(url, "a")
    assert await store.find(["a", "b"]) == {"b": small.result}
    results = SqlResults(url)
    with pytest.raises(UnreadableRecord, match="the recorded result of job a cannot be read"):
        results.get("a")
    assert [row.job_id for row in results.jobs()] == ["b", "a"]
    results.close()
