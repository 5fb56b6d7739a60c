"""Starts the servers and the worker of the demonstration in order; stops them in reverse order.

Each is a real process with its own log. It is tied to this process, so it cannot outlive it.
"""

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenmill import Client
from tokenmill_worker.local.child_process import Tether
from tokenmill_worker.local.valkey_server import EmbeddedValkey

START_TIMEOUT_S = 240.0
DRAIN_TIMEOUT_S = 15.0

Notice = Callable[[str], None]


class DemoError(RuntimeError):
    """Something did not start; one sentence with the end of its log."""


class DemoStack:
    """Starts and stops the stack; `start` returns when the worker has loaded its model.

    Leaving the context stops everything, also after a start that failed half-way.
    """

    def __init__(self, model: str, queue: str) -> None:
        self._undo = ExitStack()
        self._model = model
        self.queue = queue
        self.directory = Path()
        self.redis_url = ""

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.directory / 'results.db'}"

    def __enter__(self) -> Self:
        self.directory = Path(
            self._undo.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-demo-"))
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Drain and end the worker, stop the servers, remove the files; repeated calls do nothing."""
        self._undo.close()

    def start(self, notice: Notice) -> None:
        notice("starting Valkey")
        valkey = EmbeddedValkey(at_death=signal.SIGKILL)
        self._undo.callback(valkey.stop)
        self.redis_url = valkey.start().url
        self._run(
            "db",
            ["db", "upgrade"],
            lambda seconds, _: notice(f"creating the database ({seconds:.0f} s)"),
        )
        worker = self._spawn("worker", ["worker"])
        self._undo.callback(worker.end, signal.SIGTERM, DRAIN_TIMEOUT_S)

        with Client(self.redis_url, queue=self.queue) as client:

            def is_ready(seconds: float, log: str) -> bool:
                notice(f"the worker loads its model ({seconds:.0f} s) {_last_words(log)}")
                return any(
                    status.model for status in client.workers()
                )  # a worker reports its model once it is loaded

            self._wait("worker", worker, is_ready)

    def _run(self, name: str, arguments: list[str], each: Callable[[float, str], object]) -> None:
        child = self._spawn(name, arguments)
        with ExitStack() as cleanup:
            cleanup.callback(child.end, signal.SIGKILL)

            def is_done(seconds: float, log: str) -> bool:
                each(seconds, log)
                return child.process.poll() == 0

            self._wait(name, child, is_done)

    def _wait(self, name: str, child: Tether, is_done: Callable[[float, str], bool]) -> None:
        """Wait until `is_done` returns True.

        Raises DemoError if the process ends before that, or after START_TIMEOUT_S.
        """
        started = time.monotonic()
        while True:
            ended = (
                not child.is_alive
            )  # checked before the log is read, so that the log is complete
            seconds = time.monotonic() - started
            log = (self.directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            if is_done(seconds, log):
                return
            if ended or seconds > START_TIMEOUT_S:
                what = "ended" if ended else "did not get ready"
                raise DemoError(
                    f"the {name} process {what}; its last lines:\n"
                    + "\n".join(log.splitlines()[-15:])
                )
            time.sleep(0.1)

    def _spawn(self, name: str, arguments: list[str]) -> Tether:
        settings = {
            "TOKENMILL_REDIS_URL": self.redis_url,
            "TOKENMILL_DATABASE_URL": self.database_url,
            "TOKENMILL_QUEUE": self.queue,
            "TOKENMILL_MODEL": self._model,
            "TOKENMILL_HEARTBEAT_SECONDS": "1",  # readiness is reported with a heartbeat
        }
        command = [sys.executable, "-m", "tokenmill.cli", *arguments]
        with (self.directory / f"{name}.log").open("ab") as log:
            return Tether(
                command,
                at_death=signal.SIGKILL,
                cwd=self.directory,
                env=os.environ | settings,
                output=log,
            )


def _last_words(log: str) -> str:
    """Return the text of the last complete line, without its time, level and logger."""
    lines = [line for line in log.splitlines(keepends=True) if line.endswith("\n") and line.strip()]
    return re.sub(r"^\d\d:\d\d:\d\d\.\d+ \w+ +[\w.]+: ", "", lines[-1].rstrip()) if lines else ""
