"""The `tokenmill` command.

Belongs here: what people type and read. Plugins register the commands that need the worker.
"""

from typing import Annotated

import typer

from tokenmill.cli.commands import bulk, dead, jobs, scale, score, submit, top, usage, webhooks
from tokenmill.cli.output import replace_unencodable, say
from tokenmill.cli.plugins import CommandGroup
from tokenmill_schemas.release import version

app = typer.Typer(
    name="tokenmill",
    cls=CommandGroup,
    help="Submit generation jobs to a queue, follow their tokens, fetch results, count usage.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(is_wanted: bool) -> None:
    if not is_wanted:
        return
    say(f"tokenmill {version()}\n")
    raise typer.Exit


@app.callback()
def _options(
    *,
    _version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    pass


for _module in (submit, score, jobs, bulk, usage, dead, webhooks, top, scale):
    _module.register(app)


def main() -> None:
    replace_unencodable()
    app(prog_name="tokenmill")


__all__ = ["app", "main"]
