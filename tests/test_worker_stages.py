"""A worker ends with its failed stage's error, logs once a server that is away at start, and needs
no torch outside of its engine.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import OF_OUR_ENGINE, without
from tests.support.worker import database_url, settings, thread_host
from tokenmill_worker.app import Worker, background


async def fail() -> None:
    raise AttributeError("nobody foresaw this")


async def test_a_stage_that_fails_ends_the_worker() -> None:
    stop = asyncio.Event()
    with pytest.raises(AttributeError, match="nobody foresaw this"):
        async with background(fail(), stop):
            await stop.wait()


async def test_a_stage_is_cancelled_after_the_body_ended() -> None:
    stop, began = asyncio.Event(), asyncio.Event()
    was_cancelled = False

    async def work() -> None:
        nonlocal was_cancelled
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled = True
            raise

    async with background(work(), stop):
        await began.wait()
        assert not stop.is_set()
    assert was_cancelled


async def test_an_unreachable_server_at_the_start_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings("redis://127.0.0.1:1/0", database_url(tmp_path))
    worker = Worker(chosen, thread_host(chosen.engine_config()))
    serving = asyncio.create_task(worker.serve())
    await asyncio.sleep(2.5)  # two more tries
    worker.drain()
    await asyncio.wait_for(serving, 10)
    said = [record.getMessage() for record in caplog.records if "Not ready" in record.getMessage()]
    assert len(said) == 1, said
    assert said[0].startswith("Not ready; trying again for 60 s: cannot reach Redis at ")


IMPORTED_BY_THE_WORKER = """
import importlib, pkgutil, sys
import tokenmill_worker

found = pkgutil.walk_packages(tokenmill_worker.__path__, "tokenmill_worker.")
names = [module.name for module in found]
of_engines = tuple(f"tokenmill_worker.engines.{kind}" for kind in ("own", "synthetic", "vllm"))
chosen = [name for name in names if not name.startswith(of_engines) or name.endswith(".config")]
for name in chosen:
    if not name.endswith((".__main__", "checking.child")):
        importlib.import_module(name)
print(len(chosen))
"""


def test_each_module_outside_of_the_engines_is_imported_without_their_packages(
    tmp_path: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTED_BY_THE_WORKER],
        env=without(tmp_path / "site", *OF_OUR_ENGINE),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 100


def test_a_worker_process_does_not_import_torch() -> None:
    """It takes 2 s of a core and 200 MB, and only the engine's process needs it."""
    words = "import sys, tokenmill_worker.app; print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "False\n"
