"""The order of a job's end, under failures of either side. No database: the store is a fake with a
plan.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import msgspec
import pytest

from tests.record.support import FakeRedis, finished
from tests.support.waiting import until
from tokenmill.transport.backoff import Backoff
from tokenmill_schemas import ChoiceResult
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobResult
from tokenmill_worker.errors import StoreUnavailable
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob
from tokenmill_worker.record import Finalizer, FinalizerLimits, RecordReport

FAST = Backoff(first_s=0.001, longest_s=0.01)


@dataclass
class FakeStore:
    """A ResultRecorder: the first write of an id counts."""

    recorded: dict[str, FinishedJob] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)
    down: bool = False
    fail: int = 0
    late: int = 0  # calls that commit after their time limit
    refuse: set[str] = field(default_factory=set)
    gate: asyncio.Event | None = None

    async def record(self, finished: Sequence[FinishedJob]) -> RecordReport:
        self.groups.append(len(finished))
        if self.gate is not None:
            await self.gate.wait()
        if self.down or self.fail > 0:
            self.fail -= 1
            raise StoreUnavailable("the SQL store failed: connection refused")
        report = RecordReport()
        for item in finished:
            job_id = item.result.job_id
            if job_id in self.refuse:
                report.refused[job_id] = "refused"
            elif job_id in self.recorded:
                report.existing[job_id] = self.recorded[job_id].result
            else:
                self.recorded[job_id] = item
                report.written.add(job_id)
        if self.late > 0:
            self.late -= 1
            raise StoreUnavailable("the SQL store did not answer within 60 s")
        return report

    async def find(self, ids: Sequence[str]) -> dict[str, JobResult]:
        if self.down:
            raise StoreUnavailable("the SQL store failed: connection refused")
        return {job_id: self.recorded[job_id].result for job_id in ids if job_id in self.recorded}


@dataclass
class Rig:
    store: FakeStore = field(default_factory=FakeStore)
    redis: FakeRedis = field(default_factory=FakeRedis)
    reported: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def running(self, **limits: object) -> AsyncIterator[Finalizer]:
        finalizer = Finalizer(
            self.store,
            self.redis,
            FinalizerLimits(
                record_backoff=FAST,
                acknowledge_backoff=FAST,
                **({"linger_s": 0.0} | limits),  # type: ignore[arg-type]
            ),
            on_recorded=lambda jobs: self.reported.extend(job.result.job_id for job in jobs),
        )
        task = asyncio.create_task(finalizer.run())
        try:
            yield finalizer
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def _submit(finalizer: Finalizer, count: int, start: int = 0) -> None:
    for number in range(start, start + count):
        await finalizer.submit(finished(f"job-{number}"))


def _intake_stops(finalizer: Finalizer) -> bool:
    return finalizer.is_full


async def test_a_job_is_acknowledged_after_it_was_recorded(rig: Rig) -> None:
    async with rig.running() as finalizer:
        await _submit(finalizer, 5)
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert list(rig.redis.done) == [f"job-{number}" for number in range(5)] == rig.reported
    assert set(rig.redis.done) == set(rig.store.recorded)
    assert (finalizer.stats.recorded, finalizer.stats.acknowledged, finalizer.stats.lost) == (
        5,
        5,
        0,
    )


async def test_waiting_jobs_are_written_as_one_group(rig: Rig) -> None:
    rig.store.gate = asyncio.Event()
    async with rig.running(max_group=40) as finalizer:
        await _submit(finalizer, 1)
        await until(lambda: rig.store.groups == [1])
        await _submit(finalizer, 100, start=1)
        rig.store.gate.set()
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert rig.store.groups == [1, 40, 40, 20]


async def test_lines_of_a_batch_wait_for_a_full_group_or_a_job_of_another_kind(rig: Rig) -> None:
    async with rig.running(max_group=4, linger_s=1000.0) as finalizer:
        for number in range(4):
            await finalizer.submit(_line(f"line-{number}"))
            await asyncio.sleep(0)
        await until(lambda: rig.store.groups == [4])
        for number in range(2):
            await finalizer.submit(_line(f"late-{number}"))
            await asyncio.sleep(0.01)
        assert rig.store.groups == [4]
        await finalizer.submit(finished("job"))
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert rig.store.groups == [4, 3]


async def test_lines_of_a_batch_wait_for_others_up_to_a_limit(rig: Rig) -> None:
    async with rig.running(linger_s=0.01) as finalizer:
        await finalizer.submit(_line("line"))
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert rig.store.groups == [1]


def _line(job_id: str) -> FinishedJob:
    request = JobRequest(job_id=job_id, batch_id="b", prompt="x", stream=False)
    return replace(finished(job_id), request=request)


async def test_jobs_are_acknowledged_only_after_sql_is_back(rig: Rig) -> None:
    rig.store.down = True
    async with rig.running() as finalizer:
        await _submit(finalizer, 30)
        await until(lambda: finalizer.stats.record_failures > 2)
        assert not rig.redis.calls
        assert finalizer.stats.record_down_since is not None
        rig.store.down = False
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert len(rig.redis.done) == 30
    assert finalizer.stats.record_down_since is None


async def test_jobs_are_recorded_while_redis_is_down(rig: Rig) -> None:
    rig.redis.fail_before = 10**9
    async with rig.running() as finalizer:
        await _submit(finalizer, 10)
        await until(lambda: finalizer.stats.acknowledge_down_since is not None)
        await _submit(finalizer, 10, start=10)
        await until(lambda: len(rig.store.recorded) == 20)
        assert len(finalizer) == 20
        rig.redis.fail_before = 0
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert len(rig.redis.done) == 20


async def test_a_lost_reply_leads_only_to_a_repeated_acknowledgement(rig: Rig) -> None:
    rig.redis.fail_after = 3
    async with rig.running() as finalizer:
        await _submit(finalizer, 8)
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert len(rig.redis.done) == 8
    assert finalizer.stats.recorded == 8
    assert finalizer.stats.recorded_before == 0


async def test_a_full_buffer_makes_submitters_wait(rig: Rig) -> None:
    rig.store.down = True
    async with rig.running(max_buffered=10) as finalizer:
        await _submit(finalizer, 9)
        assert not _intake_stops(finalizer)
        await _submit(finalizer, 3, start=9)  # running jobs still end
        assert _intake_stops(finalizer)
        rig.store.down = False
        await until(lambda: not finalizer.is_full)
        await finalizer.drain(60)
        assert finalizer.held_ids == []


async def test_acknowledgements_of_jobs_of_other_workers_count_as_lost(rig: Rig) -> None:
    rig.redis.outdated = {"job-1", "job-3"}
    async with rig.running() as finalizer:
        await _submit(finalizer, 5)
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert (finalizer.stats.acknowledged, finalizer.stats.lost) == (3, 2)


async def test_a_job_whose_acknowledgement_fails_does_not_delay_the_others(rig: Rig) -> None:
    rig.redis.poison = {"job-17"}
    async with rig.running() as finalizer:
        await _submit(finalizer, 64)
        await until(lambda: len(rig.redis.done) == 63)
        await finalizer.drain(0.1)
        assert finalizer.held_ids == ["job-17"]
        rig.redis.poison = set()
        await finalizer.drain(60)
        assert finalizer.held_ids == []


async def test_a_job_that_sql_refuses_is_kept_and_retried(rig: Rig) -> None:
    rig.store.refuse = {"job-2"}
    async with rig.running() as finalizer:
        await _submit(finalizer, 5)
        await until(lambda: len(rig.redis.done) == 4)
        await finalizer.drain(0.1)
        assert finalizer.held_ids == ["job-2"]
        assert "job-2" not in rig.redis.done
        rig.store.refuse = set()
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    assert "job-2" in rig.redis.done
    assert finalizer.stats.refused >= 2


async def test_a_redelivered_job_ends_in_redis_with_the_result_of_sql(rig: Rig) -> None:
    first = finished("job-0", worker_id="dead-worker")
    rig.store.recorded["job-0"] = first
    async with rig.running() as finalizer:
        late = finished("job-0", token=2, choices=(ChoiceResult(text="something else"),))
        early_end = msgspec.structs.replace(late.final_chunk, index=0)
        await finalizer.submit(replace(late, final_chunk=early_end))
        await finalizer.drain(60)
        assert finalizer.held_ids == []
    reported = rig.redis.done["job-0"]
    assert reported.result == first.result
    assert reported.token == 2  # under our lease
    assert reported.final_chunk.usage == first.result.usage
    # A subscriber with fewer tokens than SQL must see a gap, and not the end.
    assert reported.final_chunk.index == len(first.result.token_ids)
    assert reported.final_chunk.finish_reason == first.result.finish_reason
    assert rig.reported == []  # it was counted when it was recorded


def came_back(recorded: FinishedJob, **changes: Any) -> AdmittedJob:
    """A job that another worker had before; only its delivery and its request are looked at."""
    delivery = Delivery(
        job_id=recorded.result.job_id, token=2, payload=b"", deliveries=2, crashes=0, outcome="run",
        log=(),
        created_ms=recorded.result.created_ms, started_ms=0, attempt=1,
    )  # fmt: skip
    request = msgspec.structs.replace(recorded.request or JobRequest(job_id=""), **changes)
    return AdmittedJob(delivery, request, cast("Any", None), cast("Any", None))


async def test_a_job_whose_end_is_in_sql_is_not_generated_again(rig: Rig) -> None:
    first = finished("job-0", worker_id="dead-worker")
    rig.store.recorded["job-0"] = first
    async with rig.running() as finalizer:
        (outcome,) = await finalizer.skip_recorded([came_back(first)])
        assert isinstance(outcome, FinishedJob)
        assert (outcome.token, outcome.result) == (2, first.result)
        assert outcome.final_chunk.index == len(first.result.token_ids)


async def test_a_redelivered_job_without_a_row_is_generated_again(rig: Rig) -> None:
    """A first delivery, another tenant's row of the same name, nothing recorded, no database."""
    first = finished("job-0")
    job = came_back(first)
    async with rig.running() as finalizer:
        assert await finalizer.skip_recorded([job]) == [job]
        rig.store.recorded["job-0"] = first
        stranger = came_back(first, tenant="somebody else")
        assert await finalizer.skip_recorded([stranger]) == [stranger]
        new = replace(job, delivery=replace(job.delivery, deliveries=1))
        assert await finalizer.skip_recorded([new]) == [new]
        rig.store.down = True
        assert await finalizer.skip_recorded([job]) == [job]


