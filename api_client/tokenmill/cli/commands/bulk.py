"""`bulk run|submit|status|results|cancel|list`: files of requests in OpenAI's batch format."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text

from tokenmill.bulk import (
    Batch,
    BatchOptions,
    BatchState,
    BatchStore,
    Paths,
    RunLimits,
    cancel_batch,
    export_batch,
    import_batch,
    new_batch,
    open_store,
    refresh,
    run_batch,
)
from tokenmill.bulk.batch import DEFAULT_WINDOW
from tokenmill.bulk.progress import WINDOW
from tokenmill.cli.connection import (
    ConnectionOptions,
    Json,
    connected,
    limit_of,
    metadata_of,
)
from tokenmill.cli.output import ago, clock, complain, count, emit, err, out, say, table
from tokenmill.cli.views.bulk_progress import bulk_progress
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError

_STYLES = {
    "completed": "green",
    "failed": "red",
    "expired": "magenta",
    "cancelled": "dim",
    "cancelling": "dim",
}

Input = Annotated[Path, typer.Argument(help="JSONL file of requests.", metavar="INPUT")]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write the answers to.")]
Errors = Annotated[
    Path | None,
    typer.Option("--errors", help="File to write failed lines to. (default: OUTPUT.errors.jsonl)"),
]
Window = Annotated[
    str,
    typer.Option(
        "--completion-window", help="Time after which unfinished lines expire: 30m, 24h, 7d."
    ),
]
Tenant = Annotated[str, typer.Option(help="Tenant of the batch.")]
AnyModel = Annotated[
    bool, typer.Option("--any-model", help="Use the queue's model, whatever model the lines name.")
]
Metadata = Annotated[
    list[str] | None, typer.Option(help="KEY=VALUE, kept with the batch; may be repeated.")
]
InFlight = Annotated[
    int, typer.Option("--window", help="Jobs in the queue at once.", min=1, max=1_000_000)
]
BatchId = Annotated[str, typer.Argument(help="Id of the batch.", metavar="BATCH")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        help="Answer files of requests in OpenAI's batch format.", no_args_is_help=True
    )
    for command in (run, submit, status, results, cancel):
        group.command()(connected(command))
    group.command("list")(connected(list_batches))
    app.add_typer(group, name="bulk")


def run(
    connection: ConnectionOptions,
    source: Input,
    *,
    output: Output,
    errors: Errors = None,
    completion_window: Window = DEFAULT_WINDOW,
    tenant: Tenant = "",
    any_model: AnyModel = False,
    metadata: Metadata = None,
    window: InFlight = WINDOW,
    json: Json = False,
) -> None:
    """Answer a whole file from this process. After an interruption, run it again to continue."""
    paths = Paths.of(output, errors)
    options = _options(completion_window, tenant, any_model, metadata)
    going_on = f"run the same command again to continue ({paths.output} keeps the answers so far)"
    with (
        _open(connection, paths.output) as (client, store),
        _interruptible(going_on),
        bulk_progress() as on_progress,
    ):
        batch = run_batch(
            client,
            store,
            source,
            paths,
            options=options,
            limits=RunLimits(window, on_progress=on_progress),
        )
    _show_end(batch, json)


def submit(
    connection: ConnectionOptions,
    source: Input,
    *,
    batch: Annotated[
        str | None,
        typer.Option("--continue", help="Continue this batch with the same file.", metavar="BATCH"),
    ] = None,
    completion_window: Window = DEFAULT_WINDOW,
    tenant: Tenant = "",
    any_model: AnyModel = False,
    metadata: Metadata = None,
    window: InFlight = WINDOW,
    json: Json = False,
) -> None:
    """Submit a whole file and print the batch's id. Returns when all lines are in the queue."""
    with _open(connection) as (client, store):
        options = _options(completion_window, tenant, any_model, metadata)
        known = (
            store.get(batch) if batch is not None else new_batch(client, source.resolve(), options)
        )
        if not json:
            say(f"{known.id}\n")
        going_on = f"to continue: tokenmill bulk submit {source} --continue {known.id}"
        with _interruptible(going_on), bulk_progress() as on_progress:
            ended = import_batch(
                client,
                store,
                source,
                batch=known,
                limits=RunLimits(window, on_progress=on_progress),
            )
    if json:
        emit(ended.public())
    _complain_of_failure(ended)


def status(connection: ConnectionOptions, batch: BatchId, *, json: Json = False) -> None:
    """Show a batch: its state and the counts of its lines."""
    with _open(connection) as (client, store):
        found = refresh(client, store, batch)
    if json:
        emit(found.public())
        return
    for name, value in _facts(found):
        out().print(Text(f"{name:<11}", style="dim"), value)


