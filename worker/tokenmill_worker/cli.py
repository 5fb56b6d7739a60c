"""The commands that need the worker: worker, tasks, exporter, dev, db, doctor. Registered under
`tokenmill.commands`.

A command imports what it needs when it runs, so that `--help` is quick. Exit status: 0 in order, 1
for errors outside the settings, 2 for settings, also those that the engine refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from tokenmill.cli.output import complain, emit, say
from tokenmill.errors import TokenmillError
from tokenmill_schemas.visible import visible
from tokenmill_worker.errors import SettingsError
from tokenmill_worker.settings import Settings, load_settings
from tokenmill_worker.settings.flags import SettingsCommand, variables_epilog, with_settings

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
db = typer.Typer(
    help="Create, upgrade, downgrade and check the tables of the SQL store.", no_args_is_help=True
)
app.add_typer(db, name="db")

DatabaseUrl = Annotated[
    str | None, typer.Option(help="SQL store (default: TOKENMILL_DATABASE_URL).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def worker(flags: dict[str, object]) -> None:
    """Serve a queue: claim its jobs, run them on this machine's model, record their results.

    SIGTERM drains: running jobs finish or are handed over. A second signal hands over at once.
    """
    with _sentences():
        settings = load_settings(flags)
        from tokenmill_worker.app import run

        raise typer.Exit(run(settings))


def tasks(flags: dict[str, object]) -> None:
    """Do the work beside the stream of jobs: webhooks, bulk files, sums of usage, retention.

    Runs Celery on threads, with its beat. The queue's Redis is the broker. Start one process or
    several, beside the workers.
    """
    with _sentences():
        settings = load_settings(flags)
        from tokenmill_worker.tasks.run import run

        raise typer.Exit(run(settings))


def dev(flags: dict[str, object]) -> None:
    """Run the whole service on this machine: a private Valkey, SQLite and a worker.

    Ctrl-C stops all of it.
    """
    with _sentences():
        if "redis_url" in flags:
            raise SettingsError(
                [
                    "--redis-url: this command starts a server of its own; `tokenmill worker` "
                    "takes one"
                ]
            )
        port = _port(flags.pop("port", None))
        settings = load_settings(flags)
        from tokenmill_worker.local.dev import run

        with _database(settings):
            status = run(settings, port)
        raise typer.Exit(status)


def _port(text: object) -> int | None:
    if text is None:
        return None
    if not str(text).isdecimal() or not 0 < int(str(text)) < 65_536:
        raise SettingsError([f"--port must be a whole number from 1 to 65535, not {text!r}"])
    return int(str(text))


def _register(command: Callable[[dict[str, object]], None], **others: Any) -> None:
    app.command(command.__name__, cls=SettingsCommand, epilog=variables_epilog())(
        with_settings(command, others)
    )


_register(worker)
_register(tasks)
_register(dev, port="Port of the private Valkey (default: 6379, or any other when that is taken)")


@db.command()
def upgrade(database_url: DatabaseUrl = None) -> None:
    """Create the tables, or bring them to this version.

    Workers may run meanwhile, and so may the same command elsewhere.
    """
    with _sentences():
        settings = load_settings({"database_url": database_url})
        from tokenmill_worker.record.migrate import upgrade as migrate

        with _database(settings):
            before, after = migrate(settings.database_url)
        words = (
            f"is at revision {after} already" if before == after else f"{before or 'new'} → {after}"
        )
        say(f"{_place(settings)}: {words}\n")


@db.command()
def downgrade(
    revision: Annotated[
        str, typer.Argument(help="Last revision to keep, as `0004`; `base` removes all tables.")
    ],
    database_url: DatabaseUrl = None,
    *,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Confirm that the data of later revisions is lost."),
    ] = False,
) -> None:
    """Undo the revisions after the named one, and remove their tables and columns with the data.

    Stop the workers of this version first.
    """
    with _sentences():
        settings = load_settings({"database_url": database_url})
        from tokenmill_worker.record.migrate import downgrade as migrate
        from tokenmill_worker.record.schema_version import revisions

        known = ["base", *revisions()]
        if revision not in known:
            raise TokenmillError(f"there is no revision {revision}, only {', '.join(known)}")
        if not yes:
            raise TokenmillError(
                "this loses the data that later revisions hold: say --yes to do it"
            )
        with _database(settings):
            before, after = migrate(settings.database_url, revision)
        words = "nothing to take back" if before == after else f"{before} → {after or 'no tables'}"
        say(f"{_place(settings)}: {words}\n")


@db.command()
def status(database_url: DatabaseUrl = None, *, json: Json = False) -> None:
    """Show the revision that the database has and the one that this version needs.

    Exits with 1 if the database is behind.
    """
    with _sentences():
        settings = load_settings({"database_url": database_url})
        from tokenmill.sql.engine import missing_file, open_engine
        from tokenmill_worker.record.schema_version import read_schema_version

        if path := missing_file(settings.database_url):
            raise TokenmillError(f"there is no database at {path}: `tokenmill db upgrade`")
        engine = open_engine(settings.database_url)
        with _database(settings), engine.connect() as connection:
            found = read_schema_version(connection)
        engine.dispose()
        if json:
            emit({"current": found.current, "head": found.head, "is_behind": found.is_behind})
        else:
            note = "run `tokenmill db upgrade`" if found.is_behind else "up to date"
            say(f"revision {found.current or 'none'}, this version needs {found.head}: {note}\n")
        if found.is_behind:
            raise typer.Exit(1)


@app.command()
def doctor(
    *,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis or Valkey (default: TOKENMILL_REDIS_URL).")
    ] = None,
    database_url: DatabaseUrl = None,
    queue: Annotated[str | None, typer.Option(help="Queue (default: TOKENMILL_QUEUE).")] = None,
    model: Annotated[str | None, typer.Option(help="Model (default: TOKENMILL_MODEL).")] = None,
    engine: Annotated[
        str | None, typer.Option(help="Kind of engine (default: TOKENMILL_ENGINE, or the model's).")
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "--quiet",
            "-q",
            help="Check only the servers, print only what is wrong: for health checks.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Check settings, servers, model and machine; say what is missing and how to get it.

    With an engine named, also say what it does with each parameter of a job. Exits with 1 on any
    error.
    """
    with _sentences():
        settings = load_settings(
            {
                "redis_url": redis_url,
                "database_url": database_url,
                "queue": queue,
                "model": model,
                "engine": engine,
            }
        )
        from tokenmill_worker.local.doctor import examine, show, show_parameters

        findings = examine(settings, servers_only=quiet)
        if json:
            emit(findings)
        else:
            show(findings, only_problems=quiet)
            if settings.engine and not quiet:
                show_parameters(settings.engine)
        if any(finding.severity == "error" for finding in findings):
            raise typer.Exit(1)


