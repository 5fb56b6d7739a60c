"""Jobs with much to read are processed beside the others; whatever happens meanwhile is right."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.publish.support import MODEL, event
from tests.service.test_jobs import CAPACITY, Bench, delivery, running
from tests.support.tokenizers import byte_level
from tests.support.waiting import until
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import JobRequest, Priority
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import AdmittedJob, Delivery, FinishedJob
from tokenmill_worker.queue.consumer import Credits
from tokenmill_worker.service.preparation import AT_ONCE_BYTES, LONG_BYTES

LONG = {"a": "x" * AT_ONCE_BYTES}
LONGER = {str(i): "x" * 4_000 for i in range(LONG_BYTES // 4_000)}


class GatedProcessor(InputProcessor):
    """Processes a job once its gate is open; jobs without a gate at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.begun: list[str] = []
        self.ended: list[str] = []

    def process(self, delivery: Delivery) -> AdmittedJob | FinishedJob:
        self.begun.append(delivery.job_id)
        if delivery.job_id in self.gates and not self.gates[delivery.job_id].wait(60):
            raise AssertionError("nobody opened the gate")
        outcome = super().process(delivery)
        self.ended.append(delivery.job_id)
        return outcome


class GatedBench(Bench):
    processor: GatedProcessor

    async def _processor(self, ready: Any) -> GatedProcessor:
        self.processor = GatedProcessor(byte_level(), MODEL)
        return self.processor

    def close(self, *job_ids: str) -> None:
        for job_id in job_ids:
            self.processor.gates[job_id].clear()

    def open(self, job_id: str) -> None:
        self.processor.gates[job_id].set()

    async def submitted(self, *job_ids: str) -> None:
        """Wait until exactly these jobs were submitted to the engine."""
        await until(lambda: len(self.host.submitted) >= len(job_ids))
        assert self.host.submitted == [f"{job_id}/1" for job_id in job_ids]

    async def begun(self, job_id: str) -> None:
        await until(lambda: job_id in self.processor.begun)


@pytest.fixture
async def bench() -> AsyncIterator[GatedBench]:
    bench = GatedBench()
    async with running(bench):
        yield bench
        for gate in bench.processor.gates.values():
            gate.set()


def long(
    job_id: str,
    priority: Priority = Priority.STANDARD,
    metadata: dict[str, str] = LONG,
    **fields: Any,
) -> Delivery:
    request = JobRequest(
        job_id=job_id, prompt="hi", stream=True, priority=priority, metadata=metadata
    )
    return delivery(job_id, request, **fields)


async def test_the_other_jobs_of_a_claim_start_before_a_long_one(bench: GatedBench) -> None:
    bench.close("long")
    await bench.service.take([long("long"), delivery("a"), delivery("b")])
    assert bench.host.submitted == ["a/1", "b/1"]
    await bench.service.take([delivery("c")])
    bench.open("long")
    await bench.submitted("a", "b", "c", "long")
    await bench.host.step(event("xy", "long", end=FinishReason.LENGTH))
    (finished,) = bench.record.finished
    assert (finished.result.job_id, finished.result.text) == ("long", "xy")


async def test_jobs_in_preparation_use_up_credits(bench: GatedBench) -> None:
    before = bench.service.credits().free
    bench.close("a", "b")
    await bench.service.take([long("a"), long("b"), delivery("c")])
    assert bench.service.credits().free == before - 3
    bench.open("a")
    bench.open("b")
    await bench.submitted("c", "a", "b")
    assert bench.service.credits().free == before - 3


async def test_bulk_jobs_in_preparation_take_no_room_from_interactive_jobs(
    bench: GatedBench,
) -> None:
    bench.host.capacity = msgspec.structs.replace(
        CAPACITY, free_sequences=16, running=16, free_urgent=16
    )
    urgent = [
        JobRequest(job_id=f"urgent{i}", prompt="hi", priority=Priority.INTERACTIVE)
        for i in range(16)
    ]
    await bench.service.take([delivery(request.job_id, request) for request in urgent])
    bench.close("bulk0")
    await bench.service.take([long(f"bulk{i}", Priority.BULK) for i in range(30)])
    assert bench.service.credits() == Credits(free=0, urgent=16)
    await bench.service.take([long("long", Priority.INTERACTIVE)])
    assert bench.service.credits() == Credits(free=0, urgent=15)


