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
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenmill.base import checked_queue
from tokenmill.cli.output import complain
from tokenmill.client import Client
from tokenmill.errors import ConfigurationError, QueueUnserved, TokenmillError
from tokenmill.operations.io_requests import ClientOptions
from tokenmill_schemas.keys import queue_of

if typing.TYPE_CHECKING:
    from tokenmill.sql import SqlResults

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_DATABASE = "sqlite:///tokenmill.db"
MOST = 1_000_000_000  # largest limit of a list, well within a database's 64 bits


def _option(variable: str, help_text: str, **more: Any) -> Any:
    return typer.Option(
        envvar=f"TOKENMILL_{variable}", help=help_text, rich_help_panel="Where", **more
    )


def limit_of(what: str) -> Any:
    return typer.Option("--limit", "-l", min=1, max=MOST, help=f"Largest number of {what}.")


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Job = Annotated[str, typer.Argument(help="Id of the job.", metavar="JOB")]


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """The queue and the database that a command uses."""

    redis_url: Annotated[str, _option("REDIS_URL", "URL of the Redis or Valkey server.")] = (
        "redis://localhost:6379/0"
    )
    database_url: Annotated[
        str, _option("DATABASE_URL", "URL of the database with the results.")
    ] = DEFAULT_DATABASE
    queue: Annotated[
        str, _option("QUEUE", "Name of the queue.", show_default="the model's name")
    ] = ""
    model: Annotated[str, _option("MODEL", "Model; names the queue if --queue is missing.")] = (
        DEFAULT_MODEL
    )
    key_prefix: Annotated[str, _option("KEY_PREFIX", "Prefix of all keys in Redis.")] = "tm:"

    @property
    def queue_name(self) -> str:
        return checked_queue(self.queue or queue_of(self.model))

    @contextmanager
    def client(self) -> Iterator[Client]:
        """Open a client. It looks up results in SQL too, if a database was named or the default one
        exists.
        """
        is_named = self.database_url != DEFAULT_DATABASE
        with Client(
            self.redis_url,
            queue=self.queue_name,
            database=self.database_url if is_named or _has_default_database() else None,
            prefix=self.key_prefix,
            options=ClientOptions(on_trouble=_complain_of),
        ) as client:
            yield client

    @contextmanager
    def results(self) -> Iterator[SqlResults]:
        from tokenmill.sql import SqlResults

        with closing(SqlResults(self.database_url)) as results:
            yield results


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


def _has_default_database() -> bool:
    """Return whether the default database is there; a client without the extra `sql` cannot read
    it.
    """
    return bool(find_spec("sqlalchemy")) and Path(DEFAULT_DATABASE[len("sqlite:///") :]).exists()


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
