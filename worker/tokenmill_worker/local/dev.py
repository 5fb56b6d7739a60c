"""A private service on this machine, and `tokenmill dev`, which runs one until Ctrl-C.

The server takes the usual port when it is free, so that other terminals need no settings. Its data
stays under .tokenmill/ of the current folder, where the next `tokenmill dev` finds it. The worker
is a process of its own, as in production.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, Self

from rich.console import Console
from rich.text import Text

from tokenmill import Client, TokenmillError
from tokenmill.sql.engine import sqlite_file
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.valkey_server import ValkeyServer, ValkeyServerError
from tokenmill_worker.record.migrate import upgrade
from tokenmill_worker.settings import Settings, child_environment

USUAL_PORT: Final = 6379
DATA: Final = Path(".tokenmill") / "valkey"
_DRAIN_MARGIN_S: Final = 10.0


class PrivateService:
    """A Valkey server, a database with its tables, and one worker process, started one by one.

    Leaving the context ends the worker within `drain_s`, then the server, also after a start that
    failed half-way. `log` takes what the worker prints; None: it prints to our terminal.
    """

    def __init__(
        self,
        settings: Settings,
        server: ValkeyServer,
        *,
        drain_s: float,
        log: Path | None = None,
        at_death: int = signal.SIGTERM,
    ) -> None:
        self.settings = settings
        self._server = server
        self._drain_s = drain_s
        self._log = log
        self._at_death = at_death
        self._worker: GuardedProcess | None = None
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def start_server(self) -> str:
        """Start the server and return its URL, which then stands in the settings."""
        self._undo.callback(self._server.stop)
        url = self._server.start().url
        self.settings = self.settings.model_copy(update={"redis_url": url})
        return url

    def create_tables(self) -> str:
        """Bring the database to this version's schema; returns its revision."""
        _, revision = upgrade(self.settings.database_url)
        return str(revision)

    def start_worker(self) -> None:
        """Start the worker, in a session of its own: Ctrl-C reaches only us, and we end it."""
        command = [sys.executable, "-m", "tokenmill.cli", "worker"]
        with contextlib.ExitStack() as files:
            output = files.enter_context(self._log.open("ab")) if self._log is not None else None
            self._worker = GuardedProcess(
                command,
                at_death=self._at_death,
                env=child_environment(self.settings),
                output=output,
            )
        self._undo.callback(self.end_worker)

    @property
    def exit_status(self) -> int | None:
        """The worker's exit status; None while it runs."""
        return None if self._worker is None else self._worker.process.poll()

    def is_ready(self) -> bool:
        """Does the worker report a model? It does so from its first heartbeat after loading."""
        settings = self.settings
        with (
            contextlib.suppress(TokenmillError),
            Client(
                settings.redis_url, queue=settings.queue_name, prefix=settings.key_prefix
            ) as client,
        ):
            return any(status.model for status in client.workers())
        return False

    def end_worker(self, hurry: threading.Event | None = None) -> None:
        """Send SIGTERM and wait for the running jobs; `hurry` makes the worker hand them over."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if worker.is_alive and hurry is not None:
            worker.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + self._drain_s
            while worker.is_alive and time.monotonic() < deadline:
                if hurry.wait(0.1):
                    hurry.clear()
                    worker.process.send_signal(signal.SIGINT)
            worker.end(signal.SIGKILL)
            return
        worker.end(signal.SIGTERM, self._drain_s)


def run(settings: Settings, port: int | None = None) -> int:
    """Run until Ctrl-C, or until the worker ends by itself; returns its exit status. `port`: the
    only port that the server may take.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    stop = threading.Event()
    drain_s = settings.drain_seconds + _DRAIN_MARGIN_S
    with (
        _signals(stop),
        PrivateService(settings, _start_server(port), drain_s=drain_s) as service,
    ):
        url = service.start_server()
        is_usual = (
            url == f"redis://127.0.0.1:{USUAL_PORT}/0"
            and settings.redis_url == Settings.model_fields["redis_url"].default
        )
        console.print(f"[bold]queue[/bold]     {url} (Valkey, data in {DATA})")
        revision = service.create_tables()
        place = sqlite_file(settings.database_url) or settings.public()["database_url"]
        console.print(f"[bold]database[/bold]  {place} (revision {revision})")
        console.print(f"[bold]worker[/bold]    {settings.engine_config().model}, loading …")
        service.start_worker()
        if _wait_until_ready(service, stop):
            _explain(service.settings, console, is_usual=is_usual)
            while service.exit_status is None and not stop.wait(0.2):
                pass
        status = service.exit_status
        if status is None:
            console.print(
                Text("stopping: running jobs may finish (Ctrl-C again: now)", style="dim")
            )
            hurry = threading.Event()
            with _signals(hurry):
                service.end_worker(hurry)
        return abs(status or 0)


def _start_server(port: int | None) -> ValkeyServer:
    """Start the server on `port`. Without one, use the usual port, or any other if that is
    taken.
    """
    if port is not None:
        return ValkeyServer(Path.cwd() / DATA, port=port).start()
    try:
        return ValkeyServer(Path.cwd() / DATA, port=USUAL_PORT).start()
    except ValkeyServerError:
        return ValkeyServer(Path.cwd() / DATA).start()


def _wait_until_ready(service: PrivateService, stop: threading.Event) -> bool:
    while service.exit_status is None and not stop.wait(0.2):
        if service.is_ready():
            return True
    return False


def _explain(settings: Settings, console: Console, *, is_usual: bool) -> None:
    """Print how to use the service from another terminal. `is_usual`: another terminal finds the
    server without settings, which does not hold if TOKENMILL_REDIS_URL names another.
    """
    lines = []
    if not is_usual:
        lines.append(f"export TOKENMILL_REDIS_URL={settings.redis_url}")
    if settings.database_url != Settings.model_fields["database_url"].default:
        lines.append(f"export TOKENMILL_DATABASE_URL={settings.database_url}")
    if settings.queue_name != Settings.model_fields["model"].default:
        lines.append(f"export TOKENMILL_QUEUE={settings.queue_name}")
    lines += [
        'tokenmill submit --chat "Why is the sky blue?" --max-tokens 60 --stream',
        "tokenmill jobs",
        "tokenmill usage",
        "tokenmill top",
    ]
    console.print(Text("\nready. In another terminal, in this folder:\n", style="bold green"))
    for line in lines:
        console.print(Text(f"  {line}"))
    console.print(Text("\nCtrl-C stops everything.\n", style="dim"))


@contextlib.contextmanager
def _signals(event: threading.Event) -> Iterator[None]:
    """Make SIGINT and SIGTERM set the event, so that they do not interrupt a start or a stop."""

    def note(_number: int, _frame: FrameType | None) -> None:
        event.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["PrivateService", "run"]