async def test_ended_jobs_with_much_to_read_use_up_no_credits_and_wait_for_no_others(
    bench: GatedBench,
) -> None:
    bench.close("first")
    await bench.service.take([long("first")])
    await bench.begun("first")
    await bench.service.take([long("waiting", Priority.INTERACTIVE)])
    before = bench.service.credits()
    await bench.service.take([long("ended", outcome="cancelled")])
    assert bench.service.credits() == before
    bench.open("first")
    await bench.submitted("first", "waiting")
    assert bench.processor.begun == ["first", "ended", "waiting"]
    assert [one.job_id for one in bench.record.finished] == ["ended"]


async def test_equally_long_jobs_keep_the_order_of_their_claims(bench: GatedBench) -> None:
    names = [f"job{i}" for i in range(20)]
    await bench.service.take([long(name) for name in names[:10]])
    await bench.service.take([long(name) for name in names[10:]])
    await bench.submitted(*names)


async def test_long_interactive_jobs_are_processed_before_long_bulk_jobs(
    bench: GatedBench,
) -> None:
    bench.close("first")
    await bench.service.take([long("first", Priority.BULK), long("bulk", Priority.BULK)])
    await bench.begun("first")
    await bench.service.take([long("standard"), long("urgent", Priority.INTERACTIVE)])
    bench.open("first")
    await bench.submitted("first", "urgent", "standard", "bulk")


async def test_no_job_waits_for_one_with_very_much_to_read(bench: GatedBench) -> None:
    bench.close("longer")
    await bench.service.take([long("longer", metadata=LONGER), long("long")])
    await bench.submitted("long")
    bench.open("longer")
    await bench.submitted("long", "longer")


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_job_cancelled_in_preparation_ends_without_the_engine(
    bench: GatedBench, is_begun: bool
) -> None:
    bench.close("first", "job")
    await bench.service.take([long("first"), long("job")])
    if is_begun:
        bench.open("first")
        await bench.begun("job")
    bench.service.ends.cancel("job")
    bench.open("first")
    bench.open("job")
    await until(lambda: bool(bench.record.finished))
    (finished,) = bench.record.finished
    assert (finished.result.job_id, finished.result.status) == ("job", JobStatus.CANCELLED)
    await bench.submitted("first")


async def test_a_suspect_cancelled_while_it_is_held_ends_without_the_engine(
    bench: GatedBench,
) -> None:
    await bench.service.take([delivery(name, alone=True) for name in "ab"])
    bench.service.ends.cancel("b")
    await bench.host.step(event("x", "a", end=FinishReason.LENGTH))
    await bench.host.step()
    assert bench.host.submitted == ["a/1"]
    assert [one.result.status for one in bench.record.finished] == [
        JobStatus.SUCCEEDED,
        JobStatus.CANCELLED,
    ]


async def test_a_job_lost_in_preparation_is_dropped(bench: GatedBench) -> None:
    bench.close("job", "waiting")
    await bench.service.take([long("job"), long("waiting"), long("next")])
    await bench.begun("job")
    bench.service.ends.drop_lost(["job", "waiting"])
    bench.open("job")
    await bench.submitted("next")
    assert bench.processor.begun == ["job", "next"]
    assert bench.record.finished == []
    assert len(bench.service._owned) == 1


async def test_a_job_lost_in_preparation_and_claimed_again_runs_once(bench: GatedBench) -> None:
    bench.close("job")
    await bench.service.take([long("job")])
    await bench.begun("job")
    bench.service.ends.drop_lost(["job"])
    await bench.service.take([long("job", token=2)])
    bench.open("job")
    await until(lambda: bool(bench.host.submitted))
    assert bench.host.submitted == ["job/2"]


