"""The table of `ops/guides/models.md`: families by what the engine makes of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ops.model_families.trial import Trial

BEGIN = "<!-- written by ops/families --write -->"
END = "<!-- end of what ops/families writes -->"


def rendered(results: Iterable[Trial]) -> str:
    """Equal ones in one row; refused ones by their sentence, the model's name and numbers left out."""
    equal: list[str] = []
    others: dict[str, list[str]] = {}
    for result in results:
        if result.verdict == "equal":
            equal.append(result.name)
        else:
            others.setdefault(f"{result.verdict}: {_general(result.reason)}", []).append(result.name)
    rows = [f"| same tokens as `generate` | {_joined(equal)} |"] if equal else []
    rows += [f"| {reason} | {_joined(names)} |" for reason, names in sorted(others.items())]
    return "\n".join(["| | families (and a setting that differs from the family's default) |", "|---|---|", *rows])


def replaced(guide: str, text: str) -> str:
    """The guide with its table in place of the one between the markers."""
    before, rest = guide.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def current(guide: str) -> str:
    """The table that stands between the markers."""
    return guide.split(BEGIN)[1].split(END)[0].strip()


def _general(reason: str) -> str:
    """Of several sentences the first; numbers as `n`, so that families with one cause share a row."""
    first = reason.split("; MODEL")[0].replace("MODEL cannot be served: ", "").replace("|", "\\|")
    return re.sub(r"\b\d+(\.\d+)?(e-?\d+)?\b", "n", first)


def _joined(names: Iterable[str]) -> str:
    return " · ".join(sorted(names))
