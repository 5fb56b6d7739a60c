"""A private service on this machine, and `tokenmill dev`, which runs one until Ctrl-C.

The server takes the usual port when it is free, so that other terminals need no settings. Its data
stays under .tokenmill/ of the current folder, where the next `tokenmill dev` finds it. The worker
is a process of its own, as in production; if it or the server is killed, it is started again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Final, Self

from rich.console import Console
from rich.text import Text

from tokenmill import Client, TokenmillError
from tokenmill.sql.engine import sqlite_file
from tokenmill.transport.backoff import Backoff
from tokenmill_worker.engines.process.death import signal_name
from tokenmill_worker.local.child_process import GuardedProcess
from tokenmill_worker.local.gateway_process import LocalGateway, first_key, is_installed
from tokenmill_worker.local.valkey_server import ValkeyServer, ValkeyServerError
from tokenmill_worker.record.migrate import upgrade
from tokenmill_worker.settings import Settings, child_environment

USUAL_PORT: Final = 6379
DATA: Final = Path(".tokenmill") / "valkey"
KEY: Final = Path(".tokenmill") / "gateway.key"
_DRAIN_MARGIN_S: Final = 10.0
_START_TRIES: Final = 5  # of a worker that is killed before it is ready again
_POLL_S: Final = 0.2


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
        self._worker_since_ms = 0.0
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

    @property
    def has_server(self) -> bool:
        return self._server.is_running

    def restart_server(self) -> None:
        """Start a server that has ended, with its data and on its port."""
        self._server.start()

    def create_tables(self) -> str:
        """Bring the database to this version's schema; returns its revision."""
        _, revision = upgrade(self.settings.database_url)
        return str(revision)

    def start_worker(self) -> None:
        """Start the worker, in a session of its own: Ctrl-C reaches only us, and we end it."""
        command = [sys.executable, "-m", "tokenmill.cli", "worker"]
        self._worker_since_ms = time.time() * 1000
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
        """Return whether the worker reports a model. It does so from its first heartbeat after
        loading. The status of one that was killed stays for the length of its lease, and is older.
        """
        settings = self.settings
        with (
            contextlib.suppress(TokenmillError),
            Client(
                settings.redis_url, queue=settings.queue_name, prefix=settings.key_prefix
            ) as client,
        ):
            return any(
                status.model and status.started_ms >= self._worker_since_ms
                for status in client.workers()
            )
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
    """Run until Ctrl-C, or until the worker ends by itself; returns its exit status. A worker or a
    server that is killed is started again. `port`: the only port that the server may take.
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
        console.print(f"[bold]worker[/bold]    {settings.model}, loading …")
        service.start_worker()
        gateway = _start_gateway(service.settings, console)
        explain = partial(_explain, service.settings, console, gateway, is_usual=is_usual)
        watch = ServiceWatch(service, console, explain)
        try:
            while not stop.wait(_POLL_S):
                if (status := watch.look(stop)) is not None:
                    return status
                if gateway is not None and (ended := gateway.exit_status) is not None:
                    gateway = _replaced(gateway, ended, console)
        finally:
            if gateway is not None:
                gateway.end()
        console.print(Text("stopping: running jobs may finish (Ctrl-C again: now)", style="dim"))
        hurry = threading.Event()
        with _signals(hurry):
            service.end_worker(hurry)
        return 0


class ServiceWatch:
    """Starts a killed worker or server again, and says so. `on_ready` is called once, when the
    first worker is ready.
    """

    def __init__(
        self, service: PrivateService, console: Console, on_ready: Callable[[], None]
    ) -> None:
        self._service = service
        self._console = console
        self._on_ready: Callable[[], None] | None = on_ready
        self._is_ready = False  # the worker that runs now
        self._tries = 0  # workers that have ended since one was ready
        self._backoff = Backoff(first_s=1.0, longest_s=30.0, spread=(1, 1))

    def look(self, stop: threading.Event) -> int | None:
        """Start again what has ended. Returns the exit status if there is nothing to start, after
        a line that says why. `stop` ends a pause.
        """
        service = self._service
        if not service.has_server:
            self._say("the queue's server has ended: it starts again, with its data")
            service.restart_server()
        status = service.exit_status
        if status is not None:
            return self._replace(status, stop)
        if not self._is_ready and service.is_ready():
            self._is_ready, self._tries = True, 0
            if self._on_ready is not None:
                self._on_ready()
                self._on_ready = None
            else:
                self._say("the worker is ready again")
        return None

    def _replace(self, status: int, stop: threading.Event) -> int | None:
        if status == 0:
            self._say("the worker has drained, so the service ends")
            return 0
        self._tries += 1
        manner = f"was killed by {signal_name(-status)}" if status < 0 else f"ended ({status})"
        if status > 0 and not self._is_ready:
            self._say(f"the worker {manner} before it was ready, so the service ends")
            return status
        if self._tries > _START_TRIES:
            self._say(f"the worker {manner}, for the {self._tries}th time: the service ends")
            return abs(status)
        pause_s = self._backoff.delay_s(self._tries)
        self._say(f"the worker {manner}: it starts again in {pause_s:g} s")
        self._is_ready = False
        if not stop.wait(pause_s):
            self._service.start_worker()
        return None

    def _say(self, words: str) -> None:
        self._console.print(Text(words, style="yellow"))


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


def _start_gateway(settings: Settings, console: Console) -> LocalGateway | None:
    """Start the gateway, if its extra is installed."""
    if not is_installed():
        console.print(Text("gateway   none: pip install '.[gateway]'", style="dim"))
        return None
    gateway = LocalGateway(settings)
    console.print(f"[bold]gateway[/bold]   {gateway.url} (its first key in {KEY})")
    return gateway


def _replaced(gateway: LocalGateway, status: int, console: Console) -> LocalGateway | None:
    """Start a killed gateway again; one that ended by itself has said why."""
    if status >= 0:
        console.print(Text(f"the gateway ended ({status}); the service goes on", style="yellow"))
        return None
    console.print(Text("the gateway was killed: it starts again", style="yellow"))
    gateway.start()
    return gateway


def _explain(
    settings: Settings, console: Console, gateway: LocalGateway | None, *, is_usual: bool
) -> None:
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
    if gateway is not None:
        key = first_key(settings.database_url, KEY)
        lines.append(f"export OPENAI_BASE_URL={gateway.url} OPENAI_API_KEY={key}")
    lines += [
        'tokenmill submit --chat "Why is the sky blue?" --max-tokens 60 --stream',
        "tokenmill jobs",
        "tokenmill usage",
        "tokenmill top",
    ]
    console.print(Text("\nready. In another terminal, in this folder:\n", style="bold green"))
    for line in lines:
        console.print(Text(f"  {line}"))
    if gateway is not None:
        page = gateway.url.removesuffix("v1")
        console.print(Text(f"\nThe console, with the key above, in a browser: {page}"))
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
