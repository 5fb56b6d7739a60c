"""The engine's process seen from the worker: it starts and ends, whenever it is asked to."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from worker.engine.child import PARENT_GONE
from worker.engine.config import EngineConfig
from worker.engine.host import EngineDied, EngineProcess

CONFIG = EngineConfig(model="synthetic", num_blocks=64)


def is_alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("moment", ["before the process exists", "while it loads"])
async def test_a_stop_while_it_starts_ends_it(moment: str) -> None:
    """A worker may be told to drain at any time; it must not wait for ever for an engine that nobody stopped."""
    host = EngineProcess(CONFIG)
    starting = asyncio.create_task(host.start())
    while moment == "while it loads" and host.pid is None:  # noqa: ASYNC110 - the host tells nobody
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)
    assert (host.pid is None) == (moment == "before the process exists")
    await host.stop()
    async with asyncio.timeout(60):
        with pytest.raises(EngineDied) as death:
            await starting
    assert death.value.at_start
    assert not is_alive(host.pid)


async def test_it_starts_and_stops() -> None:
    host = EngineProcess(CONFIG)
    ready = await host.start()
    assert ready.model == "synthetic"
    assert is_alive(host.pid)
    await host.stop()
    assert not is_alive(host.pid)
    _ = [frame async for frame in host.frames()]  # ends, for it was stopped


async def test_what_is_logged_while_it_loads_is_told(llama: Path) -> None:
    told: list[str] = []
    host = EngineProcess(EngineConfig(model=str(llama), dtype="float32", num_blocks=64))
    await host.start(lambda what, _fraction: told.append(what))
    await host.stop()
    assert any(what.startswith("weights in memory") for what in told), told


async def test_one_that_was_killed_is_reaped_in_order(caplog: pytest.LogCaptureFixture) -> None:
    """Killed once more before its status is read, it would be reaped twice; asyncio complains and makes one up."""
    host = EngineProcess(CONFIG)
    await host.start()
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        _ = [frame async for frame in host.frames()]
    await host.kill()
    assert not is_alive(host.pid)
    assert not [record for record in caplog.records if "Unknown child process" in record.message]


def test_without_a_parent_it_ends_without_a_word() -> None:
    """The worker may be killed before it has told its engine what to load."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        command = [sys.executable, "-m", "worker.engine.child", str(theirs.fileno())]
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (PARENT_GONE, b"")
