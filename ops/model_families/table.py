"""Writes the table of `ops/guides/models.md`: families by how the engine serves them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ops.model_families.trial import Trial

BEGIN = "<!-- written by ops/families --write -->"
END = "<!-- end of what ops/families writes -->"


def rendered(results: Iterable[Trial]) -> str:
    """Render the table: equal families share one row, the others one row per reason."""
    equal: list[str] = []
    others: dict[str, list[str]] = {}
    for result in results:
        if result.outcome == "equal":
            equal.append(result.name)
        else:
            others.setdefault(f"{result.outcome}: {_general(result.reason)}", []).append(
                result.name
            )
    rows = [f"| same tokens as `generate` | {_joined(equal)} |"] if equal else []
    rows += [f"| {reason} | {_joined(names)} |" for reason, names in sorted(others.items())]
    return "\n".join(
        [
            "| | families (and a setting that differs from the family's default) |",
            "|---|---|",
            *rows,
        ]
    )


def replaced(guide: str, text: str) -> str:
    """Return the guide with `text` in place of the table between the markers."""
    before, rest = guide.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def current(guide: str) -> str:
    """Return the table between the markers."""
    return guide.split(BEGIN)[1].split(END)[0].strip()


def _general(reason: str) -> str:
    """Generalise a reason so that families with one cause share a row.

    Only the first sentence stays; numbers become `n`.
    """
    first = reason.split("; MODEL")[0].replace("MODEL cannot be served: ", "").replace("|", "\\|")
    return re.sub(r"\b\d+(\.\d+)?(e-?\d+)?\b", "n", first)


def _joined(names: Iterable[str]) -> str:
    return " · ".join(sorted(names))