async def test_a_job_processed_during_its_hand_over_does_not_enter_the_engine(
    bench: GatedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def release(jobs: list[tuple[str, int, bool]], *, alone: bool) -> None:
        bench.open("job")
        await until(lambda: "job" in bench.processor.ended)
        for _ in range(100):  # turns of the event loop, in which the outcome arrives
            await asyncio.sleep(0)
        bench.orders.released += jobs

    bench.close("job")
    await bench.service.take([long("job"), long("waiting"), delivery("short")])
    await bench.begun("job")
    monkeypatch.setattr(bench.orders, "release", release)
    await bench.service.drain(0, asyncio.Event())
    released = [(name, 1, False) for name in ("job", "short", "waiting")]
    assert sorted(bench.orders.released) == released
    assert bench.host.submitted == ["short/1"]
    assert bench.processor.begun == ["short", "job"]


async def test_a_job_in_preparation_when_the_engine_dies_is_no_suspect(bench: GatedBench) -> None:
    bench.close("job")
    await bench.service.take([long("job"), delivery("short")])
    await bench.begun("job")
    bench.host.die()
    await until(lambda: bench.service.health.engine_restarts == 1)
    assert sorted(bench.orders.released) == [("job", 1, False), ("short", 1, True)]
    bench.open("job")
    await until(lambda: bench.service.health.engine_ready)
    await bench.service.take([long("next")])
    await bench.submitted("short", "next")


async def test_a_deadline_that_passes_in_preparation_ends_the_job(bench: GatedBench) -> None:
    bench.close("job")
    request = JobRequest(job_id="job", prompt="hi", deadline_ms=2**52, metadata=LONG)
    await bench.service.take([delivery("job", request)])
    await bench.begun("job")
    bench.processor._clock.note(2**52 * 1_000_000)
    bench.open("job")
    await until(lambda: bool(bench.record.finished))
    assert bench.record.finished[0].result.status is JobStatus.EXPIRED
    assert bench.host.submitted == []


@pytest.mark.parametrize("is_down", [True, False])
async def test_a_long_job_that_cannot_be_passed_on_returns_to_the_queue_as_a_suspect(
    bench: GatedBench, monkeypatch: pytest.MonkeyPatch, is_down: bool
) -> None:
    async def broken(_outcomes: list[Any]) -> list[Any]:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patched:
        patched.setattr(bench.record, "skip_recorded", broken)
        bench.orders.is_down = is_down
        await bench.service.take([long("job")])
        await bench.begun("job")
        bench.orders.is_down = False
        await until(lambda: bool(bench.orders.released))
    assert bench.orders.released == [("job", 1, True)]
    assert len(bench.service._owned) == 0
    await bench.service.take([long("job", token=2)])
    await until(lambda: bench.host.submitted == ["job/2"])


class NoThread:
    """Stands for a thread of a process that may start no more."""

    def __init__(self, **_arguments: Any) -> None: ...

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


async def test_a_long_job_without_a_thread_returns_to_the_queue_and_the_next_starts(
    bench: GatedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", NoThread)
        await bench.service.take([long("job")])
        await until(lambda: bool(bench.orders.released))
    assert bench.orders.released == [("job", 1, True)]
    assert len(bench.service._owned) == 0
    await bench.service.take([long("next")])
    await bench.submitted("next")


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), StopIteration()])
async def test_a_long_job_whose_processing_raises_returns_to_the_queue_and_the_next_starts(
    bench: GatedBench, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    original = bench.processor.process

    def process(delivery: Delivery) -> AdmittedJob | FinishedJob:
        if delivery.job_id == "job":
            raise error
        return original(delivery)

    monkeypatch.setattr(bench.processor, "process", process)
    await bench.service.take([long("job"), long("next")])
    await bench.submitted("next")
    assert bench.orders.released == [("job", 1, True)]


async def test_a_long_job_that_cannot_be_given_back_is_logged_and_the_next_starts(
    bench: GatedBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_arguments: Any) -> Any:
        raise RuntimeError("a fault of ours")

    with monkeypatch.context() as patched:
        patched.setattr(bench.record, "skip_recorded", broken)
        patched.setattr(bench.orders, "release", broken)
        await bench.service.take([long("job")])
        await until(lambda: "neither started nor given back" in caplog.text)
    await bench.service.take([long("next")])
    await bench.submitted("next")
