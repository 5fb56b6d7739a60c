"""A job id stands for one job: a later job under the same id ends as failed, with one sentence, and
is not billed.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tests.record.support import FakeRedis, counts, failed, finished, rows
from tests.record.test_finalizer import FAST, came_back
from tokenmill_schemas import ChoiceResult, JobStatus, Usage
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record import Finalizer, FinalizerLimits, ResultStore

LIMITS = FinalizerLimits(record_backoff=FAST, acknowledge_backoff=FAST, linger_s=0.0)
LATER_MS = 1_795_007_200_000


def of_no_batch(job: FinishedJob) -> FinishedJob:
    assert job.request is not None
    return replace(job, request=msgspec.structs.replace(job.request, batch_id=None))


def later(**changes: Any) -> FinishedJob:
    answer = ChoiceResult(text="to another prompt", token_ids=tuple(range(500)))
    usage = Usage(prompt_tokens=9, completion_tokens=500, total_ms=70)
    fields = {
        "created_ms": LATER_MS,
        "choices": (answer,),
        "usage": usage,
        "finished_ms": LATER_MS + 90,
    }
    return of_no_batch(finished("a", token=2, **{**fields, **changes}))


async def ended(
    store: ResultStore, *jobs: FinishedJob
) -> tuple[list[FinishedJob], list[FinishedJob]]:
    """Record the jobs and return those acknowledged to Redis and those counted in the metrics."""
    redis, reported = FakeRedis(), []
    finalizer = Finalizer(store, redis, LIMITS, on_recorded=lambda items: reported.extend(items))
    task = asyncio.create_task(finalizer.run())
    for job in jobs:
        await finalizer.submit(job)
    await finalizer.drain(60)
    assert finalizer.held_ids == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return list(redis.done.values()), reported


@pytest.mark.parametrize("tenant", ["acme", "another"])
async def test_a_second_job_under_an_id_fails_with_a_sentence(
    store: ResultStore, url: str, tenant: str
) -> None:
    await store.record([of_no_batch(finished("a"))])
    beside = finished("b")
    done, reported = await ended(store, later(tenant=tenant), beside)
    end, other = sorted(done, key=lambda item: item.result.job_id)
    result, chunk = end.result, end.final_chunk
    assert (result.status, result.choices, result.text) == (JobStatus.FAILED, (), "")
    assert result.error is not None
    assert (result.error.code, result.error.message) == (
        "job_id_taken",
        "the job id 'a' stands for an earlier job in the database: use a new id",
    )
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (0, 0)
    assert (chunk.status, chunk.error, chunk.index) == (
        JobStatus.FAILED,
        result.error,
        later().final_chunk.index,
    )
    assert other.result == beside.result
    assert sorted((item.result.job_id, item.result.status) for item in reported) == [
        ("a", JobStatus.FAILED),
        ("b", JobStatus.SUCCEEDED),
    ]
    assert counts(url) == (2, 2, 2, 2)
    assert rows(url, "SELECT tenant, completion_tokens AS n FROM usage WHERE job_id = 'a'") == [
        {"tenant": "acme", "n": 3}
    ]


async def test_a_dead_row_is_replaced_by_its_own_job_only(store: ResultStore, url: str) -> None:
    dead = of_no_batch(failed("a", status=JobStatus.DEAD))
    await store.record([dead])
    assert (await store.record([later()])).taken == {"a"}
    own = later(created_ms=dead.result.created_ms)
    assert (await store.record([own])).written == {"a"}
    assert rows(url, "SELECT state FROM jobs") == [{"state": "succeeded"}]


async def test_a_line_of_a_batch_submitted_again_is_the_same_job(
    store: ResultStore,
) -> None:
    """The queue had forgotten it; its creation time is that of the second handing in."""
    line = finished("a")
    await store.record([line])
    again = finished("a", token=2, created_ms=LATER_MS, choices=(ChoiceResult(text="made anew"),))
    assert (await store.record([again])).existing == {"a": line.result}


async def test_a_redelivered_job_is_recognised_by_its_creation_time(store: ResultStore) -> None:
    first = of_no_batch(finished("a"))
    await store.record([first])
    finalizer = Finalizer(store, FakeRedis(), LIMITS)
    (same,) = await finalizer.skip_recorded([came_back(first)])
    assert isinstance(same, FinishedJob)
    another = came_back(later())
    assert await finalizer.skip_recorded([another]) == [another]
