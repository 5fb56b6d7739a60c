"""Tests of what a worker learns of vLLM's engine core, which is a process beside the engine's."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.conformance.conftest import start_of_kind
from tests.engines.conformance.driver import PROMPT, EngineUnderTest, one, request
from tests.engines.conformance.test_process import group_of
from tests.engines.vllm import out_of_memory
from tests.support.vllm import VLLM, needs_vllm, with_vllm
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.messages import CancelRequest, EngineFailed
from tokenmill_worker.engines.process.host import CHILD_MODULE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200), needs_vllm]


@pytest.fixture(scope="module")
def started() -> Iterator[list[EngineUnderTest]]:
    """The engines of this module: the last one may live."""
    engines: list[EngineUnderTest] = []
    yield engines
    for engine in engines:
        engine.kill()


@pytest.fixture
def engine(started: list[EngineUnderTest]) -> EngineUnderTest:
    """The engine that a test before has left, or another one where it has ended."""
    if not started or started[-1].failure is not None:
        environment = with_vllm(os.environ, f"{out_of_memory.__name__}:install")  # noqa: TID251
        command = [str(VLLM), "-m", CHILD_MODULE]
        started.append(EngineUnderTest(command, start_of_kind("vllm"), environment))
        started[-1].ready()
    return started[-1]


@contextlib.contextmanager
def core_stopped(engine: EngineUnderTest) -> Iterator[None]:
    """Stop each process of the engine but the one that speaks with the worker."""
    others = [pid for pid in group_of(engine.process.pid) if pid != engine.process.pid]
    assert others
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in others:
            os.kill(pid, signal.SIGCONT)


def failure(engine: EngineUnderTest) -> EngineFailed:
    engine.until(lambda: engine.failure is not None)
    assert engine.failure is not None
    return engine.failure


def test_a_cancel_is_answered_beside_a_core_that_hangs_and_is_no_step(
    engine: EngineUnderTest,
) -> None:
    runs, ends = request(max_tokens=300), request(max_tokens=300)
    engine.submit(runs, ends)
    keys = [(item.request_id, 0) for item in (runs, ends)]
    engine.until(lambda: all(engine.of(key).token_ids for key in keys))
    with core_stopped(engine):
        time.sleep(1)  # the steps that it has sent are reported
        before = len(engine.frames)
        engine.send(CancelRequest(ends.request_id, FinishReason.CANCELLED))
        engine.until(lambda: engine.of(keys[1]).finish_reason is not None)
        refused = request(lora="nobody")
        engine.submit(refused)
        engine.until(lambda: engine.of((refused.request_id, 0)).finish_reason is not None)
        last = engine.frames[-1]
        assert [event.error_code for event in last.events] == ["invalid_request"]
        assert last.ended_s == 0.0
    engine.until(lambda: engine.of(keys[0]).finish_reason is not None)
    assert len(engine.of(keys[0]).token_ids) == 300
    assert [frame.ended_s > 0 for frame in engine.frames[before:]].count(False) >= 2


def test_a_core_that_hangs_gives_no_sign_of_life_when_its_requests_have_expired(
    engine: EngineUnderTest,
) -> None:
    one(engine)
    engine.until(lambda: bool(engine.frames[-1].ended_s) and not engine.frames[-1].events)
    with core_stopped(engine):
        late = request(deadline=time.monotonic() + 0.5)
        engine.submit(late)
        key = (late.request_id, 0)
        engine.until(lambda: engine.of(key).finish_reason is FinishReason.EXPIRED)
        before = len(engine.frames)
        engine.until(lambda: len(engine.frames) >= before + 3)
        assert {frame.ended_s for frame in engine.frames[before - 1 :]} == {0.0}
    engine.until(lambda: engine.frames[-1].ended_s > 0.0)
    assert len(one(engine).token_ids) == 8


def test_a_step_without_memory_is_reported_with_its_cause(engine: EngineUnderTest) -> None:
    others = request(max_tokens=300), request(prompt=(out_of_memory.TOKEN, *PROMPT))
    engine.submit(*others)
    found = failure(engine)
    assert found.message == (
        f"vLLM's engine core has died: OutOfMemoryError: {out_of_memory.WORDS}"
    )
    assert (found.at_start, found.any_step) == (False, False)
    assert [engine.of((item.request_id, 0)).finish_reason for item in others] == [None, None]


def test_a_killed_part_is_named_as_the_cause(engine: EngineUnderTest) -> None:
    one(engine)
    engine.submit(request(max_tokens=300))
    for pid in group_of(engine.process.pid):
        if Path(f"/proc/{pid}/cmdline").read_text().startswith("VLLM::Worker"):
            os.kill(pid, signal.SIGKILL)
    assert "VllmWorker-0 died unexpectedly" in failure(engine).message
