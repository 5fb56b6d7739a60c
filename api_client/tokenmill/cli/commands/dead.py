"""`dead list` and `dead redrive`: dead jobs with their errors, and their return to the queue."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from tokenmill.cli.connection import MOST, ConnectionOptions, Json, connected
from tokenmill.cli.output import ago, emit, err, out, say, show_redriven, table
from tokenmill.errors import InvalidRequest


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
    limit: Annotated[
        int, typer.Option("--limit", "-l", min=1, max=MOST, help="Largest number of jobs.")
    ] = 50,
    history: Annotated[
        bool, typer.Option("--history", help="Show the crashes before the end.")
    ] = False,
    json: Json = False,
) -> None:
    """List the dead letters, newest first, each with its reason."""
    with connection.client() as client:
        found = client.dead(limit)
    if json:
        emit(found)
    elif not found:
        err().print("[dim]no dead jobs[/dim]")
    elif not history:
        table(
            ["JOB", "DIED", "ERROR"],
            ((job.job_id, ago(job.died_ms), job.error) for job in found),
        )
    else:
        for job in found:
            out().print(Text.assemble((job.job_id, "bold"), f" {ago(job.died_ms)}: {job.error}"))
            for line in job.history:
                say(f"    {line}\n")


def redrive(
    connection: ConnectionOptions,
    job: Annotated[list[str] | None, typer.Argument(help="Ids of the jobs.", metavar="JOB")] = None,
    *,
    everything: Annotated[
        bool, typer.Option("--all", help="Redrive all dead jobs, the oldest first.")
    ] = False,
    limit: Annotated[
        int,
        typer.Option("--limit", "-l", min=1, max=MOST, help="Largest number of jobs with --all."),
    ] = 1000,
    json: Json = False,
) -> None:
    """Return dead jobs to the queue: they start again, without their deadline."""
    if bool(job) == everything:
        raise InvalidRequest(["give the ids of jobs, or --all"])
    with connection.client() as client:
        revived = list(client.redrive(job or None, limit))
    if not show_redriven(revived, job or (), "job", json=json):
        raise typer.Exit(1)
