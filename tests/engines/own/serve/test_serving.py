"""This engine served to a worker: what its start logs, and how a failed start is reported."""

import errno
import logging
import os
import re
import threading
from pathlib import Path

import pytest

from tests.support.marks import slow_unless
from tokenmill_worker.builders import start_of
from tokenmill_worker.contract.messages import EngineFailed, Mailbox
from tokenmill_worker.engines.own.config import EngineConfig, EngineConfigError
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.serve import serve
from tokenmill_worker.engines.process.host import EngineProcess

START = start_of(EngineConfig(model="synthetic", num_blocks=64))


@pytest.mark.parametrize("has_compiler", slow_unless({False}, [True, False]))
async def test_lines_logged_by_the_engine_process_are_in_the_worker_s_log_with_their_level(
    llama: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    has_compiler: bool,
) -> None:
    if not has_compiler:
        monkeypatch.setenv("PATH", "/none")
    caplog.set_level(logging.INFO)
    host = EngineProcess(start_of(EngineConfig(model=str(llama), dtype="float32", num_blocks=64)))
    await host.start()
    await host.stop()
    logged = [
        (record.levelname, record.name, record.message.partition(":")[0])
        for record in caplog.records
    ]
    if has_compiler:
        where = "tokenmill_worker.engines.own.cpu.fused"
        assert (
            "INFO",
            f"{where}.prepare_weights",
            "Weights in memory, each the same bits as in float32",
        ) in logged
        (fused,) = [
            record.message for record in caplog.records if record.name == f"{where}.replace"
        ]
        assert re.fullmatch(r"Fused modules: \d+ \w+(, \d+ \w+)*", fused)
    else:
        prepare_weights = "tokenmill_worker.engines.own.cpu.fused.prepare_weights"
        slower = "The model runs on torch's own linear layers, which is slower"
        assert ("WARNING", prepare_weights, slower) in logged
    assert "linear layers" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "says", "may_pass"),
    [
        (MemoryError(), "MemoryError: the process gets no more memory", True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 bytes"), "allocate", True),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "Cannot allocate memory", True),
        (EngineConfigError(["there is no folder or file m"]), "there is no folder", False),
        (KeyError("model_type"), "KeyError: 'model_type'", False),
    ],
)
def test_a_failed_start_is_transient_only_for_lack_of_memory(
    error: Exception, says: str, may_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Engine:
        raise error

    monkeypatch.setattr(Engine, "load", fail)
    reports: list[object] = []
    # of its own: the engine lengthens its thread's time slices
    thread = threading.Thread(target=serve, args=(START, Mailbox(), reports.append))
    thread.start()
    thread.join()
    (report,) = reports
    assert isinstance(report, EngineFailed)
    assert says in report.message
    assert (report.at_start, report.may_pass) == (True, may_pass)
