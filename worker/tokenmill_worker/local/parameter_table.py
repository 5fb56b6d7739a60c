"""Makes the table of what an engine does with each parameter of a job, for `tokenmill doctor` and
the guides, from what decides: the bounds that are checked, the engine's abilities and its notes.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import Priority
from tokenmill_schemas.params_validation import MAX_CHOICES, rules
from tokenmill_schemas.size_limits import MAX_TOOLS
from tokenmill_worker.contract.capabilities import STRUCTURED
from tokenmill_worker.contract.engine_kind import EngineKind

# what a job sets beside its sampling parameters, with what the queue takes
OF_A_JOB: Final = {
    "prompt": "a text, messages, or token ids",
    "tools": f"{MAX_TOOLS} at most",
    "continuations": f"{MAX_CHOICES} at most",
    "priority": ", ".join(item.name.lower() for item in Priority),
    "tenant": "a name",
    "deadline_ms": "a time",
}
SAME: Final = "the same"


class ParameterRow(NamedTuple):
    """A parameter, what the queue takes, what the engine takes, and what happens."""

    name: str
    ours: str
    theirs: str
    happens: str

    @property
    def is_different(self) -> bool:
        return self.theirs != SAME or bool(self.happens)


def parameter_rows(kind: EngineKind) -> list[ParameterRow]:
    """Return a row for each parameter that a job can set."""
    bounds, limits = rules(), kind.capabilities.limits
    lacking = kind.capabilities.lacking()
    ours = {
        field.name: bounds.get(field.name, "true or false" if field.type is bool else "")
        for field in msgspec.structs.fields(SamplingParams)
    }
    rows = []
    for name, words in {**ours, **OF_A_JOB}.items():
        theirs, happens = SAME, kind.notes.get(name, "")
        forms = [form for form in STRUCTURED if f"{name}.{form}" in lacking]
        if name in lacking or len(forms) == len(STRUCTURED):
            theirs, happens = "–", "refused by name"
        elif forms:
            happens = f"refused by name: {', '.join(forms)}"
        elif name in limits:
            theirs = "from {:g} to {:g}".format(*limits[name])
        elif f"{name} with log-probabilities" in lacking:
            happens = "refused with log-probabilities"
        rows.append(ParameterRow(name, words, theirs, happens))
    return rows