@app.command()
def exporter(
    *,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis or Valkey (default: TOKENMILL_REDIS_URL).")
    ] = None,
    queue: Annotated[
        list[str] | None,
        typer.Option(help="Queue; may be repeated (default: TOKENMILL_QUEUE, or the model's)."),
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(help="Address to serve on (default: TOKENMILL_METRICS_HOST).")
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(help="Port; 0: any free one (default: TOKENMILL_METRICS_PORT, or 9091)."),
    ] = None,
    every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two reads of the queues.")
    ] = 5.0,
) -> None:
    """Serve /metrics and /healthz of queues from Redis alone.

    Alerts and autoscaling then work while no worker runs.
    """
    with _sentences():
        settings = load_settings(
            {
                "redis_url": redis_url,
                "metrics_host": metrics_host,
                "metrics_port": metrics_port,
            }
        )
        from tokenmill_worker.telemetry import configure_logging
        from tokenmill_worker.telemetry.exporter import Exporter

        configure_logging(settings.log_level, settings.log_format)
        chosen = 9091 if settings.metrics_port is None else settings.metrics_port
        names = list(dict.fromkeys(queue or [settings.queue_name]))
        asyncio.run(
            Exporter(
                settings.redis_url,
                names,
                settings.key_prefix,
                settings.metrics_host,
                chosen,
                every_s=every,
            ).serve()
        )


@contextmanager
def _sentences() -> Iterator[None]:
    """Print an error that a person can repair as one line and exit; other errors keep their
    traceback.
    """
    from tokenmill_worker.contract.host import EngineDied
    from tokenmill_worker.local.valkey_server import ValkeyServerError

    try:
        yield
    except SettingsError as error:
        _complain_of_settings(error.problems)
        raise typer.Exit(2) from error
    except (TokenmillError, ValkeyServerError, EngineDied) as error:
        complain(str(error))
        is_refusal = isinstance(error, EngineDied) and error.is_refusal
        raise typer.Exit(2 if is_refusal else 1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _complain_of_settings(problems: tuple[str, ...] | list[str]) -> None:
    count = f"{len(problems)} settings are" if len(problems) > 1 else "one setting is"
    complain(f"{count} wrong, nothing was started")
    for problem in problems:
        typer.echo(f"  {visible(problem)}", err=True)


def _place(settings: Settings) -> str:
    """Return the database's place. An SQLite file is given by its absolute path, since its URL may
    be relative to the current folder.
    """
    from tokenmill.sql.engine import sqlite_file

    return str(sqlite_file(settings.database_url) or settings.public()["database_url"])


@contextmanager
def _database(settings: Settings) -> Iterator[None]:
    import sqlalchemy.exc

    from tokenmill.sql.driver_errors import sentence_of

    try:
        yield
    except sqlalchemy.exc.SQLAlchemyError as error:
        complain(f"{_place(settings)}: {sentence_of(error)}")
        raise typer.Exit(1) from error


__all__: list[Any] = ["app"]
