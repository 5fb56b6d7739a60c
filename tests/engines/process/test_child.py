"""Tests of the engine process before it loads an engine."""

import os
import socket
import sys
from pathlib import Path

import pytest

from tests.engines.conformance.driver import EngineUnderTest
from tokenmill_worker.contract.messages import (
    MAX_FRAME_BYTES,
    EngineFailed,
    FrameError,
    LoadProgress,
    Logged,
    Start,
)
from tokenmill_worker.engines.process.child import LONGEST, _receive, in_one_line, set_allocator
from tokenmill_worker.engines.process.host import CHILD_MODULE


def test_the_allocator_is_set_to_expandable_segments() -> None:
    environment = {"PATH": "/bin"}
    set_allocator(environment)
    assert environment == {"PATH": "/bin", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_variable_that_is_set_is_kept(name: str) -> None:
    environment = {name: "max_split_size_mb:64"}
    set_allocator(environment)
    assert environment == {name: "max_split_size_mb:64"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sglang", "engine must be own, synthetic, vllm or a package as"),
        ("no.such.engine", "engine must be own, synthetic, vllm or a package as"),
        ("half.engine", "the engine half.engine cannot be imported: No module named 'no'"),
        ("broken.engine", "the engine broken.engine cannot be imported: KeyError: 'LICENCE'"),
        ("misread.engine", "engine must be own, synthetic, vllm or a package as"),
    ],
)
def test_an_engine_that_cannot_be_imported_is_reported_in_one_sentence(
    name: str, words: str, tmp_path: Path
) -> None:
    sources = {"half": "import no\n", "broken": "{}['LICENCE']\n", "misread": ""}
    for folder, source in sources.items():
        package = tmp_path / folder / "engine"
        package.mkdir(parents=True)
        config = "from ops.examples.engine.config import KIND\n" if source else "KIND =\n"
        (package / "config.py").write_text(config)
        (package / "serve.py").write_text(source)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}  # noqa: TID251 - the process's
    command = [sys.executable, "-m", CHILD_MODULE]
    engine = EngineUnderTest(command, Start(engine=name, settings={}), environment)
    try:
        assert engine.report() == LoadProgress("importing the engine", 0.0)
        report = engine.report()
        assert isinstance(report, EngineFailed)
        assert report.at_start
        assert report.message.startswith(words)
        assert "\n" not in report.message
        assert engine.process.wait(20) == 1
    finally:
        engine.kill()


def test_a_reason_is_one_line_of_whole_sentences_and_the_log_has_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = "x, " * LONGEST
    said = in_one_line(f"Model architectures ['Nope'] are not supported.\nKnown: {known}")
    assert said == "Model architectures ['Nope'] are not supported"
    assert "Known: x, x, " in caplog.text
    assert in_one_line("RuntimeError: no\n  device") == "RuntimeError: no device"
    assert len(in_one_line("x" * 999)) == LONGEST


def engine_of(source: str, folder: Path) -> EngineUnderTest:
    """Start the process of an engine whose module `serve` has this source."""
    package = folder / "mine" / "engine"
    package.mkdir(parents=True)
    (package / "config.py").write_text("from ops.examples.engine.config import KIND\n")
    (package / "serve.py").write_text(source)
    paths = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": paths}  # noqa: TID251 - the process's
    start = Start(engine="mine.engine", settings={"model": "alphabet"})
    return EngineUnderTest([sys.executable, "-m", CHILD_MODULE], start, environment)


COLLECTOR = """\
import gc
from ops.examples.engine import serve as example
from tokenmill_worker.contract.messages import LoadProgress
def state(emit, when):
    emit(LoadProgress(f"{when}: {gc.isenabled()}, {gc.get_freeze_count()}", 0.0))
imported = gc.isenabled()
def serve(start, mailbox, emit):
    emit(LoadProgress(f"imported: {imported}", 0.0))
    state(emit, "loading")
    def pass_on(report):
        emit(report)
        if isinstance(report, example.Ready):
            state(emit, "ready")
    return example.serve(start, mailbox, pass_on)
"""


def test_the_collector_rests_while_an_engine_is_imported_and_skips_what_is_loaded(
    tmp_path: Path,
) -> None:
    engine = engine_of(COLLECTOR, tmp_path)
    said: list[tuple[str, str, int]] = []
    try:
        assert engine.report() == LoadProgress("importing the engine", 0.0)
        assert engine.report() == LoadProgress("imported: False", 0.0)
        while len(said) < 2:
            report = engine.report()
            if isinstance(report, LoadProgress):
                when, _, found = report.message.partition(": ")
                is_enabled, _, frozen = found.partition(", ")
                said.append((when, is_enabled, int(frozen)))
    finally:
        engine.kill()
    (loading, in_loading, libraries), (ready, in_ready, everything) = said
    assert (loading, in_loading, ready, in_ready) == ("loading", "True", "ready", "True")
    assert 1_000 < libraries < everything


BEFORE = "ZeroDivisionError: division by zero (serve.py, line 2)"
AFTER = "KeyError (serve.py, line 5)"
RAISES_BEFORE = "def serve(start, mailbox, emit):\n    1 / 0\n"
RAISES_AFTER = """\
from ops.examples.engine import serve as example
def serve(start, mailbox, emit):
    def fail(report):
        if not isinstance(report, example.Ready):
            raise KeyError
        emit(report)
    return example.serve(start, mailbox, fail)
"""


@pytest.mark.parametrize(
    ("source", "words", "is_ready"),
    [(RAISES_BEFORE, BEFORE, False), (RAISES_AFTER, AFTER, True)],
    ids=["before it is ready", "after it was ready"],
)
def test_an_error_that_serve_raises_is_reported_in_one_sentence(
    source: str, words: str, is_ready: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = engine_of(source, tmp_path)
    try:
        if is_ready:
            engine.ready()
        reports = [engine.report()]
        while not isinstance(reports[-1], EngineFailed):
            reports.append(engine.report())
        assert reports[-1] == EngineFailed(
            f"the engine mine.engine cannot go on: {words}", at_start=not is_ready
        )
        logged = [report for report in reports if isinstance(report, Logged)]
        assert [one.message.startswith("Traceback") for one in logged] == [True]
        assert engine.process.wait(20) == 1
    finally:
        engine.kill()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_frame_that_is_longer_than_any_command_is_not_received() -> None:
    """Its length alone would take up to 4 GiB of memory."""
    worker, engine = socket.socketpair()
    with worker, engine:
        worker.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
        with pytest.raises(FrameError, match="a frame of 268435457 bytes is announced"):
            _receive(engine)
