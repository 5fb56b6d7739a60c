"""The engine's process seen from the worker: it starts and ends, whenever it is asked to."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.engine_thread import EngineThread
from tests.support.waiting import until
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.builders import start_of
from tokenmill_worker.contract.host import EngineDied
from tokenmill_worker.contract.messages import Frame, Mailbox, Report, Start
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own.engine import Engine
from tokenmill_worker.engines.own.plan import StepOutput, StepPlan
from tokenmill_worker.engines.own.serve import serve_loaded
from tokenmill_worker.engines.own.serve.loop import EngineLoop
from tokenmill_worker.engines.process.child import PARENT_GONE
from tokenmill_worker.engines.process.death import members_of
from tokenmill_worker.engines.process.host import EngineProcess
from tokenmill_worker.engines.synthetic.config import SyntheticConfig
from tokenmill_worker.engines.synthetic.runner import SyntheticRunner

CONFIG = SyntheticConfig(model="synthetic", num_blocks=64)
START = start_of(CONFIG)


def is_alive(pid: int | None) -> bool:
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("moment", ["before the process exists", "while it loads"])
async def test_a_stop_during_the_start_ends_the_engine(moment: str) -> None:
    """A drain may come at any time; it must not wait for ever for an unstopped engine."""
    host = EngineProcess(START)
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


async def test_an_engine_process_starts_and_stops() -> None:
    host = EngineProcess(START)
    ready = await host.start()
    assert ready.model == "synthetic"
    assert is_alive(host.pid)
    await host.stop()
    assert not is_alive(host.pid)
    _ = [frame async for frame in host.frames()]  # ends, for it was stopped


async def test_an_engine_killed_while_loading_is_reported_as_transient() -> None:
    host = EngineProcess(START)
    starting = asyncio.create_task(host.start())
    while host.pid is None:  # noqa: ASYNC110 - the host tells nobody
        await asyncio.sleep(0.01)
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match=r"ended by SIGKILL \(.*memory.* before it was") as death:
        await starting
    assert (death.value.at_start, death.value.may_pass) == (True, True)
    await host.kill()


async def test_a_killed_engine_process_is_reaped_once(caplog: pytest.LogCaptureFixture) -> None:
    """Killing it again before its status is read must not reap it twice.

    Asyncio would complain and make a status up.
    """
    host = EngineProcess(START)
    await host.start()
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(EngineDied):
        _ = [frame async for frame in host.frames()]
    await host.kill()
    assert not is_alive(host.pid)
    assert not [record for record in caplog.records if "Unknown child process" in record.message]


async def test_a_hanging_engine_process_is_reported_and_can_be_killed() -> None:
    host = EngineProcess(START, stall_s=1.0)
    await host.start()
    assert host.pid is not None
    frames = host.frames()
    await anext(frames)
    os.kill(host.pid, signal.SIGSTOP)
    async with asyncio.timeout(60):
        with pytest.raises(EngineDied, match="hangs: no step for") as death:
            _ = [frame async for frame in frames]
    assert not death.value.any_step
    assert is_alive(host.pid)
    await host.kill()
    assert not is_alive(host.pid)


async def test_an_engine_process_without_memory_for_a_command_ends(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its loop would report on as an idle one's, and the command's requests never end."""
    host = EngineProcess(START)
    await host.start()
    engine = psutil.Process(host.pid)
    engine.rlimit(psutil.RLIMIT_AS, (engine.memory_info().vms + (16 << 20), -1))
    host.submit(
        [GenerationRequest(request_id="a", prompt=Prompt((1,)), cache_salt="x" * (64 << 20))]
    )
    async with asyncio.timeout(60):
        with pytest.raises(EngineDied, match="ended by SIGKILL"):
            _ = [frame async for frame in host.frames()]
    await host.kill()
    assert "it cannot receive a command" in capfd.readouterr().err


async def test_frames_without_a_step_do_not_hide_a_hanging_engine() -> None:
    """An engine whose steps hang may still answer a cancel beside other requests."""
    loaded = Engine.around(SyntheticRunner.load(CONFIG))
    is_over = threading.Event()

    def serve(mailbox: Mailbox, emit: Callable[[Report], None]) -> None:
        emit(EngineLoop(loaded, mailbox, emit)._ready())
        while not is_over.wait(0.05):
            emit(Frame(events=(), capacity=loaded.capacity()))

    host = EngineThread(serve, stall_s=0.5)
    await host.start()
    async with asyncio.timeout(60):
        with pytest.raises(EngineDied, match="hangs"):
            _ = [frame async for frame in host.frames()]
    is_over.set()
    await host.kill()


async def test_an_idle_engine_process_is_not_taken_for_hanging() -> None:
    """It reports twice a second, so a limit of a second and a half holds for many of them."""
    host = EngineProcess(START, stall_s=1.5)
    await host.start()
    frames = host.frames()
    for _ in range(8):
        await anext(frames)
    await host.stop()


