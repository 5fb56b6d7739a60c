"""Keywords of draft 2020-12, grouped by the type of their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any] | bool

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = (
    *("items", "additionalProperties", "propertyNames", "contains", "not", "if", "then", "else"),
    *("unevaluatedProperties", "unevaluatedItems"),
)
TYPES = ("null", "boolean", "number", "string", "array", "object")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (JSON pointer from here, schema) for each schema directly inside."""
    for key in MAPS:
        if isinstance(held := schema.get(key), dict):
            for name, inner in held.items():
                yield f"/{key}/{escaped(name)}", inner
    for key in LISTS:
        if isinstance(listed := schema.get(key), list):
            for i, inner in enumerate(listed):
                yield f"/{key}/{i}", inner
    for key in SINGLE:
        if key in schema:
            yield f"/{key}", schema[key]


def escaped(name: object) -> str:
    """Escape a name as one step of a JSON pointer."""
    return str(name).replace("~", "~0").replace("/", "~1")
