"""Worker processes of a chaos run: started with a mark that every descendant inherits, and ended.

A process that ends without being asked, or otherwise than asked, is a finding.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.plain_worker import LISTENING, READY
from tokenmill_worker.local.child_process import GuardedProcess

ROOT = Path(__file__).parents[2]
MARK = "CHAOS_RUN"
PATIENCE_S = 90.0
_NO_MEMORY = re.compile(r"^Traceback .*\n(?:[ ].*\n)+MemoryError.*$", re.MULTILINE)


def environment(folder: Path, mark: str) -> dict[str, str]:
    """Return an environment with countable temporary files and bytecode that is kept between
    starts.
    """
    values = dict(os.environ)  # noqa: TID251 - handed on, not read
    values.pop("PYTHONDONTWRITEBYTECODE", None)
    (folder / "tmp").mkdir(exist_ok=True)
    # torch makes this folder at its import and keeps it, by default among the temporary files.
    return values | {
        MARK: mark,
        "TMPDIR": str(folder / "tmp"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }


class WorkerProcess:
    """One worker. `may_end_with` are the exit statuses that it may have by now."""

    def __init__(
        self,
        name: str,
        redis_url: str,
        database: str,
        log: Path,
        *,
        env: dict[str, str] | None = None,
        **settings: object,
    ) -> None:
        values = [f"{key}={value}" for key, value in settings.items()]
        command = [
            sys.executable,
            "-m",
            "tests.chaos.plain_worker",
            name,
            redis_url,
            database,
            *values,
        ]
        self.name = name
        self.log = log
        self.may_end_with: set[int] = set()
        self.is_leaving = False
        self.has_starved = False  # an engine that got no memory may say so
        with log.open("ab") as output:
            self._guarded = GuardedProcess(
                command, at_death=signal.SIGKILL, cwd=ROOT, output=output, env=env
            )

    @property
    def process(self) -> Any:
        return self._guarded.process

    @property
    def is_alive(self) -> bool:
        return self._guarded.is_alive

    @property
    def words(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def is_ready(self) -> bool:
        """True if its engine has been ready once."""
        return READY in self.words

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def ask_to_end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal that asks the worker to end.

        A worker that is still loading its modules dies of the signal; any other ends in order with
        0.
        """
        self.is_leaving = True
        self.may_end_with |= {0} if LISTENING in self.words else {0, -number}
        self.send(number)

    def kill(self) -> None:
        self.is_leaving = True
        self.may_end_with.add(-signal.SIGKILL)
        self.send(signal.SIGKILL)

    def engine(self) -> psutil.Process | None:
        """Return the engine's process, or None if there is none."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "tokenmill_worker.engines.process.child" in child.cmdline():
                        return child
        return None

    async def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the exit status. A worker that takes too long writes down what it is doing."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive:
            if time.monotonic() > deadline:
                self.send(signal.SIGUSR1)
                await asyncio.sleep(1)
                raise TimeoutError(f"worker {self.name} does not end: {self.words[-6000:]}")
            await asyncio.sleep(0.05)
        return int(self.process.wait())

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with a worker that has ended: exit status, tracebacks in output."""
        status = self.process.poll()
        if status not in self.may_end_with:
            yield f"worker {self.name} ended with {status}: {self.words[-1500:]}"
        words = _NO_MEMORY.sub("", self.words) if self.has_starved else self.words
        for word in ("Traceback", "Task was destroyed", "was never retrieved"):
            if word in words:
                before = max(0, words.index(word) - 500)
                yield f"worker {self.name} wrote {word!r}: {words[before:][:2500]}"
                return

    def end(self) -> None:
        self._guarded.end(signal.SIGKILL)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return every process on this machine that descends from a marked one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