def results(
    connection: ConnectionOptions,
    batch: BatchId,
    *,
    output: Output,
    errors: Errors = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Write the answers so far, before the batch has ended."),
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            help="Input file, to name lines that were never submitted.", show_default=False
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write a batch's answers and errors to files, replacing their contents."""
    paths = Paths.of(output, errors)
    with _open(connection) as (client, store):
        found = refresh(client, store, batch)
        if not found.state.is_final and not partial:
            left = found.total - found.totals.ended
            raise ConfigurationError(
                f"batch {batch} is {found.state.value}, {count(left, 'line')} to go: "
                "wait, or write the answers so far with --partial"
            )
        ended, missing = export_batch(client, store, batch, paths, source=source)
    if missing and ended.state.is_final:
        words = f"{count(missing, 'line')} were never submitted; "
        words += "give the input file with --source to have them named"
        complain(words, "warning")
    _show_end(ended, json)


def cancel(connection: ConnectionOptions, batch: BatchId, *, json: Json = False) -> None:
    """Cancel a batch: submit no more lines, cancel waiting jobs, stop running ones."""
    with _open(connection) as (client, store):
        found = cancel_batch(client, store, batch)
    if json:
        emit(found.public())
    elif found.state in (BatchState.CANCELLING, BatchState.CANCELLED):
        say(f"{batch} {found.state.value}\n")
    else:
        say(f"{batch} is over already: {found.state.value}\n")


def list_batches(
    connection: ConnectionOptions,
    *,
    limit: Annotated[int, limit_of("batches")] = 20,
    after: Annotated[
        str | None, typer.Option(help="List batches older than this one.", metavar="BATCH")
    ] = None,
    json: Json = False,
) -> None:
    """List batches, the newest first."""
    with _open(connection) as (client, store):
        found = [refresh(client, store, batch.id) for batch in store.newest(limit, after)]
    if json:
        emit([batch.public() for batch in found])
    elif found:
        right = [(title, "right") for title in ("LINES", "ANSWERED", "FAILED", "WHEN")]
        table(["BATCH", "STATUS", "TENANT", *right, "FILE"], map(_row, found))
    else:
        err().print("[dim]no batches[/dim]")


@contextmanager
def _open(
    connection: ConnectionOptions, output: Path | None = None
) -> Iterator[tuple[Client, BatchStore]]:
    with connection.client() as client, closing(open_store(client, output)) as store:
        yield client, store


@contextmanager
def _interruptible(how_to_go_on: str) -> Iterator[None]:
    try:
        with _stoppable():
            yield
    except KeyboardInterrupt:
        complain(f"interrupted; {how_to_go_on}", "note")
        raise typer.Exit(130) from None


@contextmanager
def _stoppable() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside the block."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _options(window: str, tenant: str, any_model: bool, metadata: list[str] | None) -> BatchOptions:
    return BatchOptions(window, tenant, any_model, metadata_of(metadata or ()))


def _show_end(batch: Batch, json: bool) -> None:
    if json:
        emit(batch.public())
    else:
        used = batch.totals
        say(
            f"{batch.id} {batch.state.value}: "
            f"{used.completed} of {batch.total} answered, {used.failed} failed\n"
        )
        for what, path in (("answers", batch.output_file), ("errors", batch.error_file)):
            if path:
                say(f"{what:<8} {path}\n")
    _complain_of_failure(batch)


def _complain_of_failure(batch: Batch) -> None:
    """Exit with 1 for a batch that ended in another state than completed. Failed lines are no
    failure: they are in the error file.
    """
    if batch.state is BatchState.FAILED:
        complain(batch.errors[0].message if batch.errors else "the batch failed")
    if batch.state.is_final and batch.state is not BatchState.COMPLETED:
        sys.stdout.flush()
        raise typer.Exit(1)


def _row(batch: Batch) -> list[Any]:
    used = batch.totals
    state = Text(batch.state.value, style=_STYLES.get(batch.state.value, "yellow"))
    numbers = (batch.total, used.completed, used.failed)
    return [
        batch.id,
        state,
        batch.tenant,
        *numbers,
        ago(batch.created_ms),
        Path(batch.input_file).name,
    ]


def _facts(batch: Batch) -> list[tuple[str, Text]]:
    used = batch.totals
    facts: list[tuple[str, object]] = [
        ("batch", batch.id),
        ("status", batch.state.value),
        ("lines", f"{batch.total}: {used.completed} answered, {used.failed} failed"),
        (
            "submitted",
            "all" if batch.is_submitted else f"up to line {batch.submitted} of {batch.last_line}",
        ),
        (
            "tokens",
            f"{used.input_tokens} in, {used.output_tokens} out" if used.input_tokens else "",
        ),
        ("model", batch.model),
        ("endpoint", batch.endpoint),
        ("tenant", batch.tenant),
        ("input", batch.input_file),
        ("output", batch.output_file or ""),
        ("errors", batch.error_file or ""),
        ("created", clock(batch.created_ms)),
        ("expires", "" if batch.state.is_final else clock(batch.expires_ms)),
        ("ended", clock(batch.finished_ms) if batch.finished_ms else ""),
        *(("", f"line {bad.line}: {bad.message} ({bad.code})") for bad in batch.errors[:5]),
    ]
    return [(name, Text(str(value))) for name, value in facts if value != ""]
