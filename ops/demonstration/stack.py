"""Starts the servers and the worker of the demonstration in order; stops them in reverse order.

Server and worker are real processes that end with this one. The worker has a log of its own.
"""

import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tokenmill_worker.local.dev import PrivateService
from tokenmill_worker.local.valkey_server import ValkeyServer
from tokenmill_worker.settings import load_settings

START_TIMEOUT_S = 240.0
DRAIN_TIMEOUT_S = 15.0

Notice = Callable[[str], None]


class DemoError(RuntimeError):
    """Something did not start; one sentence with the end of its log."""


class DemoStack:
    """Starts and stops the stack; `start` returns when the worker has loaded its model.

    Leaving the context stops everything, also after a start that failed half-way. `settings` are
    further settings of the worker, by name.
    """

    def __init__(
        self, model: str, queue: str, settings: Mapping[str, object] | None = None
    ) -> None:
        self._undo = ExitStack()
        self._model, self._settings = model, settings or {}
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
        """Drain the worker, stop the servers, remove the files; repeated calls do nothing."""
        self._undo.close()

    def start(self, notice: Notice) -> None:
        own = {
            "database_url": self.database_url,
            "queue": self.queue,
            "model": self._model,
            **self._settings,
        }
        service = PrivateService(
            load_settings(own),
            ValkeyServer(at_death=signal.SIGKILL),
            drain_s=DRAIN_TIMEOUT_S,
            log=self.directory / "worker.log",
            at_death=signal.SIGKILL,
        )
        self._undo.enter_context(service)
        notice("starting Valkey")
        self.redis_url = service.start_server()
        notice("creating the database")
        service.create_tables()
        service.start_worker()
        self._wait_until_ready(service, notice)

    def _wait_until_ready(self, service: PrivateService, notice: Notice) -> None:
        """Wait until the worker has loaded its model. Raises DemoError if it ends before that, or
        after START_TIMEOUT_S.
        """
        started = time.monotonic()
        while not service.is_ready():
            # checked before the log is read, so that the log is complete
            has_ended = service.exit_status is not None
            seconds = time.monotonic() - started
            log = (self.directory / "worker.log").read_text(encoding="utf-8", errors="replace")
            if has_ended or seconds > START_TIMEOUT_S:
                what = "ended" if has_ended else "did not get ready"
                last = "\n".join(log.splitlines()[-15:])
                raise DemoError(f"the worker process {what}; its last lines:\n{last}")
            notice(f"the worker loads its model ({seconds:.0f} s) {_last_words(log)}")
            time.sleep(0.1)


def _last_words(log: str) -> str:
    """Return the text of the last complete line, without its time, level and logger."""
    lines = [line for line in log.splitlines(keepends=True) if line.endswith("\n") and line.strip()]
    return re.sub(r"^\d\d:\d\d:\d\d\.\d+ \w+ +[\w.]+: ", "", lines[-1].rstrip()) if lines else ""
