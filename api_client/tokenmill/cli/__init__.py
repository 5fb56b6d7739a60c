"""The `tokenmill` command.

Belongs here: what people type and read. Plugins register the commands that need the worker.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from tokenmill.cli.commands import bulk, dead, jobs, score, submit, top, usage, webhooks
from tokenmill.cli.output import replace_unencodable, say
from tokenmill.cli.plugins import CommandGroup

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
    try:
        installed = version("tokenmill")
    except PackageNotFoundError:
        installed = version("tokenmill-client")  # the distribution without the worker
    say(f"tokenmill {installed}\n")
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


for _module in (submit, score, jobs, bulk, usage, dead, webhooks, top):
    _module.register(app)


def main() -> None:
    replace_unencodable()
    app(prog_name="tokenmill")


__all__ = ["app", "main"]
