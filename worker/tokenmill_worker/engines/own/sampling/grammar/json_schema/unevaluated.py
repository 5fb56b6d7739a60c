"""Rewrites `unevaluatedProperties` and `unevaluatedItems` with `additionalProperties` and `items`.

Which members they refuse depends on which of the adjacent schemas the value matches. So those
schemas are expanded into alternatives, and each alternative fixes which members are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from tokenmill_worker.engines.own.sampling.grammar.json_schema.complement import Inexpressible

MAX_ALTERNATIVES = 32
_MAX_DEPTH = 16
APPLICATORS = (
    "$ref",
    "$dynamicRef",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "then",
    "else",
    "not",
    "dependentSchemas",
)
KEYWORDS = ("unevaluatedProperties", "unevaluatedItems")
Resolve = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class _Alternative:
    """Schemas that a value of one alternative matches.

    `seen` schemas evaluate its members; `silent` ones only assert. No `seen` schema applies other
    schemas in place.
    """

    seen: tuple[dict[str, Any], ...] = ()
    silent: tuple[Any, ...] = ()

    def with_(self, other: _Alternative) -> _Alternative:
        return _Alternative(self.seen + other.seen, self.silent + other.silent)


def without_unevaluated(schema: dict[str, Any], resolve: Resolve) -> dict[str, Any]:
    """Return an equal schema that has neither keyword at its top; raises Inexpressible."""
    wanted = {key: schema[key] for key in KEYWORDS if key in schema and schema[key] is not True}
    rest = {key: value for key, value in schema.items() if key not in KEYWORDS}
    if not wanted:
        return rest
    found = [_closed(alternative, wanted) for alternative in _alternatives(rest, resolve, 0)]
    return found[0] if len(found) == 1 else {"anyOf": found}


def _closed(alternative: _Alternative, wanted: dict[str, Any]) -> dict[str, Any]:
    parts: list[Any] = [*alternative.seen, *alternative.silent]
    if "unevaluatedProperties" in wanted:
        parts += _closed_object(alternative.seen, wanted["unevaluatedProperties"])
    if "unevaluatedItems" in wanted:
        parts += _closed_array(alternative.seen, wanted["unevaluatedItems"])
    return {"allOf": parts}


def _closed_object(seen: Iterable[dict[str, Any]], others: Any) -> list[Any]:
    if any(
        "additionalProperties" in schema or "unevaluatedProperties" in schema for schema in seen
    ):
        return []
    names = {name for schema in seen for name in schema.get("properties", {})}
    patterns = {pattern for schema in seen for pattern in schema.get("patternProperties", {})}
    return [
        {
            "properties": dict.fromkeys(sorted(names), True),
            **({"patternProperties": dict.fromkeys(sorted(patterns), True)} if patterns else {}),
            "additionalProperties": others,
        }
    ]


def _closed_array(seen: Iterable[dict[str, Any]], others: Any) -> list[Any]:
    if any("items" in schema or "unevaluatedItems" in schema for schema in seen):
        return []
    if any("contains" in schema for schema in seen):
        raise Inexpressible
    longest = max((len(schema.get("prefixItems", ())) for schema in seen), default=0)
    return [{**({"prefixItems": [True] * longest} if longest else {}), "items": others}]


def _alternatives(schema: Any, resolve: Resolve, depth: int) -> list[_Alternative]:
    if schema is False:
        return []
    if schema is True:
        return [_Alternative()]
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        raise Inexpressible
    own = {key: value for key, value in schema.items() if key not in APPLICATORS}
    if any(key in own for key in KEYWORDS):  # everything is evaluated, whatever the other keywords
        return [
            _Alternative(seen=({key: True for key in KEYWORDS if key in own},), silent=(schema,))
        ]
    found = [_Alternative(seen=(own,))]
    for part in _parts(schema, resolve, depth + 1):
        if len(found) * len(part) > MAX_ALTERNATIVES:
            raise Inexpressible
        found = [one.with_(other) for one in found for other in part]
    return found


def _parts(schema: dict[str, Any], resolve: Resolve, depth: int) -> Iterable[list[_Alternative]]:
    """Yield, for each keyword that applies schemas in place, the alternatives of a value that it
    admits.
    """
    for key in ("$ref", "$dynamicRef"):
        if key in schema:
            try:
                target = resolve(schema[key])
            except ValueError:
                raise Inexpressible from None
            yield _alternatives(target, resolve, depth)
    for inner in schema.get("allOf", ()):
        yield _alternatives(inner, resolve, depth)
    if "anyOf" in schema:
        yield _some_of([_alternatives(inner, resolve, depth) for inner in schema["anyOf"]])
    if "oneOf" in schema:
        only = _Alternative(silent=({"oneOf": schema["oneOf"]},))
        yield [
            only.with_(one)
            for inner in schema["oneOf"]
            for one in _alternatives(inner, resolve, depth)
        ]
    if "not" in schema:
        yield [_Alternative(silent=({"not": schema["not"]},))]
    if "if" in schema:
        fails = _Alternative(silent=({"not": schema["if"]},))
        passes = _alternatives(schema["if"], resolve, depth)
        then = _alternatives(schema.get("then", True), resolve, depth)
        otherwise = _alternatives(schema.get("else", True), resolve, depth)
        yield [one.with_(two) for one in passes for two in then] + [
            fails.with_(one) for one in otherwise
        ]
    for name, inner in schema.get("dependentSchemas", {}).items():
        absent = _Alternative(silent=({"properties": {name: False}},))
        present = _Alternative(silent=({"required": [name]},))
        yield [absent, *(present.with_(one) for one in _alternatives(inner, resolve, depth))]


def _some_of(branches: list[list[_Alternative]]) -> list[_Alternative]:
    """Return one alternative for each choice of branches, since every branch that matches evaluates
    members.
    """
    if len(branches) > 4:
        raise Inexpressible
    found: list[_Alternative] = []
    for count in range(1, len(branches) + 1):
        for chosen in combinations(branches, count):
            product = [_Alternative()]
            for branch in chosen:
                product = [one.with_(other) for one in product for other in branch]
            found += product
    return found
