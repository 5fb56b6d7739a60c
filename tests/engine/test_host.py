"""The engine's process seen from the worker: it starts and ends, whenever it is asked to."""

import asyncio
import os

import pytest

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
    while moment == "while it loads" and host.pid is None:
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
