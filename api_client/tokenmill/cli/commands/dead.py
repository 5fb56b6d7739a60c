"""`dead list` and `dead redrive`: dead jobs with their errors, and their return to the queue."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.text import Text

from tokenmill.cli.connection import ConnectionOptions, Json, connected, limit_of
from tokenmill.cli.output import ago, out, redrive_all, say, show_list
from tokenmill.operations.queue import DeadJob


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="List jobs that were set aside after too many crashes, and run them again.",
        no_args_is_help=True,
    )
    group.command("list")(connected(list_dead))
    group.command("redrive")(connected(redrive))
    app.add_typer(group, name="dead")


def list_dead(
    connection: ConnectionOptions,
    *,
    limit: Annotated[int, limit_of("jobs")] = 50,
    history: Annotated[
        bool, typer.Option("--history", help="Show the crashes before the end.")
    ] = False,
    json: Json = False,
) -> None:
    """List the dead letters, newest first, each with its reason."""
    with connection.client() as client:
        found = client.dead(limit)
    if json or not found or not history:
        show_list(found, ["JOB", "DIED", "ERROR"], _row, "dead job", json=json)
        return
    for job in found:
        out().print(Text.assemble((job.job_id, "bold"), f" {ago(job.died_ms)}: {job.error}"))
        for line in job.history:
            say(f"    {line}\n")


def _row(job: DeadJob) -> tuple[object, ...]:
    return job.job_id, ago(job.died_ms), job.error


def redrive(
    connection: ConnectionOptions,
    job: Annotated[list[str] | None, typer.Argument(help="Ids of the jobs.", metavar="JOB")] = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Redrive all dead jobs, the oldest first.")
    ] = False,
    limit: Annotated[int, limit_of("jobs with --all")] = 1000,
    json: Json = False,
) -> None:
    """Return dead jobs to the queue: they start again, without their deadline."""
    with connection.client() as client:
        call = partial(client.redrive, limit=limit)
        redrive_all(call, job, "job", everything=everything, json=json)
