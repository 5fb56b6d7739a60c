"""The output of commands: answers on stdout, everything else on stderr; tables for people, JSON for
programs.

A terminal gets the control characters of a job's text as escapes. In a pipe, answers and JSON pass
unchanged.
"""

from __future__ import annotations

import json as standard_json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import msgspec
import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from tokenmill.errors import InvalidRequest
from tokenmill_schemas.generation import token_text
from tokenmill_schemas.visible import visible, visible_json

STATE_STYLES = {
    "scheduled": "cyan",
    "queued": "cyan",
    "running": "yellow",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "dim",
    "expired": "magenta",
    "dead": "bold red",
}
LEAST_WIDTH = 12  # of a column whose texts are cut


class VisibleConsole(Console):
    """Shows the control characters of every text that it prints as escapes."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control is None:
                yield Segment(visible(segment.text), segment.style)
            else:
                yield segment


def out() -> Console:
    """Return a console on stdout, a new one each time, because tests and pipes may have replaced
    stdout.
    """
    return VisibleConsole(highlight=False, soft_wrap=True)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 job`, `2 jobs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def err() -> Console:
    return VisibleConsole(stderr=True, highlight=False, soft_wrap=True)


def complain(sentence: str, kind: str = "error") -> None:
    """Print `Error: …` on stderr: in one line, on a terminal wrapped between words."""
    line = Text(f"{kind.capitalize()}: ", style="bold red" if kind == "error" else "bold yellow")
    console = err()
    console.print(
        line.append(visible(sentence, keep=""), style="not bold default"),
        soft_wrap=not console.is_terminal,
    )


def hanging(words: Text, indent: int) -> Text:
    """Return text for a terminal, wrapped between words; all lines but the first are indented.

    Elsewhere it stays one line, for programs that read it.
    """
    console = out()
    if not console.is_terminal:
        return words
    lines = words.wrap(console, console.width - indent)
    for line in lines:
        line.rstrip()
    return Text("\n" + " " * indent).join(lines)


def emit(value: object, *, line: bool = False) -> None:
    """Print JSON on stdout: indented for one answer; with `line`, one line for one of many
    answers. Bytes of tokens are written as text.
    """
    data = msgspec.json.encode(_readable(msgspec.to_builtins(value, builtin_types=(bytes,))))
    document = (data if line else msgspec.json.format(data, indent=2)).decode()
    if sys.stdout.isatty():
        document = visible_json(document)
    try:
        document.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # stdout is ASCII, say
        document = standard_json.dumps(standard_json.loads(document), indent=None if line else 2)
    sys.stdout.write(document + "\n")
    sys.stdout.flush()


def _readable(value: Any) -> Any:
    """Return plain values with text for bytes, for which JSON has no form."""
    if isinstance(value, dict):
        return {key: _readable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(inner) for inner in value]
    return token_text(value) if isinstance(value, bytes) else value


def say(text: str) -> None:
    """Print plain text on stdout, without markup."""
    sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def say_dimmed(text: str) -> None:
    """Print plain text on stdout, dimmed where it is a terminal."""
    out().print(Text(visible(text), style="dim"), end="")
    sys.stdout.flush()


def replace_unencodable() -> None:
    """Make stdout show a character that its encoding lacks as an escape, instead of failing."""
    stdout: Any = sys.stdout
    if stdout.errors == "strict":
        stdout.reconfigure(errors="backslashreplace")


def state(value: str) -> Text:
    return Text(value, style=STATE_STYLES.get(value, ""))


def table(
    columns: Sequence[str | tuple[str, str]], rows: Iterable[Sequence[Any]], *, wraps: bool = False
) -> None:
    """Print a table with one line for each row. Columns are titles, or (title, justification).

    A terminal shows what fits: the texts of the columns behind the first are cut to LEAST_WIDTH
    where needed, or wrapped between words with `wraps`, then columns are left out from the right,
    and `…` stands for them. Elsewhere nothing is cut.
    """
    terminal = out()
    grid = Table(box=None, header_style="bold", pad_edge=False)
    cells = [[_cell(value, wraps=wraps) for value in row] for row in rows]
    for number, column in enumerate(columns):
        title, justify = (column, "left") if isinstance(column, str) else column
        width = max(cell_len(title), *(row[number].cell_len for row in cells))
        is_text = number > 0 and justify == "left"
        grid.add_column(
            title,
            justify=justify,  # type: ignore[arg-type]
            no_wrap=not is_text,
            min_width=min(LEAST_WIDTH, width) if is_text else width,
        )
    shown = _num_fitting(grid, terminal.width) if terminal.is_terminal else len(columns)
    if shown < len(columns):
        del grid.columns[shown:]
        grid.add_column("…")
    for row in cells:
        grid.add_row(*row[:shown])
    wide = Console(highlight=False, width=10_000, force_terminal=terminal.is_terminal)
    with wide.capture() as captured:
        wide.print(grid, width=terminal.width if terminal.is_terminal else None)
    for line in captured.get().splitlines():
        text = Text.from_ansi(line)
        text.rstrip()
        terminal.print(text)


def _num_fitting(grid: Table, width: int) -> int:
    """Return how many columns fit at their least widths, with `…` for the others; 1 at least."""
    ends = accumulate((column.min_width or 0) + 2 for column in grid.columns)  # with two spaces
    last = len(grid.columns)
    room = [number for number, end in enumerate(ends, 1) if end - 2 <= width - 3 * (number < last)]
    return max(room, default=1)


def _cell(value: object, *, wraps: bool = False) -> Text:
    text = value if isinstance(value, Text) else Text(visible(" ".join(str(value).split())))
    text.no_wrap, text.overflow = not wraps, "fold" if wraps else "ellipsis"
    return text


def ago(moment_ms: int) -> str:
    """Return a past time such as `12 s ago`."""
    return f"{seconds(time.time() * 1000 - moment_ms)} ago" if moment_ms else "–"


def seconds(milliseconds: float) -> str:
    """Return a duration such as `0.35 s`, `12.0 s`, `3 min`, `2 h` or `5 d`."""
    value = max(0.0, milliseconds / 1000)
    for limit, unit in ((120.0, "s"), (120.0, "min"), (48.0, "h")):
        if value < limit:
            return f"{value:.2f} {unit}" if unit == "s" and value < 10 else f"{value:.0f} {unit}"
        value /= 60.0 if unit != "h" else 24.0
    return f"{value:.0f} d"


def clock(moment_ms: int) -> str:
    """Return a time in the local zone, to the second."""
    return (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment_ms / 1000)) if moment_ms else "–"
    )


def show_list(
    found: Sequence[Any],
    columns: Sequence[str | tuple[str, str]],
    row: Callable[[Any], Sequence[Any]],
    noun: str,
    *,
    json: bool,
) -> None:
    """Print what a command lists: a table, or that there is none; or JSON."""
    if json:
        emit(found)
    elif found:
        table(columns, map(row, found))
    else:
        err().print(f"[dim]no {noun}s[/dim]")


def redrive_all(
    call: Callable[[Sequence[str] | None], Sequence[str]],
    asked: Sequence[str] | None,
    noun: str,
    *,
    everything: bool,
    json: bool,
) -> None:
    """Redrive what was asked for, and print which was. Exits with 1 if one was not dead."""
    if bool(asked) == everything:
        raise InvalidRequest([f"give the ids of {noun}s, or --all"])
    revived = list(call(asked or None))
    missing = [name for name in asked or () if name not in revived]
    if json:
        emit({"redriven": revived, "not_dead": missing})
    else:
        say("".join(f"{name} redriven\n" for name in revived))
        say("".join(f"{name} is not a dead {noun}\n" for name in missing))
        if everything and not revived:
            err().print(f"[dim]no dead {noun}s[/dim]")
    if missing:
        raise typer.Exit(1)
