"""Makes the tables of the pages on engines: abilities of the kinds, structs of the protocol."""

from __future__ import annotations

import inspect
import re

import msgspec

from tokenmill_worker.contract.capabilities import STRUCTURED, Capabilities
from tokenmill_worker.contract.events import Capacity, EngineStats, TokenEvent
from tokenmill_worker.contract.messages import (
    CancelRequest,
    EngineFailed,
    Frame,
    LoadProgress,
    Logged,
    Ready,
    Start,
    Stop,
    Submit,
)
from tokenmill_worker.contract.requests import GenerationRequest, MediaSpan, Prompt, Thoughts
from tokenmill_worker.engines import KINDS, kind_named
from tokenmill_worker.local.parameter_table import parameter_rows

STRUCTS: tuple[type[msgspec.Struct], ...] = (
    Start, Submit, CancelRequest, Stop, LoadProgress, Logged, Ready, Frame, EngineFailed,
    GenerationRequest, Prompt, MediaSpan, Thoughts, TokenEvent, Capacity, EngineStats, Capabilities,
)  # fmt: skip


def kinds_table() -> str:
    """Return what each kind of engine can do: a row an ability, a column a kind."""
    columns = [_abilities(kind_named(kind).capabilities) for kind in KINDS]
    meanings = meanings_of(Capabilities)
    lines = [f"| ability | | {' | '.join(KINDS)} |", "|---" * (2 + len(KINDS)) + "|"]
    for name in columns[0]:
        meaning = meanings["structured" if "." in name else name]
        cells = [f"`{name}`", meaning, *(column[name] or "–" for column in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parameters_table(kind: str) -> str:
    """Return what an engine does differently with the parameters of a job."""
    rows = [row for row in parameter_rows(kind_named(kind)) if row.is_different]
    lines = [f"| parameter | the queue takes | {kind} | what happens |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {' | '.join(cells)} |" for name, *cells in rows)])


def meanings_of(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the comment behind each field that has one."""
    found = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(struct), re.MULTILINE)
    return dict(found)


def _abilities(found: Capabilities) -> dict[str, str]:
    words, fields = set(found.words()), msgspec.structs.asdict(found)
    names = [f"response_format.{form}" for form in STRUCTURED]
    names += [name for name, value in fields.items() if isinstance(value, bool)]
    cells = {name: "yes" if name in words else "" for name in names}
    lists = {"media": found.media, "unavailable": found.unavailable}
    lists["limits"] = tuple(found.words_of_limits())
    return cells | {name: ", ".join(values) for name, values in lists.items()}
