"""`top`: the queue, its workers and tenants as they are now, until Ctrl-C. How it looks is in top_view.py."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.live import Live

from api_client.cli.output import emit, out
from api_client.cli.target import Json, Target, connected
from api_client.cli.top_view import Look, draw, trouble
from api_client.client import Client
from api_client.errors import QueueUnavailable

FIXED_LINES = 14  # of a small queue with one worker: what the list of jobs leaves free on the screen


def register(app: typer.Typer) -> None:
    app.command()(connected(top))


def top(
    target: Target,
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    rows: Annotated[int, typer.Option(min=0, help="Jobs to show, if the screen has room.")] = 15,
    once: Annotated[bool, typer.Option("--once", help="One look. So it is in a pipe, and with --json.")] = False,
    json: Json = False,
) -> None:
    """Watch the queue: what waits and for how long, which workers live, how busy, how fast, and for whom.

    Workers tell of themselves three times per lease, so their numbers are a few seconds old.
    """
    with target.client() as client:
        if json:
            state = client.overview()
            queued = {name: one.waiting for name, one in state.classes.items()}
            emit({"queued": queued, **msgspec.to_builtins(state)})
        elif once or not sys.stdout.isatty():
            console = out()
            console.print(draw(_look(client, rows), console.width))
        else:
            _watch(client, interval, rows)


def _watch(client: Client, interval: float, rows: int) -> None:
    console = out()
    last: Look | None = None
    since = ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    look = _look(client, min(rows, _room(console, last)))
                    last, since = _with_rates(look, last), ""
                    live.update(draw(last, console.width), refresh=True)
                except QueueUnavailable as error:
                    since = since or time.strftime("%H:%M:%S")
                    live.update(trouble(str(error), since, last, console.width), refresh=True)
                time.sleep(interval)
    except KeyboardInterrupt:
        return


def _look(client: Client, rows: int) -> Look:
    queue = client.overview()
    jobs = client.list(limit=rows) if rows else []
    return Look(now_ms=int(time.time() * 1000), clock=time.strftime("%H:%M:%S"), queue=queue, jobs=jobs)


def _room(console: Console, last: Look | None) -> int:
    """Lines that are left for jobs."""
    if last is None:
        return 0
    others = len(last.queue.workers) + min(len(last.queue.tenants), 9)
    return max(0, console.height - FIXED_LINES - others)


def _with_rates(look: Look, before: Look | None) -> Look:
    if before is None or look.now_ms <= before.now_ms:
        return look
    span_s = (look.now_ms - before.now_ms) / 1000
    submitted = max(0, look.queue.submitted - before.queue.submitted) / span_s
    finished = max(0, sum(look.queue.finished.values()) - sum(before.queue.finished.values())) / span_s
    return replace(look, submitted_per_s=submitted, finished_per_s=finished)
