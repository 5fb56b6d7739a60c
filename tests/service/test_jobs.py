"""Tests of owned jobs: one that is lost and claimed again is a new request, without old state."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.publish.support import MODEL, FakeLog, delivery_of, event
from tests.support.tokenizers import byte_level
from tests.support.waiting import until
from tokenmill.transport.repairs import end_task
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import JobRequest, RetryPolicy
from tokenmill_worker.contract.events import Capacity, EngineStats, TokenEvent
from tokenmill_worker.contract.host import EngineDied
from tokenmill_worker.contract.messages import Frame, Ready
from tokenmill_worker.contract.requests import GenerationRequest
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import Delivery, FinishedJob
from tokenmill_worker.publish.publisher import Publisher
from tokenmill_worker.service import Service, early_ends
from tokenmill_worker.service.preparation import AT_ONCE_BYTES

CAPACITY = Capacity(
    free_sequences=4,
    free_blocks=100,
    waiting=0,
    running=0,
    block_size=16,
    max_model_len=4096,
    free_urgent=0,
)


class ScriptedHost:
    """Simulates an engine by a test's script."""

    capacity = CAPACITY

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.unsendable: set[str] = set()  # requests that cannot be encoded
        self.cancelled: list[str] = []
        self._frames: asyncio.Queue[Frame | None] = asyncio.Queue()

    async def start(self, on_progress: Callable[[str, float], None] | None = None) -> Ready:
        return Ready(
            model="tiny", max_model_len=4096, max_num_seqs=4, vocab_size=MODEL.vocab_size,
            eos_token_ids=(), model_path="",
            description="scripted", capacity=CAPACITY,
        )  # fmt: skip

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        requests = tuple(requests)
        for request in requests:
            if request.request_id in self.unsendable:
                raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
        self.submitted += [request.request_id for request in requests]

    def cancel(self, request_id: str, reason: FinishReason, choice: int | None = None) -> None:
        self.cancelled.append(request_id)

    async def frames(self) -> AsyncIterator[Frame]:
        while True:
            frame = await self._frames.get()
            if frame is None:
                raise EngineDied("it crashed")
            yield frame
            self._frames.task_done()

    def die(self) -> None:
        """Die at the next frame."""
        self._frames.put_nowait(None)

    def send(self, *events: TokenEvent) -> None:
        self._frames.put_nowait(Frame(events=events, capacity=CAPACITY, stats=EngineStats()))

    async def step(self, *events: TokenEvent) -> None:
        """Send a step's events, and return when the worker has handled them."""
        self.send(*events)
        await self._frames.join()

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...


class Orders:
    """Stands in for the queue's calls other than appends."""

    def __init__(self) -> None:
        self.retried: list[tuple[str, int]] = []
        self.released: list[tuple[str, int, bool]] = []  # job id, token, crashed?
        self.suspects: list[tuple[list[str], bool]] = []  # per call: job ids, alone?
        self.is_down = False
        self.num_failed = 0

    async def retry(self, job_id: str, token: int, delay_ms: int, reason: str) -> None:
        if self.is_down:
            raise RedisUnavailable("connection refused")
        self.retried.append((job_id, token))

    async def release(self, jobs: list[tuple[str, int, bool]], *, alone: bool) -> None:
        if self.is_down:
            self.num_failed += 1
            raise RedisUnavailable("connection refused")
        self.released += jobs
        if suspects := [job_id for job_id, _, crashed in jobs if crashed]:
            self.suspects.append((suspects, alone))


class Record:
    is_full = False

    def __init__(self) -> None:
        self.finished: list[FinishedJob] = []

    async def skip_recorded(self, outcomes: list[Any]) -> list[Any]:
        return outcomes

    async def submit(self, finished: FinishedJob) -> None:
        self.finished.append(finished)


