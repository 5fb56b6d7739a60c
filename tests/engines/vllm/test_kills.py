"""`kill -9` of each part of a worker with vLLM, in the middle of answers.

Real Valkey, real SQL, real vLLM. The dead part takes all of its engine's processes with it. The
next engine goes on with the answers: of the same worker, of another one, or of the other kind.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.engines.vllm.parts import CORE, DEVICE_WORKER, listed, part_of, shared_by, wait_for_none
from tests.engines.vllm.service import OWN, Service
from tests.support.vllm import needs_vllm

pytestmark = [
    pytest.mark.redis,
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.timeout(3_000),
    needs_vllm,
]

STALL_S = 20.0


@pytest.fixture(scope="module")
def service(make_service: Callable[..., Service]) -> Service:
    return make_service(stall_seconds=STALL_S)


def print_lines(title: str, lines: list[str]) -> None:
    print("\n".join([title, *(lines or ["    none"])]), flush=True)  # noqa: T201


async def kill(service: Service, what: str, victim: psutil.Process, number: int) -> None:
    """Send a signal to a part of the worker. No process and no shared memory of its engine may be
    left.
    """
    engine = service.engine(service.num_engines)
    memory = shared_by(engine.pid)
    print_lines(
        f"before {signal.Signals(number).name} of {what}, {victim.pid}:", listed(engine.pid)
    )
    victim.send_signal(number)
    seconds = await asyncio.to_thread(wait_for_none, engine.pid, STALL_S + 60)
    print_lines(f"{seconds:.2f} s after it:", listed(engine.pid))
    assert [str(file) for file in memory if file.exists()] == []


PARTS = {
    "the engine's process": lambda engine: engine,
    "the engine core": lambda engine: part_of(engine, CORE),
    "a device worker": lambda engine: part_of(engine, DEVICE_WORKER),
}


@pytest.mark.parametrize("what", PARTS)
async def test_the_next_engine_goes_on_after_a_kill_of_a_part(service: Service, what: str) -> None:
    worker = service.start()
    engine = await asyncio.to_thread(service.engine, max(1, service.num_engines))
    async with service.jobs_in_the_middle():
        number = service.num_engines
        await kill(service, what, PARTS[what](engine), signal.SIGKILL)
        await asyncio.to_thread(service.engine, number + 1)
        assert len(list(service.temporary.iterdir())) == 1  # the folder of this engine
        assert worker.is_alive
    assert worker.words.count("Engine died; a new one starts") == number


async def test_a_core_that_hangs_is_reported_and_replaced(service: Service) -> None:
    worker = service.start()
    engine = await asyncio.to_thread(service.engine, max(1, service.num_engines))
    async with service.jobs_in_the_middle():
        number = service.num_engines
        await kill(service, "the engine core", part_of(engine, CORE), signal.SIGSTOP)
        await asyncio.to_thread(service.engine, number + 1)
    (said,) = [line for line in worker.words.splitlines() if "it hangs" in line][-1:]
    print_lines("the worker says:", [said])
    assert f"(stall_seconds is {STALL_S:g})" in said


KINDS = {"vLLM": {}, "ours": OWN}


@pytest.mark.parametrize(("first", "then"), [("vLLM", "vLLM"), ("vLLM", "ours"), ("ours", "vLLM")])
async def test_another_worker_goes_on_after_a_kill_of_the_worker(
    service: Service, first: str, then: str
) -> None:
    if first != "vLLM":  # a test before this one may have left a worker of the other kind
        service.end()
    worker = service.start(**KINDS[first])
    await asyncio.to_thread(service.engine, max(1, service.num_engines))
    async with service.jobs_in_the_middle():
        victim = psutil.Process(worker.process.pid)
        await kill(service, f"the worker ({first}, then {then})", victim, signal.SIGKILL)
        worker.process.wait()
        service.start(**KINDS[then])
    service.end()
