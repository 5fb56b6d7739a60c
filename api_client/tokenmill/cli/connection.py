"""The options that every command has, as one value: which queue and which database.

    @connected
    def status(connection: ConnectionOptions, job: Job) -> None: ...

gives the command `status` the options of ConnectionOptions beside its own. Flags override
TOKENMILL_* variables.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.base import ClientOptions, checked_queue
from tokenmill.cli.output import complain
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError, QueueUnserved, TokenmillError
from tokenmill_schemas.keys import queue_of

if typing.TYPE_CHECKING:
    from tokenmill.sql import SqlResults

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_DATABASE = "sqlite:///tokenmill.db"
MOST = 1_000_000_000  # largest limit of a list, well within a database's 64 bits
_PANEL = "Where"

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Job = Annotated[str, typer.Argument(help="Id of the job.", metavar="JOB")]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The queue and the database that a command uses."""

    redis_url: Annotated[
        str,
        typer.Option(
            envvar="TOKENMILL_REDIS_URL",
            help="URL of the Redis or Valkey server.",
            rich_help_panel=_PANEL,
        ),
    ] = "redis://localhost:6379/0"
    database_url: Annotated[
        str,
        typer.Option(
            envvar="TOKENMILL_DATABASE_URL",
            help="URL of the database with the results.",
            rich_help_panel=_PANEL,
        ),
    ] = DEFAULT_DATABASE
    queue: Annotated[
        str,
        typer.Option(
            envvar="TOKENMILL_QUEUE",
            help="Name of the queue.",
            rich_help_panel=_PANEL,
            show_default="the model's name",
        ),
    ] = ""
    model: Annotated[
        str,
        typer.Option(
            envvar="TOKENMILL_MODEL",
            help="Model; names the queue if --queue is missing.",
            rich_help_panel=_PANEL,
        ),
    ] = DEFAULT_MODEL
    key_prefix: Annotated[
        str,
        typer.Option(
            envvar="TOKENMILL_KEY_PREFIX",
            help="Prefix of all keys in Redis.",
            rich_help_panel=_PANEL,
        ),
    ] = "tm:"

    @property
    def queue_name(self) -> str:
        return checked_queue(self.queue or queue_of(self.model))

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Open a client. It looks up results in SQL too, if a database was named or the default one
        exists.
        """
        database = (
            self.database_url
            if self.database_url != DEFAULT_DATABASE or not why_no_database()
            else None
        )
        options = ClientOptions(on_trouble=_complain_of)
        client = Client(
            self.redis_url,
            queue=self.queue_name,
            database=database,
            prefix=self.key_prefix,
            options=options,
        )
        try:
            yield client
        finally:
            client.close()

    @contextmanager
    def results(self) -> Iterator[SqlResults]:
        from tokenmill.sql import SqlResults

        results = SqlResults(self.database_url)
        try:
            yield results
        finally:
            results.close()


def was_typed(context: typer.Context, option: str) -> bool:
    """Return whether an option was given on the command line, not by a variable."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def metadata_of(items: Sequence[str]) -> dict[str, str]:
    """Parse the values of --metadata, KEY=VALUE each. Raises ConfigurationError."""
    found: dict[str, str] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator:
            raise ConfigurationError(f"--metadata must be KEY=VALUE, not {item!r}")
        found[key] = value
    return found


def _complain_of(trouble: TokenmillError) -> None:
    if isinstance(trouble, QueueUnserved):
        complain(str(trouble), "note")
        return
    complain(
        f"{trouble}; waiting up to {ClientOptions().retry_for_s:.0f} s "
        "(Ctrl-C ends this, the job goes on)",
        "note",
    )


def why_no_database() -> str:
    """Return why the default database is not used; "" if it is. A client without the extra `sql`
    works without it.
    """
    from importlib.util import find_spec

    path = Path(DEFAULT_DATABASE.removeprefix("sqlite:///")).absolute()
    if find_spec("sqlalchemy") is None:
        return "SQLAlchemy is not installed"
    return "" if path.exists() else f"there is no database at {path}"


def need_place_of_batches(client: Client, output: Path | None) -> None:
    """Raise ConfigurationError if a batch can be kept neither in the client's database nor in a
    file beside the output.
    """
    from importlib.util import find_spec

    if find_spec("sqlalchemy") is None:
        raise ConfigurationError(
            "bulk files need SQLAlchemy: pip install '.[sql]' in tokenmill's folder, "
            "'./api_client[sql]' for the light client"
        )
    if client.database is None and output is None:
        raise ConfigurationError(
            f"{why_no_database()}, and batches are kept in one: name it with --database-url or "
            "TOKENMILL_DATABASE_URL, or use `bulk run`, which needs none"
        )


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of ConnectionOptions as options, in place of its first
    parameter.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    option_hints = typing.get_type_hints(ConnectionOptions, include_extras=True)
    own = list(inspect.signature(command).parameters.values())[1:]
    parameters = [
        p.replace(annotation=hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own
    ]
    fields = inspect.signature(ConnectionOptions).parameters.values()
    shared = [
        p.replace(annotation=option_hints[p.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for p in fields
    ]

    def run(**values: Any) -> None:
        connection = ConnectionOptions(**{p.name: values.pop(p.name) for p in shared})
        command(connection, **values)

    described: Any = run
    described.__name__ = command.__name__
    described.__doc__ = command.__doc__
    described.__signature__ = inspect.Signature([*parameters, *shared])
    described.__annotations__ = {p.name: p.annotation for p in (*parameters, *shared)}
    return run
