"""Reads from a tool's schema which arguments a call may name, where each is written by itself.

The grammar and the parser both ask here, so that they agree about which value is a plain text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_NAME: Final = re.compile(r"[\w.-]+")
_READ: Final = frozenset({
    "type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema",
    "title", "description",
})  # fmt: skip
_MAX_COUNT: Final = 1_000  # longer texts would make the grammar too large


@dataclass(frozen=True, slots=True)
class NamedArgument:
    """One argument. `is_text`: its value is a text. `choices`: the only texts that it may be.
    `schema` keeps the names that its references lead to.
    """

    name: str
    schema: Any
    is_required: bool
    is_text: bool
    choices: tuple[str, ...] = ()

    @property
    def lengths(self) -> tuple[int, int | None]:
        """The least and the greatest length of the text that a grammar can bind."""
        least = int(self.schema.get("minLength", 0))
        most = self.schema.get("maxLength")
        is_bound = most is not None and most <= _MAX_COUNT
        return (least if least <= _MAX_COUNT else 0), (int(most) if is_bound else None)

    @property
    def unbound(self) -> list[str]:
        """The keywords that do not bind the text where it is written without quotes."""
        if not self.is_text or self.choices:
            return []
        least, most = self.schema.get("minLength", 0), self.schema.get("maxLength")
        is_cut = (least, most) != self.lengths
        limits = {"minLength", "maxLength"} if is_cut else set[str]()
        return sorted(self.schema.keys() & {"pattern", "format", *limits})


def named_arguments(schema: Mapping[str, Any]) -> list[NamedArgument]:
    """Return the arguments in the order in which a call has them: that of the schema.

    Raises ValueError for arguments that cannot be written.
    """
    root = _root(schema)
    properties, required = root.get("properties", {}), root.get("required", ())
    if not properties and root.keys() & {"allOf", "anyOf", "oneOf", "$ref"}:
        raise ValueError("are not named under 'properties', as this model's form needs them")
    shared = {name: schema[name] for name in ("$schema", "$defs", "definitions") if name in schema}
    found = []
    for name in dict.fromkeys((*properties, *required)):
        if not _NAME.fullmatch(name):
            raise ValueError(f"have an argument {name[:64]!r}, which this model's form cannot name")
        own = _resolved(properties.get(name, {}), schema)
        choices = own.get("enum", [own["const"]] if "const" in own else [])
        is_choice = bool(choices) and all(isinstance(value, str) for value in choices)
        found.append(
            NamedArgument(
                name,
                {**own, **shared},
                name in required,
                is_choice or own.get("type") in ("string", ["string"]),
                tuple(choices) if is_choice else (),
            )
        )
    return found


def unenforced(schema: Mapping[str, Any], *, has_plain_texts: bool) -> list[str]:
    """Return the keywords of a schema that do not bind arguments which are written one by one."""
    found = sorted(_root(schema).keys() - _READ)
    if has_plain_texts:
        for argument in named_arguments(schema):
            found += argument.unbound
    return found


def _root(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the object; one that is a reference alone leads to it."""
    bare = {key: value for key, value in schema.items() if key in ("$ref", "title", "description")}
    target = _resolved(bare, schema)
    return dict(schema) if "$ref" not in bare or "$ref" in target else target


def _resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that references to definitions of the same document lead to."""
    seen: set[str] = set()
    while isinstance(schema, Mapping) and isinstance(reference := schema.get("$ref"), str):
        kind, _, name = reference.removeprefix("#/").partition("/")
        target = root.get(kind, {}).get(name) if kind in ("$defs", "definitions") else None
        if target is None or reference in seen or schema.keys() - {"$ref", "title", "description"}:
            break
        seen.add(reference)
        schema = target
    return dict(schema) if isinstance(schema, Mapping) else {} if schema is True else {"not": {}}
