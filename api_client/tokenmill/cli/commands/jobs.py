"""`status`, `result`, `cancel` for one job, `jobs` for many."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Final, cast

import typer
from rich.text import Text

from tokenmill.cli.connection import ConnectionOptions, Job, Json, connected, limit_of
from tokenmill.cli.output import (
    ago,
    clock,
    complain,
    emit,
    err,
    out,
    say,
    seconds,
    show_list,
    state,
)
from tokenmill.cli.views.job_output import show_answer
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError, JobNotFound, TokenmillError
from tokenmill.operations.records import JobInfo
from tokenmill.sql import JobRow
from tokenmill_schemas.result import JobStatus
from tokenmill_schemas.visible import visible

Listed = JobInfo | JobRow
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_UNENDED: Final = ("open", "scheduled", "queued", "running")


class State(StrEnum):
    """The states of JobStatus, and the two groups of states that are asked for most."""

    OPEN = "open"
    ENDED = "ended"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD = "dead"


def register(app: typer.Typer) -> None:
    for command in (status, result, cancel, jobs):
        app.command()(connected(command))


def status(connection: ConnectionOptions, job: Job, *, json: Json = False) -> None:
    """Show a job's state: from the queue, or from SQL after Redis has deleted its record."""
    with connection.client() as client:
        info = client.status(job)
    if json:
        emit(info)
        return
    for name, value in _facts(info):
        out().print(Text(f"{name:<10}", style="dim"), value)


def result(
    connection: ConnectionOptions,
    job: Job,
    *,
    timeout: Annotated[
        float | None, typer.Option(help="Longest wait in seconds; 0: do not wait.", min=0)
    ] = None,
    json: Json = False,
) -> None:
    """Wait for a job's end and print its answer. Exits with 1 when it has none."""
    with connection.client() as client:
        end = client.result(job, timeout)
    if json:
        emit(end)
    else:
        show_answer(end)
    if end.status is not JobStatus.SUCCEEDED:
        if not json:
            complain(
                f"job {job} {end.status.value}" + (f": {end.error.message}" if end.error else "")
            )
        raise typer.Exit(1)


def cancel(
    connection: ConnectionOptions,
    job: Annotated[list[str], typer.Argument(help="Ids of the jobs.", metavar="JOB")],
    *,
    json: Json = False,
) -> None:
    """Cancel jobs; running ones keep their text so far. Exits with 1 if one is unknown."""
    outcomes: dict[str, str] = {}
    try:
        with connection.client() as client:
            for job_id in job:
                outcomes[job_id] = outcome = _cancel(client, job_id)
                if not json and outcome != "unknown":
                    words = (
                        outcome
                        if outcome in ("cancelled", "cancelling")
                        else f"is over already: {outcome}"
                    )
                    say(f"{job_id} {words}\n")
    finally:  # the server may fail after some of the jobs
        if json and outcomes:
            emit(outcomes)
    if "unknown" in outcomes.values():
        raise typer.Exit(1)


def _cancel(client: Client, job_id: str) -> str:
    try:
        return client.cancel(job_id)
    except JobNotFound as error:
        complain(str(error))
        return "unknown"


