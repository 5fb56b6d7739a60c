"""`usage`: tokens and times of finished jobs, summed from SQL."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import date
from typing import Annotated, cast

import typer
from rich.text import Text

from tokenmill.cli.connection import ConnectionOptions, Json, connected
from tokenmill.cli.output import emit, err, say, seconds, table
from tokenmill.errors import ConfigurationError
from tokenmill.sql import GROUPINGS, Grouping, UsageRow


def register(app: typer.Typer) -> None:
    app.command()(connected(usage))


def usage(
    connection: ConnectionOptions,
    *,
    by: Annotated[
        str, typer.Option(help=f"Columns to group by: {', '.join(GROUPINGS)}.")
    ] = "day,tenant,model",
    tenant: Annotated[str | None, typer.Option(help="Count only this tenant.")] = None,
    only_model: Annotated[
        str | None, typer.Option("--only-model", help="Count only this model.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="First day, UTC.", metavar="YYYY-MM-DD")] = None,
    until: Annotated[str | None, typer.Option(help="Last day, UTC.", metavar="YYYY-MM-DD")] = None,
    one_queue: Annotated[
        bool, typer.Option("--one-queue", help="Count only the queue that --queue names.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with a header line.")] = False,
    json: Json = False,
) -> None:
    """Sum finished jobs, tokens and mean times of every queue, by tenant, model and day."""
    if json and as_csv:
        raise ConfigurationError("give --json or --csv, not both")
    columns = tuple(word.strip() for word in by.split(",") if word.strip())
    for day in (since, until):
        if day is not None and not _is_day(day):
            raise ConfigurationError(f"a day is written YYYY-MM-DD, not {day!r}")
    with connection.results() as results:
        rows = results.usage(
            by=cast("Sequence[Grouping]", columns),
            tenant=tenant,
            model=only_model,
            queue=connection.queue_name if one_queue else None,
            since_day=since,
            until_day=until,
        )
    if json:
        emit([_as_object(row, columns) for row in rows])
    elif as_csv:
        say(_as_csv(rows, columns))
    elif rows:
        numbers = [
            "JOBS",
            "OK",
            "PROMPT",
            "CACHED",
            "GENERATED",
            "THOUGHTS",
            "FIRST TOKEN",
            "WHOLE JOB",
        ]
        lines = [_line(row) for row in rows]
        if len(rows) > 1 and columns:
            lines.append(_totals(rows, len(columns)))
        table([*(name.upper() for name in columns), *((name, "right") for name in numbers)], lines)
    else:
        err().print("[dim]no finished jobs[/dim]")


def _is_day(text: str) -> bool:
    """Return whether the text is a day of the calendar, written as days are in SQL."""
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _as_object(row: UsageRow, columns: Sequence[str]) -> dict[str, object]:
    values = {name: getattr(row, name) for name in UsageRow.__struct_fields__ if name != "group"}
    return {**dict(zip(columns, row.group, strict=True)), **values}


def _as_csv(rows: Sequence[UsageRow], columns: Sequence[str]) -> str:
    lines = io.StringIO()
    names = [name for name in UsageRow.__struct_fields__ if name != "group"]
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*columns, *names])
    writer.writerows([*row.group, *(getattr(row, name) for name in names)] for row in rows)
    return lines.getvalue()


def _line(row: UsageRow) -> tuple[object, ...]:
    tokens = (f"{getattr(row, name):,}" for name in _SUMMED[2:])
    names = (value or "–" for value in row.group)
    return (
        *names,
        f"{row.jobs:,}",
        f"{row.succeeded:,}",
        *tokens,
        seconds(row.mean_ttft_ms),
        seconds(row.mean_total_ms),
    )


def _totals(rows: Sequence[UsageRow], num_columns: int) -> tuple[object, ...]:
    sums = [f"{sum(getattr(row, name) for row in rows):,}" for name in _SUMMED]
    cells = ["total", *[""] * (num_columns - 1), *sums, "", ""]
    return tuple(Text(cell, style="bold") for cell in cells)


_SUMMED = (
    "jobs", "succeeded", "prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens",
)  # fmt: skip
