"""Redelivered jobs wait for a frozen server once, not one after the other."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.record.support import FakeRedis, finished
from tests.record.test_finalizer import FakeStore, came_back
from tests.support.postgres import PostgresServer
from tokenmill.transport.repairs import end_task
from tokenmill_schemas.result import JobResult
from tokenmill_worker.jobs import FinishedJob
from tokenmill_worker.record import Finalizer, ResultStore, already_recorded
from tokenmill_worker.record.migrate import upgrade


@pytest.mark.postgres
async def test_jobs_at_a_frozen_server_wait_for_one_look_up(own_postgres: PostgresServer) -> None:
    url = own_postgres.create_database()
    upgrade(url)
    asked: list[Sequence[str]] = []

    class Store(ResultStore):
        async def find(self, ids: Sequence[str]) -> dict[str, JobResult]:
            asked.append(ids)
            return await super().find(ids)

    store = Store(url)
    ends = Finalizer(store, FakeRedis())
    jobs = [came_back(finished(f"job-{number}")) for number in range(6)]
    own_postgres.freeze()
    try:
        for job in jobs:  # as the thread for long jobs does
            assert await ends.skip_recorded([job]) == [job]
        assert asked == [["job-0"]]
    finally:
        own_postgres.thaw()
    task = asyncio.create_task(ends.run())
    await ends.submit(finished("job-0"))
    await ends.drain(60)
    (outcome,) = await ends.skip_recorded([jobs[0]])
    assert isinstance(outcome, FinishedJob), "the server has recorded, so it is asked again"
    await end_task(task)
    await store.close()


async def test_an_idle_worker_repeats_a_failed_look_up_after_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FakeStore(down=True)
    ends = Finalizer(store, FakeRedis())
    first = finished("job-0")
    job = came_back(first)
    with monkeypatch.context() as patched:
        patched.setattr(already_recorded, "PAUSE_S", 0.0)
        patched.setattr(already_recorded, "SLOW_S", 0.0)
        assert await ends.skip_recorded([job]) == [job]
    store.down, store.recorded = False, {"job-0": first}
    (outcome,) = await ends.skip_recorded([job])
    assert isinstance(outcome, FinishedJob)


async def test_a_look_up_that_failed_at_once_is_repeated_for_the_next_job() -> None:
    store = FakeStore(down=True)
    ends = Finalizer(store, FakeRedis())
    first = finished("job-0")
    job = came_back(first)
    assert await ends.skip_recorded([job]) == [job]
    store.down, store.recorded = False, {"job-0": first}
    (outcome,) = await ends.skip_recorded([job])
    assert isinstance(outcome, FinishedJob), "a refused connection says nothing of the next"
