"""`top`: the queue and its workers, as they are now, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from api_client.cli.output import ago, emit, out, seconds, state
from api_client.cli.target import Json, Target, connected
from api_client.client import Client
from api_client.errors import QueueUnavailable


def register(app: typer.Typer) -> None:
    app.command()(connected(top))


def top(
    target: Target,
    *,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    rows: Annotated[int, typer.Option(min=0, help="Jobs to show.")] = 15,
    json: Json = False,
) -> None:
    """Watch the queue: what waits, which workers live, what runs. In a pipe, or with --json: one look."""
    with target.client() as client:
        if json:
            depth, workers = client.depth(), client.workers()
            emit({"queue": client.queue, "queued": depth.queued, "running": depth.running, "workers": workers})
        elif not sys.stdout.isatty():
            out().print(_look(client, rows))
        else:
            _watch(client, interval, rows)


def _watch(client: Client, interval: float, rows: int) -> None:
    try:
        with Live(_look(client, rows), console=out(), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                try:
                    live.update(_look(client, rows), refresh=True)
                except QueueUnavailable as error:
                    live.update(Text(str(error), style="bold red"), refresh=True)
    except KeyboardInterrupt:
        return


def _look(client: Client, rows: int) -> RenderableType:
    depth = client.depth()
    waiting = ", ".join(f"{count} {name}" for name, count in depth.queued.items() if count) or "none"
    head = Text.assemble(
        (client.queue, "bold"), f"   {depth.running} running   waiting: {waiting}   {time.strftime('%H:%M:%S')}\n"
    )
    workers = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("WORKER", "MODEL", "RUNNING", "WAITING", "FREE BLOCKS", "TOKENS/S", "UP", ""):
        workers.add_column(title, justify="right" if title.isupper() and title not in ("WORKER", "MODEL") else "left")
    now_ms = time.time() * 1000
    for worker in client.workers():
        up = seconds(now_ms - worker.started_ms) if worker.started_ms else ""
        counts = (str(worker.running), str(worker.waiting), str(worker.free_blocks), f"{worker.tokens_per_s:.0f}")
        note = "draining" if worker.draining else "" if worker.model else "loading"
        workers.add_row(worker.worker_id, worker.model, *counts, up, Text(note, style="yellow"))
    if not workers.row_count:
        workers.add_row(Text("no worker is alive", style="bold red"))
    jobs = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("JOB", "STATUS", "CLASS", "TENANT", "TOKENS", "CREATED", "WORKER"):
        jobs.add_column(title, no_wrap=True)
    for job in client.list(limit=rows) if rows else []:
        tokens = str(job.tokens or "")
        status = state(job.status.value)
        jobs.add_row(job.job_id, status, job.priority, job.tenant, tokens, ago(job.created_ms), job.worker_id)
    return Group(head, workers, Text(), jobs) if jobs.row_count else Group(head, workers)