async def test_a_hanging_engine_thread_is_abandoned() -> None:
    hangs = threading.Event()

    class Hanging(SyntheticRunner):
        __slots__ = ()

        def finish(self, plan: StepPlan) -> StepOutput:
            hangs.wait(60)
            return super().finish(plan)

    host = EngineThread(
        partial(serve_loaded, lambda: Engine.around(Hanging.load(CONFIG))), stall_s=0.5
    )
    await host.start()
    host.submit(
        [
            GenerationRequest(
                request_id="a", prompt=Prompt((1, 2)), params=SamplingParams(max_tokens=3)
            )
        ]
    )
    async with asyncio.timeout(60):
        with pytest.raises(EngineDied, match="hangs"):
            _ = [frame async for frame in host.frames()]
        await host.kill()
    hangs.set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_during_the_start_does_not_end_the_engine_process(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only the worker ends its engine; a signal while Python starts left a traceback."""
    host = EngineProcess(START)
    starting = asyncio.create_task(host.start())
    while host.pid is None:  # noqa: ASYNC110 - no event tells that the process exists
        await asyncio.sleep(0)
    while not starting.done():
        os.kill(host.pid, number)
        await asyncio.sleep(0.01)
    assert (await starting).model == "synthetic"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not mask & {signal.SIGINT, signal.SIGTERM}
    await host.stop()
    assert capfd.readouterr().err == ""


async def test_concurrent_starts_of_engine_processes_leave_no_signal_blocked() -> None:
    """Blocked ones would be inherited by every process that is started later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    hosts = [EngineProcess(START) for _ in range(2)]
    try:
        await asyncio.gather(*(host.start() for host in hosts))
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        await asyncio.gather(*(host.stop() for host in hosts))


def test_an_engine_process_whose_worker_is_gone_ends_without_output() -> None:
    """The worker may be killed before it has sent its engine the model to load."""
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        command = [
            sys.executable,
            "-m",
            "tokenmill_worker.engines.process.child",
            str(theirs.fileno()),
        ]
        done = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (PARENT_GONE, b"")


@pytest.mark.parametrize("python", ["/no/python", "/etc/passwd"])
async def test_an_engine_python_that_cannot_be_run_is_named(python: str) -> None:
    host = EngineProcess(START, python=python)
    with pytest.raises(EngineDied, match=f"{python} cannot be run: ") as death:
        await host.start()
    assert (death.value.at_start, death.value.may_pass) == (True, False)
    await host.kill()


async def test_an_engine_without_a_python_of_its_own_is_tried_by_the_worker_s() -> None:
    host = EngineProcess(Start(engine="vllm", settings={"model": "/models/any"}))
    words = (
        f"the engine vllm needs vllm: {sys.executable} -m pip install 'vllm>=0.32,<0.33', "
        "or name another"
    )
    with pytest.raises(EngineDied, match=re.escape(words)) as death:
        await host.start()
    assert (death.value.at_start, death.value.may_pass) == (True, False)
    await host.kill()
    assert not is_alive(host.pid)


async def test_an_engine_python_without_tokenmill_is_named_with_the_repair(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no installed packages
    python.chmod(0o755)
    host = EngineProcess(START, python=str(python))
    with pytest.raises(EngineDied, match=r"python -m pip install \. in the folder") as death:
        await host.start()
    assert (death.value.at_start, death.value.may_pass) == (True, False)
    await host.kill()


async def test_an_engine_that_ends_silently_while_it_loads_is_named_with_its_status(
    tmp_path: Path,
) -> None:
    package = tmp_path / "mute" / "engine"
    package.mkdir(parents=True)
    (package / "config.py").write_text("from ops.examples.engine.config import KIND\n")
    (package / "serve.py").write_text("def serve(start, mailbox, emit):\n    return 1\n")
    python = tmp_path / "python"
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    python.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    host = EngineProcess(Start(engine="mute.engine", settings={}), python=str(python))
    with pytest.raises(EngineDied, match="ended with status 1 before it was ready") as death:
        await host.start()
    assert (death.value.at_start, death.value.may_pass) == (True, True)
    await host.kill()


# an engine that shares memory with a process of its own, as vLLM does, and never becomes ready
SHARES_MEMORY = """#!{python}
import pathlib, signal
from multiprocessing.shared_memory import SharedMemory
block = SharedMemory(create=True, size=64)
pathlib.Path({told!r}).write_text(block.name)
{then}
"""


def sharing(folder: Path, then: str = "signal.pause()") -> tuple[Path, Path]:
    """Return such an engine, and the file in which it names the memory."""
    script, told = folder / "python", folder / "name"
    script.write_text(SHARES_MEMORY.format(python=sys.executable, told=str(told), then=then))
    script.chmod(0o755)
    return script, told


@pytest.mark.parametrize("who", ["the host", "another process"])
async def test_no_shared_memory_is_left_of_an_engine_that_is_killed(
    tmp_path: Path, who: str
) -> None:
    script, told = sharing(tmp_path)
    host = EngineProcess(START, python=str(script))
    starting = asyncio.create_task(host.start())
    await until(lambda: told.exists() and bool(told.read_text()))
    memory = Path("/dev/shm") / told.read_text()
    assert memory.exists()
    assert host.pid is not None
    if who == "another process":
        os.kill(host.pid, signal.SIGKILL)
    await host.kill()
    assert not memory.exists()
    with pytest.raises(EngineDied):
        await starting
    assert members_of(host.pid) == []


def test_no_shared_memory_is_left_of_an_engine_whose_worker_is_gone(tmp_path: Path) -> None:
    script, told = sharing(
        tmp_path, "from tokenmill_worker.engines.process import child; child._end_group()"
    )
    engine = subprocess.Popen([str(script)], start_new_session=True)
    assert engine.wait(60) == -signal.SIGKILL
    assert not (Path("/dev/shm") / told.read_text()).exists()