async def test_jobs_in_hand_are_reported_after_the_finalizer_is_cancelled(rig: Rig) -> None:
    rig.store.gate = asyncio.Event()
    async with rig.running() as finalizer:
        await _submit(finalizer, 3)
        await until(lambda: rig.store.groups == [3])
        await _submit(finalizer, 2, start=3)
    assert sorted(finalizer.held_ids) == [f"job-{number}" for number in range(5)]


async def test_a_cancelled_finalizer_ends_though_a_library_swallows_the_cancellation(
    rig: Rig,
) -> None:
    """Python 3.11's wait_for swallows one like that, and a task group cancels children once."""

    is_recording = False

    class Forgetful(FakeStore):
        async def record(self, finished: Sequence[FinishedJob]) -> RecordReport:
            nonlocal is_recording
            is_recording = True
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                raise StoreUnavailable("cut in the middle") from None
            raise AssertionError("nobody cancelled")

    rig.store = Forgetful()
    async with asyncio.timeout(60), rig.running() as finalizer:
        await _submit(finalizer, 1)
        await until(lambda: is_recording)
    assert finalizer.held_ids == ["job-0"]


async def test_a_failing_hook_does_not_stop_recording(rig: Rig) -> None:
    def broken(_jobs: list[FinishedJob]) -> None:
        raise RuntimeError("metrics are broken")

    finalizer = Finalizer(rig.store, rig.redis, on_recorded=broken)
    task = asyncio.create_task(finalizer.run())
    await _submit(finalizer, 3)
    await finalizer.drain(60)
    assert finalizer.held_ids == []
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert [len(call) for call in rig.redis.calls] == [3]
