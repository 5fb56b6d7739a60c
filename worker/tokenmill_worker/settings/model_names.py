"""The names by which jobs may call what a worker serves, and the chat template that replaces the
model's own.

Both are checked at the start, so that no job fails because of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenmill_worker.contract.name_table import read_table


def read_aliases(text: str) -> dict[str, str]:
    """Parse `name=target` pairs. Raises ValueError."""
    return read_table(text, "name=target")


def read_template(path: str | None) -> str | None:
    """Read the chat template, None without a path. Raises OSError, UnicodeDecodeError."""
    return None if path is None else Path(path).expanduser().read_text("utf-8")


def naming_problems(
    names: set[str], adapters: str, aliases: str, template: str | None
) -> Iterator[tuple[str, str]]:
    """Yield (setting, problem) for each problem; `names` are the model's own."""
    yield from _template_problems(template)
    try:
        named = set(read_table(adapters, "name=folder"))
    except ValueError:  # reported with the engine's settings
        return
    yield from (
        ("adapters", f"must not take the model's own name {name!r}")
        for name in sorted(named & names)
    )
    try:
        table = read_aliases(aliases)
    except ValueError as error:
        yield "aliases", str(error)
        return
    for name, target in table.items():
        if target not in named | names:
            yield (
                "aliases",
                f"leads {name!r} to {target!r}; there are {', '.join(sorted(named | names))}",
            )


def _template_problems(path: str | None) -> Iterator[tuple[str, str]]:
    try:
        if read_template(path) == "":
            yield "chat_template", f"is an empty file: {path}"
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
        yield "chat_template", f"cannot be read: {path}: {reason}"
