"""`tokenmill dev`: a private Valkey, SQLite and a worker in one command; Ctrl-C ends them in order.

The server takes the usual port when it is free, so that other terminals need no settings. Its data
stays under .tokenmill/ of the current folder, where the next `tokenmill dev` finds it. The worker
is a process of its own, as in production.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from rich.console import Console
from rich.text import Text

from tokenmill import Client, TokenmillError
from tokenmill.sql.engine import sqlite_file
from tokenmill_worker.local.child_process import tethered
from tokenmill_worker.local.valkey_server import EmbeddedServerError, EmbeddedValkey
from tokenmill_worker.record.migrate import upgrade
from tokenmill_worker.settings import Settings, child_environment

USUAL_PORT: Final = 6379
DATA: Final = Path(".tokenmill") / "valkey"
_DRAIN_MARGIN_S: Final = 10.0


def run(settings: Settings, port: int | None = None) -> int:
    """Run until Ctrl-C, or until the worker ends by itself; returns its exit status. `port`: the
    only port that the server may take.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    stop = threading.Event()
    with contextlib.ExitStack() as undo:
        undo.enter_context(_signals(stop))
        server = _start_server(port)
        undo.callback(server.stop)
        is_usual = (
            server.port == USUAL_PORT
            and settings.redis_url == Settings.model_fields["redis_url"].default
        )
        settings = settings.model_copy(update={"redis_url": server.url})
        console.print(f"[bold]queue[/bold]     {server.url} (Valkey, data in {DATA})")
        _, revision = upgrade(settings.database_url)
        place = sqlite_file(settings.database_url) or settings.public()["database_url"]
        console.print(f"[bold]database[/bold]  {place} (revision {revision})")
        console.print(f"[bold]worker[/bold]    {settings.engine_config().model}, loading …")
        worker = _start_worker(settings)
        undo.callback(_end, worker, settings.drain_seconds, console)
        if not _wait_until_ready(settings, worker, stop):
            return _status_of(worker)
        _explain(settings, console, is_usual=is_usual)
        while worker.poll() is None and not stop.wait(0.2):
            pass
        return _status_of(worker)


def _start_server(port: int | None) -> EmbeddedValkey:
    """Start the server on `port`. Without one, use the usual port, or any other if that is
    taken.
    """
    if port is not None:
        return EmbeddedValkey(Path.cwd() / DATA, port=port).start()
    try:
        return EmbeddedValkey(Path.cwd() / DATA, port=USUAL_PORT).start()
    except EmbeddedServerError:
        return EmbeddedValkey(Path.cwd() / DATA).start()


def _start_worker(settings: Settings) -> subprocess.Popen[bytes]:
    """Start the worker, which writes to our terminal. It gets a session of its own, so that Ctrl-C
    reaches only us, and we end it in order.
    """
    command = [sys.executable, "-m", "tokenmill.cli", "worker"]
    environment = child_environment(settings)
    return subprocess.Popen(
        tethered(command, at_death=signal.SIGTERM),
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_until_ready(
    settings: Settings, worker: subprocess.Popen[bytes], stop: threading.Event
) -> bool:
    with Client(
        settings.redis_url, queue=settings.queue_name, prefix=settings.key_prefix
    ) as client:
        while worker.poll() is None and not stop.wait(0.2):
            with contextlib.suppress(TokenmillError):
                if any(status.model for status in client.workers()):
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
        'tokenmill submit --chat "Why is the sky blue?" --max-tokens 60 --temperature 0 --stream',
        "tokenmill jobs",
        "tokenmill usage",
        "tokenmill top",
    ]
    console.print(Text("\nready. In another terminal, in this folder:\n", style="bold green"))
    for line in lines:
        console.print(Text(f"  {line}"))
    console.print(Text("\nCtrl-C stops everything.\n", style="dim"))


def _end(worker: subprocess.Popen[bytes], drain_s: float, console: Console) -> None:
    """Send SIGTERM and wait for the grace period; a second Ctrl-C ends the worker at once."""
    if worker.poll() is not None:
        return
    console.print(Text("stopping: running jobs may finish (Ctrl-C again: now)", style="dim"))
    hurry = threading.Event()
    with _signals(hurry):
        worker.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + drain_s + _DRAIN_MARGIN_S
        while worker.poll() is None and time.monotonic() < deadline:
            if hurry.wait(0.1):
                hurry.clear()
                worker.send_signal(signal.SIGINT)
    if worker.poll() is None:
        worker.kill()
    worker.wait()


def _status_of(worker: subprocess.Popen[bytes]) -> int:
    """Return the worker's exit status; 0 if it is still running, because we end it."""
    status = worker.poll()
    return 0 if status is None else abs(status)


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


__all__ = ["run"]
