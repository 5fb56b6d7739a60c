"""`scale`: how many workers queues need, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from tokenmill.cli.connection import ConnectionOptions, Json, connected
from tokenmill.cli.output import emit, table
from tokenmill.operations.scaling import WorkersWanted, workers_wanted


def register(app: typer.Typer) -> None:
    app.command()(connected(scale))


def scale(
    connection: ConnectionOptions,
    queues: Annotated[
        list[str] | None,
        typer.Argument(help="Queues (default: --queue).", metavar="QUEUE"),
    ] = None,
    *,
    json: Json = False,
) -> None:
    """Say how many workers queues need to end what waits and runs within its deadlines.

    Measured by the pace of the workers. Jobs of a later time count from then on. The metric
    `tokenmill:queue_workers_wanted` is this number, and falls ten minutes later.
    """
    answers = []
    for queue in dict.fromkeys(queues or [connection.queue_name]):
        with replace(connection, queue=queue).client() as client:
            answers.append(workers_wanted(client.overview()))
    if json:
        emit([_as_object(answer) for answer in answers])
    else:
        columns = ("queue", ("needed", "right"), ("there", "right"), "why")
        table(columns, map(_row, answers), wraps=True)


def _as_object(answer: WorkersWanted) -> dict[str, object]:
    names = ("queue", "workers", "now", "starting", "pace", "reason")
    return {name: getattr(answer, name) for name in names}


def _row(answer: WorkersWanted) -> tuple[str, ...]:
    there = f"{answer.now}" + (f" ({answer.starting} starting)" if answer.starting else "")
    return answer.queue, f"{answer.workers}", there, answer.reason
