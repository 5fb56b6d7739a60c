"""Negates schemas: the complement admits exactly what a schema refuses, where draft 2020-12 can
express it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tokenmill_worker.engines.own.sampling.grammar.json_schema.keywords import (
    COUNTS,
    LISTS,
    MAPS,
    NUMBERS,
    SINGLE,
    TYPES,
    Schema,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema.patterns import other_than

MAX_DEPTH = 16
Resolve = Callable[[str], Any]  # raises ValueError
_OF_COUNT = {"Length": "string", "Items": "array", "Properties": "object"}
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_ASSERTIONS = {
    *MAPS, *LISTS, *SINGLE, *COUNTS, *NUMBERS, "type", "const", "enum", "required", "pattern",
    "format", "uniqueItems",
    "dependentRequired", "dependencies", "$ref", "$dynamicRef",
} - {"$defs", "definitions", "then", "else"}  # fmt: skip


class Inexpressible(ValueError):
    """No schema admits exactly what this one refuses."""


def complement(schema: Any, resolve: Resolve, depth: int = 0) -> Schema:
    """Return the complement of a schema; raises Inexpressible."""
    if depth > MAX_DEPTH:
        raise Inexpressible
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        raise Inexpressible
    parts = [
        part
        for key in schema
        if key in _ASSERTIONS
        for part in _without(schema, key, resolve, depth)
    ]
    return {"anyOf": parts} if parts else False


def _without(schema: dict[str, Any], key: str, resolve: Resolve, depth: int) -> Iterator[Schema]:
    """Yield schemas of the values that one keyword refuses."""
    value = schema[key]
    if key in _OPPOSITES:
        yield {"type": "number", _OPPOSITES[key]: value}
    elif key in COUNTS:
        yield from _other_counts(key, value)
    elif key in _READERS:
        yield from _READERS[key](value, resolve, depth)
    else:
        raise Inexpressible


def _other_counts(key: str, value: Any) -> Iterator[Schema]:
    if not isinstance(value, int | float):
        raise Inexpressible
    of = _OF_COUNT[key[3:]]
    if key.startswith("max"):
        yield {"type": of, "min" + key[3:]: int(value) + 1}
    elif value >= 1:
        yield {"type": of, "max" + key[3:]: int(value) - 1}


def _other_types(value: Any, _resolve: Resolve, _depth: int) -> Iterator[Schema]:
    given = {value} if isinstance(value, str) else set(value)
    if "integer" in given and "number" not in given:
        raise Inexpressible
    if rest := [name for name in TYPES if name not in given]:
        yield {"type": rest}


def _other_values(values: Any, _resolve: Resolve, _depth: int) -> Iterator[Schema]:
    if not isinstance(values, list):
        raise Inexpressible
    yield {"allOf": [_other_value(value) for value in values]}


def _other_value(value: Any) -> Schema:
    if isinstance(value, bool):
        return {"anyOf": [_not_of("boolean"), {"const": not value}]}
    if value is None:
        return _not_of("null")
    if isinstance(value, int | float):
        beside = [
            {"type": "number", "exclusiveMinimum": value},
            {"type": "number", "exclusiveMaximum": value},
        ]
        return {"anyOf": [_not_of("number"), *beside]}
    pattern = other_than(value) if isinstance(value, str) else None
    if pattern is None:
        raise Inexpressible
    return {"anyOf": [_not_of("string"), {"type": "string", "pattern": pattern}]}


def _not_of(kind: str) -> dict[str, Any]:
    return {"type": [name for name in TYPES if name != kind]}


def _without_names(names: Any, _resolve: Resolve, _depth: int) -> Iterator[Schema]:
    for name in names:
        yield {"type": "object", "properties": {name: False}}


def _other_properties(properties: Any, resolve: Resolve, depth: int) -> Iterator[Schema]:
    for name, inner in properties.items():
        yield {
            "type": "object",
            "required": [name],
            "properties": {name: complement(inner, resolve, depth + 1)},
        }


def _none_of(schemas: Any, resolve: Resolve, depth: int) -> Iterator[Schema]:
    yield {"allOf": [complement(inner, resolve, depth + 1) for inner in schemas]}


def _not_all(schemas: Any, resolve: Resolve, depth: int) -> Iterator[Schema]:
    for inner in schemas:
        yield complement(inner, resolve, depth + 1)


def _inner(schema: Any, _resolve: Resolve, _depth: int) -> Iterator[Schema]:
    yield schema


def _referred(reference: Any, resolve: Resolve, depth: int) -> Iterator[Schema]:
    try:
        target = resolve(reference)
    except ValueError:
        raise Inexpressible from None
    yield complement(target, resolve, depth + 1)


def _only_true(schema: Any, _resolve: Resolve, _depth: int) -> Iterator[Schema]:
    if schema not in (True, {}):
        raise Inexpressible
    yield from ()


_READERS: dict[str, Callable[[Any, Resolve, int], Iterator[Schema]]] = {
    "type": _other_types,
    "enum": _other_values,
    "const": lambda value, resolve, depth: _other_values([value], resolve, depth),
    "required": _without_names,
    "properties": _other_properties,
    "anyOf": _none_of,
    "allOf": _not_all,
    "not": _inner,
    "$ref": _referred,
    "additionalProperties": _only_true,
    "items": _only_true,
    "unevaluatedProperties": _only_true,
    "unevaluatedItems": _only_true,
}
