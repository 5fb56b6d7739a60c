"""Metrics and log lines count each job recorded here once, however often the connection broke."""

from __future__ import annotations

import asyncio
import time

import pytest
from sqlalchemy import Connection, event

from tests.record.support import FakeRedis, counts, finished
from tests.record.test_finalizer import FAST, Rig, came_back
from tokenmill.sql.engine import open_engine
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record import Finalizer, FinalizerLimits, ResultStore

LIMITS = FinalizerLimits(record_backoff=FAST, acknowledge_backoff=FAST, linger_s=0.0)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_commit_whose_reply_was_too_late_is_counted_once(rig: Rig) -> None:
    """A row that another attempt wrote in the meantime counts for that attempt."""
    rig.store.late = 2
    rig.store.recorded["job-1"] = finished("job-1", finished_ms=7)
    async with rig.running() as finalizer:
        for number in range(5):
            await finalizer.submit(finished(f"job-{number}"))
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert sorted(rig.reported) == ["job-0", "job-2", "job-3", "job-4"]
    assert (finalizer.stats.recorded, finalizer.stats.recorded_before) == (4, 1)
    assert len(rig.redis.done) == 5


async def test_a_job_submitted_twice_to_the_recorder_is_counted_once(rig: Rig) -> None:
    """The job was lost while it waited for SQL, and came back here."""
    async with rig.running() as finalizer:
        for token in (2, 1):
            await finalizer.submit(finished("job-0", token=token))
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert (rig.reported, finalizer.stats.recorded) == (["job-0"], 1)


async def test_a_redelivered_job_that_sql_already_has_is_only_acknowledged(rig: Rig) -> None:
    """The job was counted when it was recorded, perhaps by this very worker."""
    first = finished("job-0")
    rig.store.recorded["job-0"] = first
    async with rig.running() as finalizer:
        (outcome,) = await finalizer.skip_recorded([came_back(first)])
        assert isinstance(outcome, FinishedJob)
        rig.store.down = True
        await finalizer.submit(outcome)
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert rig.redis.done["job-0"].token == 2
    assert (rig.reported, rig.store.groups, finalizer.stats.recorded_before) == ([], [], 1)


async def test_a_late_commit_of_a_real_database_is_counted_once(url: str) -> None:
    """The commit outlasts the time limit, then succeeds; the next call finds the rows."""
    engine = open_engine(url)
    pauses = [0.6]

    @event.listens_for(engine, "commit")
    def stand_still(_connection: Connection) -> None:
        time.sleep(pauses.pop() if pauses else 0.0)

    store = ResultStore(url, queue="q", engine=engine, answer_timeout_s=0.3)
    reported: list[FinishedJob] = []
    finalizer = Finalizer(store, FakeRedis(), LIMITS, on_recorded=reported.extend)
    task = asyncio.create_task(finalizer.run())
    for number in range(3):
        await finalizer.submit(finished(f"job-{number}"))
    await finalizer.drain(60)
    assert finalizer.held_ids == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await store.close()
    assert finalizer.stats.record_failures
    assert sorted(item.result.job_id for item in reported) == ["job-0", "job-1", "job-2"]
    assert counts(url) == (3, 3, 3, 3)
