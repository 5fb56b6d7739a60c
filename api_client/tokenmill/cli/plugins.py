"""The command group: the client's commands, the commands of plugins, and one sentence for each
error.

A package with commands names a typer application in the entry-point group `tokenmill.commands`. The
application is imported only for one of its commands or for the list of all. So `tokenmill submit`
starts quickly, and works where only the client is installed.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any, Final

import redis.exceptions
import typer
from typer.core import TyperGroup

from tokenmill.cli.output import complain
from tokenmill.errors import TokenmillError

GROUP: Final = "tokenmill.commands"
_NEEDS_WORKER: Final = ("worker", "tasks", "dev", "db", "doctor", "exporter")
_NEEDS_GATEWAY: Final = ("gateway", "keys")
_NEEDS_ENGINE: Final = ("worker", "dev")  # our own, unless another one is named


class CommandGroup(TyperGroup):
    """Looks up a command in the plugins if the group does not have it."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = list(super().list_commands(ctx))
        return own + sorted(set(_plugins()) - set(own))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None:
            command = _plugins().get(cmd_name)
        if command is None and cmd_name in _NEEDS_WORKER:
            extras = "worker,engine" if cmd_name in _NEEDS_ENGINE else "worker"
            complain(
                f"`tokenmill {cmd_name}` needs the worker: "
                f"pip install '.[{extras}]' in tokenmill's folder"
            )
            raise typer.Exit(1)
        if command is None and cmd_name in _NEEDS_GATEWAY:
            complain(
                f"`tokenmill {cmd_name}` needs the gateway: "
                "pip install '.[gateway]' in tokenmill's folder"
            )
            raise typer.Exit(1)
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TokenmillError as error:
            complain(str(error))
            # a ConnectionError
            if isinstance(error.__cause__, redis.exceptions.AuthenticationError):
                complain(
                    "the URL has them: redis://user:password@host:6379/0 "
                    "(--redis-url, TOKENMILL_REDIS_URL)",
                    "hint",
                )
            elif isinstance(error.__cause__, redis.exceptions.ConnectionError):
                complain(
                    "--redis-url or TOKENMILL_REDIS_URL says where it is; "
                    "`tokenmill dev` starts one",
                    "hint",
                )
            raise typer.Exit(1) from error
        except BrokenPipeError:
            sys.stderr.close()  # the reader of the pipe has exited: suppress further output
            raise typer.Exit(1) from None


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] in (
        "tokenmill",
        "tokenmill_schemas",
        "tokenmill_worker",
        "tokenmill_gateway",
        "tokenmill_migrations",
    )


def _plugins() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in entry_points(group=GROUP):
        try:
            plugin = entry.load()
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and not _is_ours(error.name):
                continue  # the extra that these commands need is not installed
            complain(f"the commands of {entry.value} are not available: {error}", kind="warning")
            continue
        group: Any = typer.main.get_group(plugin)
        found |= group.commands
    return found
