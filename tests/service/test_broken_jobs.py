"""A stage that raises for one job fails this job alone: the worker and the other jobs go on."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tests.publish.support import FakeLog, event
from tests.service.test_jobs import Bench, delivery, running
from tests.support.waiting import until
from tokenmill_schemas.codec import encode
from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import JobStatus
from tokenmill_worker.checking import checks as checks_module
from tokenmill_worker.input.input_processor import PromptEncoder
from tokenmill_worker.jobs import AppendFailures, ChunkAppend, FinishedJob
from tokenmill_worker.publish.chunker import Chunker
from tokenmill_worker.publish.publisher import Publisher
from tokenmill_worker.publish.running_job import RunningJob
from tokenmill_worker.queue.scripts import finish_arguments
from tokenmill_worker.text.token_pieces import ByteLevelDetokenizer

LENGTH = FinishReason.LENGTH
BROKEN_TEXT = "\ud800"


class Panic(BaseException):
    """Stands for a panic of native code, which is no Exception."""


class EncodingLog(FakeLog):
    async def append(self, items: list[ChunkAppend]) -> AppendFailures:
        for item in items:
            encode(item.chunk)
        return await super().append(items)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    bench.log = EncodingLog()
    bench.service._publisher = bench.service.entrance._publisher = Publisher(bench.log)
    bench.service.ends._publisher = bench.service._publisher
    async with running(bench):
        yield bench


def raising(original: Any, job_id: str, id_of: Any, error: BaseException) -> Any:
    """Return a method that raises for one job."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id_of(self, *args) == job_id:
            raise error
        return original(self, *args, **kwargs)

    return method


async def the_others_go_on(bench: Bench, error_says: str) -> FinishedJob:
    """Let the good jobs end, and return the end of the bad one."""
    for name in ("good", "fine"):
        await bench.host.step(event("xy", name, end=LENGTH))
    ends = {one.job_id: one for one in bench.record.finished}
    assert set(ends) == {"good", "bad", "fine"}
    for name in ("good", "fine"):
        assert ends[name].result.status is JobStatus.SUCCEEDED
        assert ends[name].result.text.endswith("xy")
    bad = ends["bad"]
    assert bad.result.status is JobStatus.FAILED
    assert bad.result.error is not None
    assert (bad.result.error.code, bad.final_chunk.error) == ("internal_error", bad.result.error)
    assert error_says in bad.result.error.message
    encode(bad.result), encode(bad.final_chunk)
    assert len(bench.service._owned) == 0
    await bench.service.take([delivery("next")])
    await bench.host.step(event("z", "next", end=LENGTH))
    assert bench.record.finished[-1].result.text == "z"
    return bad


NAMES = ("good", "bad", "fine")


@pytest.mark.parametrize("error", [ZeroDivisionError("no"), Panic("a panic")])
async def test_an_input_whose_processing_raises_fails_only_its_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    method = raising(PromptEncoder.render, "bad", lambda _self, request: request.job_id, error)
    monkeypatch.setattr(PromptEncoder, "render", method)
    await bench.service.take([delivery(name) for name in NAMES])
    assert bench.host.submitted == ["good/1", "fine/1"]
    await the_others_go_on(bench, type(error).__name__)


async def test_a_request_that_cannot_be_sent_to_the_engine_fails_only_its_job(bench: Bench) -> None:
    bench.host.unsendable.add("bad/1")
    await bench.service.take([delivery(name) for name in NAMES])
    assert bench.host.submitted == ["good/1", "fine/1"]
    await the_others_go_on(bench, "UnicodeEncodeError")


async def test_an_answer_whose_opening_raises_fails_only_its_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = raising(Publisher.open, "bad", lambda _self, job: job.job_id, KeyError("no"))
    monkeypatch.setattr(Publisher, "open", method)
    await bench.service.take([delivery(name) for name in NAMES])
    await the_others_go_on(bench, "KeyError")


