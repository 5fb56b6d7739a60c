"""`top`: queues, their workers and tenants, refreshed until `q` or Ctrl-C; `views` draws them."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from tokenmill.cli.connection import ConnectionOptions, Json, connected
from tokenmill.cli.output import emit, out
from tokenmill.cli.views.top import Look
from tokenmill.cli.views.top_queues import draw_all, trouble
from tokenmill.client import Client
from tokenmill.errors import QueueUnavailable
from tokenmill.operations.io_requests import server_time

FIXED_LINES = 17  # lines used by everything but the list of jobs, for a small queue with one worker


def register(app: typer.Typer) -> None:
    app.command()(connected(top))


def top(
    connection: ConnectionOptions,
    queues: Annotated[
        list[str] | None,
        typer.Argument(help="Queues to watch (default: --queue).", metavar="QUEUE"),
    ] = None,
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two updates.")] = 1.0,
    rows: Annotated[
        int, typer.Option(min=0, help="Largest number of jobs to show, for a single queue.")
    ] = 15,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit; implied in a pipe and by --json.")
    ] = False,
    json: Json = False,
) -> None:
    """Watch one or several queues: waiting jobs and their age, live workers, load and tenants.

    `q` or Ctrl-C ends it. Workers report three times per lease: numbers are some seconds old.
    """
    with ExitStack() as undo:
        names = list(dict.fromkeys(queues or [connection.queue_name]))
        clients = [undo.enter_context(replace(connection, queue=name).client()) for name in names]
        rows = rows if len(clients) == 1 else 0
        if json:
            states = [_as_object(client) for client in clients]
            emit(states[0] if len(states) == 1 else states)
        elif once or not sys.stdout.isatty():
            console = out()
            console.print(draw_all([_look(client, rows) for client in clients], console.width))
        else:
            _watch(clients, interval, rows)


def _as_object(client: Client) -> dict[str, object]:
    state = client.overview()
    return {
        "queued": {name: one.waiting for name, one in state.classes.items()},
        **msgspec.to_builtins(state),
    }


def _watch(clients: Sequence[Client], interval: float, rows: int) -> None:
    console = out()
    last: list[Look] = []
    since = ""
    try:
        with (
            Live(console=console, screen=True, auto_refresh=False) as live,
            _quit_key() as is_quit_within,
        ):
            is_over = False
            while not is_over:
                try:
                    looks = [_look(client, min(rows, _room(console, last))) for client in clients]
                    last = [
                        _with_rates(look, before)
                        for look, before in zip(looks, last or looks, strict=True)
                    ]
                    since = ""
                    live.update(draw_all(last, console.width, is_live=True), refresh=True)
                except QueueUnavailable as error:
                    since = since or time.strftime("%H:%M:%S")
                    live.update(trouble(str(error), since, last, console.width), refresh=True)
                is_over = is_quit_within(interval)
    except KeyboardInterrupt:
        return


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextmanager
def _quit_key() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds and returns whether `q` was typed meanwhile. Without
    a terminal on stdin it only waits.
    """
    if not sys.stdin.isatty():
        yield _wait
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def is_quit_within(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([keyboard], [], [], left)[0]:
                typed = os.read(keyboard, 64)
                if not typed or b"q" in typed.lower():  # empty: the terminal was closed
                    return True
        return False

    try:
        tty.setcbreak(keyboard)  # keys come one by one, and Ctrl-C is still a signal
        yield is_quit_within
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _look(client: Client, rows: int) -> Look:
    queue = client.overview()
    jobs = client.list(limit=rows) if rows else []
    now_ms = client.perform(server_time())
    return Look(now_ms=now_ms, clock=time.strftime("%H:%M:%S"), queue=queue, jobs=jobs)


def _room(console: Console, last: Sequence[Look]) -> int:
    """Return the number of lines that are left for jobs."""
    if not last:
        return 0
    others = len(last[0].queue.workers) + min(len(last[0].queue.tenants), 9)
    return max(0, console.height - FIXED_LINES - others)


def _with_rates(look: Look, before: Look) -> Look:
    if look.now_ms <= before.now_ms:
        return look
    span_s = (look.now_ms - before.now_ms) / 1000
    submitted = max(0, look.queue.submitted - before.queue.submitted) / span_s
    finished = (
        max(0, sum(look.queue.finished.values()) - sum(before.queue.finished.values())) / span_s
    )
    return replace(look, submitted_per_s=submitted, finished_per_s=finished)
