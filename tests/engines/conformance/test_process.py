"""Tests of how an engine's process starts and ends, for each kind of engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.engines.conformance.conftest import EngineToTry
from tests.engines.conformance.driver import EngineUnderTest, request
from tokenmill_worker.contract.messages import EngineFailed


@pytest.fixture
def started(engine_to_try: EngineToTry) -> Iterator[EngineUnderTest]:
    engine = engine_to_try.open()
    yield engine
    engine.kill()


def group_of(pid: int) -> list[int]:
    """Return the processes of a process group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if os.getpgid(int(folder.name)) == pid and state != "Z":
                found.append(int(folder.name))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return found


def wait_for_no_process(group: int, timeout_s: float = 20) -> None:
    limit = time.monotonic() + timeout_s
    while left := group_of(group):
        assert time.monotonic() < limit, f"processes {left} are left"
        time.sleep(0.05)


def test_a_stop_ends_the_process_with_status_0(started: EngineUnderTest) -> None:
    started.ready()
    started.submit(request(max_tokens=900))
    assert started.stop() == 0
    wait_for_no_process(started.process.pid)


def test_no_process_is_left_when_the_worker_is_gone(started: EngineUnderTest) -> None:
    started.ready()
    started.submit(request(max_tokens=900))
    assert group_of(started.process.pid)
    started.leave()
    started.process.wait(20)
    wait_for_no_process(started.process.pid)


def test_a_start_of_another_version_is_refused_in_one_sentence(engine_to_try: EngineToTry) -> None:
    start = msgspec.structs.replace(engine_to_try.start, version="9.9.9")
    engine = engine_to_try.open(start)
    try:
        report = engine.report()
        assert isinstance(report, EngineFailed)
        assert report.at_start
        assert "the worker is tokenmill 9.9.9: " in report.message
        assert "-m pip install . in the folder of tokenmill 9.9.9" in report.message
        assert engine.process.wait(20) == 4
    finally:
        engine.kill()


def test_a_command_that_cannot_be_decoded_ends_the_process(started: EngineUnderTest) -> None:
    started.ready()
    started.send_bytes(b"\xc1")
    assert started.process.wait(20) == 4