async def test_tokens_whose_processing_raises_fail_only_their_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = raising(RunningJob.apply, "bad", lambda self, *_: self.job.job_id, IndexError("no"))
    await bench.service.take([delivery(name) for name in NAMES])
    await bench.host.step(*(event("ab", name) for name in NAMES))
    monkeypatch.setattr(RunningJob, "apply", method)
    await bench.host.step(*(event("cd", name) for name in NAMES))
    bad = await the_others_go_on(bench, "IndexError")
    assert bad.result.text == "ab"
    assert bench.host.cancelled == ["bad/1"]
    assert bench.log.text("good") == "abcdxy"


async def test_chunks_whose_making_raises_fail_only_their_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = raising(Chunker.appends, "bad", lambda self, *_: self._job_id, RuntimeError("no"))
    monkeypatch.setattr(Chunker, "appends", method)
    await bench.service.take([delivery(name) for name in NAMES])
    await bench.host.step(*(event("ab", name) for name in NAMES))
    await the_others_go_on(bench, "RuntimeError")


@pytest.mark.parametrize("first", ["a", "ab", ""], ids=["one token", "several", "from the start"])
async def test_text_that_cannot_be_encoded_fails_only_its_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    push = ByteLevelDetokenizer.push
    monkeypatch.setattr(
        ByteLevelDetokenizer,
        "push",
        lambda self, token: BROKEN_TEXT if token == ord("!") else push(self, token),
    )
    await bench.service.take([delivery(name) for name in NAMES])
    if first:
        await bench.host.step(*(event(first, name) for name in NAMES))
    events = [event("!" if name == "bad" else "c", name) for name in NAMES]
    await bench.host.step(*events)
    await bench.host.step(event("d", "good"), event("d", "fine"))
    bad = await the_others_go_on(bench, "UnicodeEncodeError")
    assert bad.result.text == ""
    assert bench.log.text("good") == bench.log.text("fine") == f"{first}cdxy"


async def test_an_end_whose_building_raises_fails_only_its_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = raising(
        RunningJob.finished, "bad", lambda self, *_: self.job.job_id, OverflowError("no")
    )
    monkeypatch.setattr(RunningJob, "finished", method)
    await bench.service.take([delivery(name) for name in NAMES])
    await bench.host.step(event("ab", "bad", end=LENGTH))
    await the_others_go_on(bench, "OverflowError")


@pytest.mark.parametrize("function", ["has_schema", "checked"])
async def test_an_answer_whose_check_raises_fails_only_its_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    original = getattr(checks_module, function)

    def broken(finished: FinishedJob, *args: Any) -> Any:
        if finished.job_id == "bad":
            raise ArithmeticError("no")
        return original(finished, *args)

    monkeypatch.setattr(checks_module, function, broken)
    params = SamplingParams(response_format=ResponseFormat(json_schema={"type": "object"}))
    request = JobRequest(job_id="bad", prompt="hi", params=params)
    await bench.service.take([delivery("good"), delivery("bad", request), delivery("fine")])
    await bench.host.step(event("{}", "bad", end=FinishReason.STOP))
    await until(lambda: bool(bench.record.finished))
    await the_others_go_on(bench, "ArithmeticError")


async def test_an_end_that_cannot_be_encoded_is_acknowledged_without_its_answer(
    bench: Bench,
) -> None:
    await bench.service.take([delivery("job")])
    await bench.host.step(event("ab", "job", end=LENGTH))
    (finished,) = bench.record.finished
    (choice,) = finished.result.choices
    broken = msgspec.structs.replace(choice, text=BROKEN_TEXT)
    result = msgspec.structs.replace(finished.result, choices=(broken,))
    broken_end = dataclasses.replace(finished, result=result)
    job_id, token, status, *_ = finish_arguments(broken_end)
    assert (job_id, token, status) == ("job", 1, "failed")