class Bench:
    """A service whose other parts the test controls."""

    def __init__(self) -> None:
        self.host, self.orders, self.record, self.log = (
            ScriptedHost(),
            Orders(),
            Record(),
            FakeLog(),
        )
        parts: dict[str, Any] = {"stream": self.orders, "finalizer": self.record}
        self.service = Service(
            **parts,
            host_factory=lambda: self.host,
            processor_factory=self._processor,
            publisher=Publisher(self.log),
        )

    async def _processor(self, ready: Ready) -> InputProcessor:
        return InputProcessor(byte_level(), MODEL)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running(Bench()) as found:
        yield found


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    engine = asyncio.create_task(bench.service.run_engine())
    await bench.service.started.wait()
    try:
        yield bench
    finally:
        await end_task(engine)


def delivery(job_id: str, request: JobRequest | None = None, **fields: Any) -> Delivery:
    retry = RetryPolicy(max_attempts=3, backoff_ms=0)
    default = JobRequest(job_id=job_id, prompt="hi", stream=True, retry=retry)
    return delivery_of(request or default, **fields)


async def test_a_job_lost_and_claimed_again_gets_no_event_of_its_first_delivery(
    bench: Bench,
) -> None:
    await bench.service.take([delivery("job")])
    await bench.host.step(event("ab"))
    bench.service.ends.drop_lost(["job"])
    assert bench.host.cancelled == ["job/1"]
    await bench.service.take([delivery("job", token=2, log=tuple(bench.log.chunks["job"]))])
    assert bench.host.submitted == ["job/1", "job/2"]
    await bench.host.step(event("X"))  # the step that was under way
    await bench.host.step(event("", end=FinishReason.CANCELLED))
    await bench.host.step(event("cd", end=FinishReason.LENGTH, token=2))
    (finished,) = bench.record.finished
    assert (finished.result.text, finished.token) == ("abcd", 2)
    assert len(bench.service._owned) == 0


async def test_lost_suspects_do_not_hold_other_jobs_back(bench: Bench) -> None:
    await bench.service.take([delivery(name, alone=True) for name in "ab"])
    assert bench.host.submitted == ["a/1"]
    bench.service.ends.drop_lost(["a", "b"])
    await bench.host.step()
    assert bench.service.credits()
    await bench.service.take([delivery("c")])
    assert bench.host.submitted == ["a/1", "c/1"]


async def test_a_suspect_lost_while_held_is_not_started(
    bench: Bench,
) -> None:
    await bench.service.take([delivery(name, alone=True) for name in "ab"])
    bench.service.ends.drop_lost(["b"])
    await bench.host.step(event("x", "a", end=FinishReason.LENGTH))
    await bench.host.step()
    assert bench.host.submitted == ["a/1"]
    await bench.service.take([delivery("c", alone=True)])
    assert bench.host.submitted == ["a/1", "c/1"]


async def test_suspects_that_cannot_be_started_return_together_without_alone(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_outcomes: list[Any]) -> list[Any]:
        raise RuntimeError("a fault of ours")

    suspects = [delivery(name, crashes=1) for name in "ab"]
    await bench.service.take([delivery("first", alone=True), *suspects])
    assert bench.host.submitted == ["first/1"]
    monkeypatch.setattr(bench.record, "skip_recorded", broken)
    await bench.host.step(event("x", "first", end=FinishReason.LENGTH))
    assert bench.orders.suspects == [(["a", "b"], False)]
    assert len(bench.service._owned) == 0


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_a_job_of_a_dead_engine_counts_as_alone_only_without_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    """Others may be lost while the queue does not take them back."""
    monkeypatch.setattr(early_ends, "RELEASE_RETRY_S", 0.01)
    await bench.service.take([delivery(name) for name in names])
    bench.orders.is_down = True
    bench.host.die()
    await until(lambda: bench.orders.num_failed > 0)
    bench.service.ends.drop_lost(names[1:])
    bench.orders.is_down = False
    await until(lambda: bool(bench.orders.suspects))
    assert bench.orders.suspects == [(["a"], names == "a")]