def jobs(
    connection: ConnectionOptions,
    *,
    wanted: Annotated[
        State | None,
        typer.Option(
            "--status",
            "--state",
            help="List only this state; open: not ended yet. (default: open, then ended)",
        ),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="List only this tenant.")] = None,
    batch: Annotated[str | None, typer.Option(help="List only ended jobs of this batch.")] = None,
    only_model: Annotated[
        str | None, typer.Option("--only-model", help="List only ended jobs of this model.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(help="List jobs that ended since then: 2h, 7d, 2026-01-31.", metavar="WHEN"),
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="List jobs that ended before then.", metavar="WHEN")
    ] = None,
    after: Annotated[
        str | None,
        typer.Option(help="List the page of ended jobs after this cursor.", metavar="CURSOR"),
    ] = None,
    limit: Annotated[int, limit_of("jobs of each kind")] = 20,
    all_queues: Annotated[
        bool, typer.Option("--all-queues", help="List the ended jobs of all queues.")
    ] = False,
    json: Json = False,
) -> None:
    """List jobs, the newest first: open ones from the queue, ended ones from SQL."""
    queue = connection.queue_name  # an invalid name fails here, not as an error of one source
    of_ended = {
        "batch_id": batch,
        "model": only_model,
        "since_ms": time_argument_ms(since),
        "until_ms": time_argument_ms(until),
        "after": after,
    }
    is_of_ended = any(value is not None for value in of_ended.values())

    def unended() -> Sequence[Listed]:
        narrow = None if wanted in (None, "open") else JobStatus(wanted)
        with connection.client() as client:
            infos = [] if is_of_ended else client.list(narrow, limit)
        return [
            info
            for info in infos
            if tenant in (None, info.tenant) and (narrow is not None or not info.status.is_final)
        ]

    def ended() -> Sequence[Listed]:
        state = None if wanted in (None, "ended") else str(wanted)
        with connection.results() as results:
            return results.jobs(
                status=state,
                tenant=tenant,
                queue=None if all_queues else queue,
                limit=limit,
                **cast("dict[str, Any]", of_ended),
            )

    # Redis keeps dead jobs until they are redriven
    wants_unended = not is_of_ended if wanted in (None, "dead") else wanted in _UNENDED
    kinds = [unended] * wants_unended + [ended] * (wanted is None or not wants_unended)
    found: list[Listed] = []
    troubles: list[TokenmillError] = []
    for kind in kinds:
        try:
            found += kind()
        except TokenmillError as error:
            troubles.append(error)
    if troubles and len(troubles) == len(kinds):
        raise troubles[0]
    for trouble in troubles:
        complain(str(trouble), "warning")
    right = [(title, "right") for title in ("TOKENS", "TOOK", "WHEN")]
    show_list(found, ["JOB", "STATUS", *right, "PRIORITY", "TENANT", ""], _row, "job", json=json)
    rows = [job for job in found if isinstance(job, JobRow)]
    if len(rows) == limit:
        err().print(Text(f"more: --after {rows[-1].cursor}", style="dim"))


def _row(job: Listed) -> Sequence[Any]:
    tokens: int | str
    if isinstance(job, JobRow):
        tokens, note = job.completion_tokens, job.error.message if job.error else ""
        took, when = seconds(job.finished_ms - job.created_ms), ago(job.finished_ms)
        name = state(job.status)
    else:
        tokens, took, when = job.tokens or "", "", ago(job.created_ms)
        note = "cancelling" if job.cancelling else job.error.message if job.error else job.worker_id
        name = state(job.status.value)
    return job.job_id, name, tokens, took, when, job.priority, job.tenant, note


def _facts(info: JobInfo) -> list[tuple[str, Text]]:
    facts: list[tuple[str, object]] = [
        ("job", info.job_id),
        ("state", info.status.value + (" (cancelling)" if info.cancelling else "")),
        ("priority", info.priority),
        ("tenant", info.tenant),
        ("created", clock(info.created_ms)),
        ("starts", clock(info.not_before_ms) if info.not_before_ms and not info.started_ms else ""),
        ("started", clock(info.started_ms) if info.started_ms else ""),
        ("finished", clock(info.finished_ms) if info.finished_ms else ""),
        ("deadline", clock(info.deadline_ms) if info.deadline_ms else ""),
        ("tokens", info.tokens or ""),
        ("worker", info.worker_id),
        ("attempt", info.attempt if info.attempt > 1 else ""),
        ("claims", info.deliveries if info.deliveries > 1 else ""),
        ("crashes", info.crashes or ""),
        ("error", f"{info.error.message} ({info.error.code})" if info.error else ""),
    ]
    shown = [(name, str(value)) for name, value in facts if value != ""]
    return [
        (name, state(value) if name == "state" else Text(visible(value))) for name, value in shown
    ]


def time_argument_ms(text: str | None) -> int | None:
    """Return a time in Unix milliseconds; None without a text.

    The text is a date, a date with a time (without a zone: local), or a span before now such as
    `2h` or `7d`. Raises ConfigurationError.
    """
    if text is None:
        return None
    span = re.fullmatch(r"(\d{1,9})([smhdw])", text.strip())
    if span is not None:
        return round((time.time() - int(span[1]) * _UNITS_S[span[2]]) * 1000)
    try:
        return round(datetime.fromisoformat(text.strip()).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ConfigurationError(
            f"a time is written 2026-01-31, 2026-01-31T12:30, or 2h for two hours ago, not {text!r}"
        ) from None
