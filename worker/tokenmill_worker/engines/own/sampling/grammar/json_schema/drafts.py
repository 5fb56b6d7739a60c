"""Tells the draft that a JSON schema is written in, and gives the same schema in draft 2020-12.

jsonschema-rs, which validates the finished answers, also decides here: a schema that it cannot read
is refused before a token is generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urldefrag

import jsonschema_rs

from tokenmill_worker.engines.own.sampling.grammar.json_schema.keywords import (
    COUNTS,
    LISTS,
    MAPS,
    NUMBERS,
    SINGLE,
    escaped,
    subschemas,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema.references import MAX_DEPTH, TooDeep

_MAX_CHARS = 200  # of a message
_NO_ALTERNATIVE = re.compile(r" is not valid under any of the schemas listed in the .*$", re.DOTALL)

_DRAFT4 = frozenset((
    "$ref", "definitions", "$defs", "type", "enum", "format", "pattern", "required", "dependencies",
    "properties", "patternProperties", "additionalProperties", "items", "additionalItems",
    "uniqueItems", "allOf", "anyOf", "oneOf", "not", *COUNTS, *NUMBERS,
))  # fmt: skip
_DRAFT6 = _DRAFT4 | {"const", "contains", "propertyNames"}
_DRAFT7 = _DRAFT6 | {"if", "then", "else"}
_DRAFT2019 = _DRAFT7 | {
    "$anchor", "dependentRequired", "dependentSchemas", "minContains", "maxContains",
    "unevaluatedProperties", "unevaluatedItems",
}  # fmt: skip
_EARLIER: dict[type, frozenset[str]] = {
    jsonschema_rs.Draft4Validator: _DRAFT4,
    jsonschema_rs.Draft6Validator: _DRAFT6,
    jsonschema_rs.Draft7Validator: _DRAFT7,
    jsonschema_rs.Draft201909Validator: _DRAFT2019,
}


class InvalidSchema(ValueError):
    """Says what is wrong with the schema, and where."""


@dataclass(frozen=True, slots=True)
class Modern:
    """A schema in draft 2020-12. `problems`: one sentence for each keyword whose meaning is
    lost.
    """

    schema: Any
    problems: tuple[str, ...]


def modern(schema: Any) -> Modern:
    """Return the schema in draft 2020-12. Raises InvalidSchema where no answer could be validated
    against it.
    """
    validator = _validator_type(schema)
    known = _EARLIER.get(validator)
    try:
        problems = dict.fromkeys(_nested_drafts(schema))
        if known is None:
            return Modern(schema, tuple(problems))
        converter = _Converter(known, problems)
        return Modern(converter.convert(schema, "", 0), tuple(problems))
    except TooDeep:
        return Modern(True, (f"the schema is nested more than {MAX_DEPTH} levels deep",))


def _validator_type(schema: Any) -> type:
    try:
        return type(jsonschema_rs.validator_for(schema, validate_formats=True, retriever=_nothing))
    except jsonschema_rs.ValidationError as error:
        raise InvalidSchema(_explained(schema, error)) from None
    except Exception as error:
        raise InvalidSchema(
            f"it cannot be read: {_shortened(str(error), type(error).__name__)}"
        ) from None


def _nothing(uri: str) -> Any:
    raise ValueError(f"{uri} is not part of the schema")


def _explained(schema: Any, error: jsonschema_rs.ValidationError) -> str:
    message = str(error.message)
    if message.startswith("Unknown meta-schema"):
        return (
            "'$schema' at /$schema names a draft that is not supported: "
            f"{str(schema['$schema'])[:_MAX_CHARS]!r}"
        )
    if message.startswith("Resource "):
        return _outside(schema, message.split("'")[1])
    steps = list(error.instance_path)
    what = _shortened(
        _NO_ALTERNATIVE.sub(" is not a value that it may have", message), "its value is not allowed"
    )
    if not steps:
        return f"{what} (at the top)"
    pointer = "".join(f"/{escaped(step)}" for step in steps)
    return f"{str(steps[-1])[:_MAX_CHARS]!r} at {pointer[:_MAX_CHARS]} is invalid: {what}"


def _outside(root: Any, uri: str) -> str:
    """Name the reference that leads to `uri`, with its place."""
    waiting = [("", root)]
    while waiting:
        pointer, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{pointer}/{i}", inner) for i, inner in enumerate(value)]
        elif isinstance(value, dict):
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                target = urldefrag(value[key]).url if isinstance(value.get(key), str) else ""
                if target and uri.endswith(target.lstrip("./")):
                    where = f"{pointer}/{key}"[:_MAX_CHARS]
                    return (
                        f"{key!r} at {where} leads to {target[:_MAX_CHARS]!r}, which is not "
                        "part of the schema"
                    )
            waiting += [(f"{pointer}/{escaped(name)}", inner) for name, inner in value.items()]
    return f"a '$ref' leads to {uri[:_MAX_CHARS]!r}, which is not part of the schema"


def _shortened(message: str, otherwise: str) -> str:
    line = message.strip().split("\n", 1)[0]
    return line if 0 < len(line) <= _MAX_CHARS else otherwise


def _nested_drafts(root: Any) -> list[str]:
    """Find schemas inside that name another draft than the whole."""
    if not isinstance(root, dict):
        return []
    own, found = str(root.get("$schema", "")).rstrip("#"), []
    waiting = [(step, inner, 1) for step, inner in subschemas(root)]
    while waiting:
        pointer, schema, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise TooDeep
        if not isinstance(schema, dict):
            continue
        if "$schema" in schema and str(schema["$schema"]).rstrip("#") != own:
            found.append(
                f"'$schema' at {pointer[:_MAX_CHARS]} is not supported: it names another draft "
                "than the top"
            )
        waiting += [(pointer + step, inner, depth + 1) for step, inner in subschemas(schema)]
    return found


class _Converter:
    """Writes the schemas of an earlier draft in draft 2020-12. Leaves out keywords that the draft
    does not know.
    """

    def __init__(self, known: frozenset[str], problems: dict[str, None]) -> None:
        self._known = known
        self._problems = problems
        self._ref_stands_alone = "$anchor" not in known

    def convert(self, schema: Any, pointer: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise TooDeep
        if not isinstance(schema, dict):
            return schema
        known = (
            {"$ref", "definitions", "$defs"}
            if self._ref_stands_alone and "$ref" in schema
            else self._known
        )
        held = {key: value for key, value in schema.items() if key in known}
        if known is self._known:
            self._identify(schema, held)
            self._bounds(held)
        if "$recursiveRef" in schema and not self._ref_stands_alone:
            self._problems[
                f"'$recursiveRef' at {pointer[:_MAX_CHARS]}/$recursiveRef is not supported"
            ] = None
        self._inner(held, lambda inner, step: self.convert(inner, pointer + step, depth + 1))
        return held

    def _identify(self, schema: dict[str, Any], held: dict[str, Any]) -> None:
        identifier = schema.get("$id" if "const" in self._known else "id")
        if isinstance(identifier, str):
            key, text = (
                ("$anchor", identifier[1:]) if identifier.startswith("#") else ("$id", identifier)
            )
            held.setdefault(key, text)

    @staticmethod
    def _bounds(held: dict[str, Any]) -> None:
        """Draft 4 has `exclusiveMinimum: true` beside `minimum`."""
        for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(held.get(exclusive), bool) and held.pop(exclusive) and bound in held:
                held[exclusive] = held.pop(bound)

    @staticmethod
    def _inner(held: dict[str, Any], convert: Callable[[Any, str], Any]) -> None:
        rest = held.pop("additionalItems", None)
        if isinstance(held.get("items"), list):
            held["prefixItems"] = [
                convert(inner, f"/items/{i}") for i, inner in enumerate(held.pop("items"))
            ]
            if rest is not None:
                held["items"] = convert(rest, "/additionalItems")
        elif "items" in held:
            held["items"] = convert(held["items"], "/items")
        for key in (*MAPS, "dependencies"):
            if key in held:
                held[key] = {
                    name: convert(inner, f"/{key}/{escaped(name)}")
                    for name, inner in held[key].items()
                }
        for key in LISTS[:3]:
            if key in held:
                held[key] = [convert(inner, f"/{key}/{i}") for i, inner in enumerate(held[key])]
        for key in SINGLE[1:]:
            if key in held:
                held[key] = convert(held[key], f"/{key}")