async def test_a_retry_order_applies_only_to_the_failed_delivery(bench: Bench) -> None:
    await bench.service.take([delivery("job")])
    bench.orders.is_down = True
    await bench.host.step(
        event("", end=FinishReason.ERROR, error="boom", error_code="engine_error")
    )
    bench.service.ends.drop_lost(["job"])
    await bench.service.take([delivery("job", token=2)])
    bench.orders.is_down = False
    await bench.host.step()
    assert bench.orders.retried == []
    assert len(bench.service._owned) == 1


async def test_jobs_whose_admission_raises_are_not_owned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer gives it back to the queue; an end that was already handed on stays."""

    async def broken(_outcomes: list[Any]) -> list[Any]:
        raise RuntimeError("a fault of ours")

    await bench.service.take([delivery("before")])
    monkeypatch.setattr(bench.record, "skip_recorded", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await bench.service.take([delivery("job")])
    assert len(bench.service._owned) == 1
    monkeypatch.undo()
    await bench.service.take([delivery("job", token=2)])
    assert bench.host.submitted == ["before/1", "job/2"]


@pytest.mark.parametrize("length", [0, AT_ONCE_BYTES], ids=["in the engine", "in preparation"])
async def test_a_job_claimed_again_before_its_loss_is_reported_replaces_its_first_delivery(
    bench: Bench, length: int
) -> None:
    """The claim may come before the heartbeat that tells of the loss."""
    before = bench.service.credits()
    request = JobRequest(job_id="job", prompt="hi", stream=True, metadata={"a": "x" * length})
    await bench.service.take([delivery("job", request)])
    await bench.service.take([delivery("job", request, token=2)])
    assert bench.host.cancelled == ["job/1"]
    await until(lambda: "job/2" in bench.host.submitted)
    await bench.host.step(event("X"), event("cd", end=FinishReason.LENGTH, token=2))
    (finished,) = bench.record.finished
    assert (finished.result.text, finished.token) == ("cd", 2)
    assert len(bench.service._owned) == 0
    assert bench.service.credits() == before
    assert not bench.service._owned.in_engine


async def test_a_claim_that_fails_leaves_the_suspects_of_an_earlier_claim_to_the_next_frame(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_outcomes: list[Any]) -> list[Any]:
        raise RuntimeError("a fault of ours")

    await bench.service.take([delivery(name, alone=True) for name in "ab"])
    bench.service.ends.drop_lost(["a"])
    with monkeypatch.context() as patched:
        patched.setattr(bench.record, "skip_recorded", broken)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await bench.service.take([delivery("ended", outcome="cancelled")])
    await bench.host.step()
    assert bench.host.submitted == ["a/1", "b/1"]


async def test_suspects_claimed_later_start_after_held_ones(bench: Bench) -> None:
    await bench.service.take([delivery(name, alone=True) for name in "ab"])
    await bench.service.take([delivery("c", alone=True)])
    for name in "abc":
        await bench.host.step(event("x", name, end=FinishReason.LENGTH))
    assert bench.host.submitted == ["a/1", "b/1", "c/1"]


async def test_a_job_in_admission_during_a_hand_over_does_not_enter_the_engine(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = asyncio.Event()

    async def slow(outcomes: list[Any]) -> list[Any]:
        await may_go_on.wait()
        return outcomes

    async def release(jobs: list[tuple[str, int, bool]], *, alone: bool) -> None:
        may_go_on.set()
        await taking
        bench.orders.released += jobs

    monkeypatch.setattr(bench.record, "skip_recorded", slow)
    monkeypatch.setattr(bench.orders, "release", release)
    taking = asyncio.create_task(bench.service.take([delivery("job")]))
    await until(lambda: len(bench.service._owned) == 1)
    await bench.service.drain(0, asyncio.Event())
    assert bench.orders.released == [("job", 1, False)]
    assert bench.host.submitted == []
