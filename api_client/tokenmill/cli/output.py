"""The output of commands: answers on stdout, everything else on stderr; tables for people, JSON for
programs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

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


def out() -> Console:
    """Return a console on stdout, a new one each time, because tests and pipes may have replaced
    stdout.
    """
    return Console(highlight=False, soft_wrap=True)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 job`, `2 jobs`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def err() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def complain(sentence: str, kind: str = "error") -> None:
    """Print `Error: …` on stderr, in one line."""
    line = Text(f"{kind.capitalize()}: ", style="bold red" if kind == "error" else "bold yellow")
    err().print(line.append(sentence, style="not bold default"))


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
    answers.
    """
    data = msgspec.json.encode(value)
    sys.stdout.write((data if line else msgspec.json.format(data, indent=2)).decode() + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Print plain text on stdout, without markup."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say_dimmed(text: str) -> None:
    """Print plain text on stdout, dimmed where it is a terminal."""
    out().print(Text(text, style="dim"), end="")
    sys.stdout.flush()


def state(value: str) -> Text:
    return Text(value, style=STATE_STYLES.get(value, ""))


def table(
    columns: Sequence[str | tuple[str, str]], rows: Iterable[Sequence[Any]], *, notes: bool = False
) -> None:
    """Print a table. Columns are titles, or (title, justification).

    Nothing is cut, so that ids can be copied; a long line wraps. With `notes`, the last column is
    prose, of which a terminal shows the first 60 characters.
    """
    is_terminal = out().is_terminal
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        title, justify = (column, "left") if isinstance(column, str) else column
        grid.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        cells = [
            cell if isinstance(cell, Text) else Text(" ".join(str(cell).split())) for cell in row
        ]
        if notes and is_terminal:
            cells[-1].truncate(60, overflow="ellipsis")
        grid.add_row(*cells)
    wide = Console(highlight=False, width=10_000, force_terminal=is_terminal)
    with wide.capture() as captured:
        wide.print(grid)
    say("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


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


def show_redriven(revived: Sequence[str], asked: Sequence[str], noun: str, *, json: bool) -> bool:
    """Print what was redriven, and which of the ids asked for was not. Return whether all of them
    were.
    """
    missing = [name for name in asked if name not in revived]
    if json:
        emit({"redriven": revived, "not_dead": missing})
        return not missing
    for name in revived:
        say(f"{name} redriven\n")
    for name in missing:
        say(f"{name} is not a dead {noun}\n")
    if not asked and not revived:
        err().print(f"[dim]no dead {noun}s[/dim]")
    return not missing
