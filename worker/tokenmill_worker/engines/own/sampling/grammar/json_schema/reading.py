"""Reads one schema: expresses each keyword by those that the grammar compiler enforces."""

from __future__ import annotations

from typing import Any

from tokenmill_worker.engines.own.sampling.grammar.json_schema import references
from tokenmill_worker.engines.own.sampling.grammar.json_schema.complement import (
    Inexpressible,
    complement,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema.context import RewriteContext
from tokenmill_worker.engines.own.sampling.grammar.json_schema.keywords import (
    COUNTS,
    LISTS,
    NUMBERS,
    Schema,
    escaped,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema.names import objects_with
from tokenmill_worker.engines.own.sampling.grammar.json_schema.patterns import (
    PatternProblem,
    translated,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema.unevaluated import (
    KEYWORDS as UNEVALUATED,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema.unevaluated import (
    without_unevaluated,
)

_COPIED = (*NUMBERS, "type", "enum", "const", "required")
# The compiler reads numbers as floats: larger ones are not exact, and near -2^63 it crashes.
_MAX_NUMBER = 2**53
_ENFORCED_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_FORMAT_PATTERNS = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
}
_OTHER_FORMATS = frozenset(
    ("idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template", "regex")
)


def read(
    context: RewriteContext, place: references.Place, depth: int = 0, *, is_same_value: bool = True
) -> Schema:
    """Return the rewritten schema of a place; `is_same_value`: of the value that the root or a
    referenced schema describes.
    """
    context.count(depth)
    schema = place.schema
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        context.problem("a value", "that is no schema", place.pointer)
        return True
    base = context.resources.base_of(place.pointer, place.base)
    place = references.Place(schema, place.pointer, base)
    return SchemaReader(context, place, depth, is_same_value).read()


class SchemaReader:
    """One schema with keywords; results are collected in `out`, and additional schemas in
    `parts`.
    """

    def __init__(
        self, context: RewriteContext, place: references.Place, depth: int, is_same_value: bool
    ) -> None:
        self.context, self.place = context, place
        self.depth, self.is_same_value = depth, is_same_value
        self.given: dict[str, Any] = place.schema
        self.out: dict[str, Any] = {}
        self.parts: list[Any] = []

    def read(self) -> Schema:
        if any(self.given.get(key, True) is not True for key in UNEVALUATED):
            try:
                self.given = without_unevaluated(self.given, self._resolve)
            except (Inexpressible, AttributeError, TypeError):
                for key in UNEVALUATED:
                    if self.given.get(key, True) is not True:
                        self._problem(key, "is not supported")
        for read in (
            self._plain,
            self._texts,
            self._objects,
            self._arrays,
            self._alternatives,
            self._references,
        ):
            try:
                read()
            except (AttributeError, TypeError, ValueError):
                self.context.problem("a keyword", "has a value of a wrong type", self.place.pointer)
        if self.parts:
            self.out["allOf"] = [*self.out.get("allOf", ()), *self.parts]
        return self.out

    # ── helpers ──

    def _problem(self, keyword: str, why: str) -> None:
        self.context.problem(f"{keyword!r}", why, f"{self.place.pointer}/{keyword}")

    def _inner(self, schema: Any, steps: str, *, is_same_value: bool = False) -> Schema:
        same = is_same_value and self.is_same_value
        place = references.Place(schema, self.place.pointer + steps, self.place.base)
        return read(self.context, place, self.depth + 1, is_same_value=same)

    def _resolve(self, reference: str) -> Any:
        """Return the target of a reference for expansion here; its own references must have the
        same base.
        """
        self.context.count(0)
        target = self.context.target(reference, self.place.base, dynamic=True)
        if target.base != self.place.base:
            raise references.Unresolved("it leads into another resource")
        return target.schema

    def _same(self, schema: Any, keyword: str) -> None:
        """Add another schema for the same value, which may use any keyword."""
        self.parts.append(self._inner(schema, f"/{keyword}", is_same_value=True))

    def _negated(self, schema: Any) -> Schema:
        return complement(schema, self._resolve)

    # ── values ──

    def _plain(self) -> None:
        for key in _COPIED:
            if key not in self.given:
                continue
            value = self.given[key]
            if key in NUMBERS and abs(value) > _MAX_NUMBER:
                self._problem(key, "is beyond ±2^53, which is not supported")
            elif key == "multipleOf" and not self.context.takes_multiple(value):
                self._problem(key, "needs too large a grammar; try a smaller or rounder number")
            else:
                self.out[key] = value
        for key in COUNTS:
            if key in self.given:
                self.out[key] = int(self.given[key])

    def _texts(self) -> None:
        if (
            "pattern" in self.given
            and (pattern := self._pattern(self.given["pattern"], "pattern")) is not None
        ):
            self.out["pattern"] = pattern
            if self.given["pattern"] in self.context.written:
                self.context.given_patterns.add(pattern)
        name = self.given.get("format")
        if name in _FORMAT_PATTERNS:
            self.parts.append({"pattern": translated(_FORMAT_PATTERNS[name])})
        elif name in _OTHER_FORMATS:
            self._problem("format", f"{name!r} is not supported")
        elif name in _ENFORCED_FORMATS:
            self.out["format"] = name

    def _pattern(self, pattern: str, keyword: str) -> str | None:
        try:
            return translated(pattern)
        except PatternProblem as problem:
            self._problem(keyword, f"is not supported: {problem}")
            return None

    # ── objects ──

    def _objects(self) -> None:
        for key in ("properties", "patternProperties"):
            if key in self.given:
                self._members(key)
        if "additionalProperties" in self.given:
            self.out["additionalProperties"] = self._inner(
                self.given["additionalProperties"], "/additionalProperties"
            )
        for name, names in self.given.get("dependentRequired", {}).items():
            self._dependent(name, {"required": names}, "dependentRequired")
        for name, inner in self.given.get("dependentSchemas", {}).items():
            self._dependent(name, inner, "dependentSchemas")
        for name, inner in self.given.get("dependencies", {}).items():  # of earlier drafts
            self._dependent(
                name, {"required": inner} if isinstance(inner, list) else inner, "dependencies"
            )
        if self.given.get("propertyNames", True) not in (True, {}):
            self._property_names(self.given["propertyNames"])

    def _members(self, key: str) -> None:
        held = {}
        for name, inner in self.given[key].items():
            shown = name if key == "properties" else self._pattern(name, key)
            if shown is not None:
                held[shown] = self._inner(inner, f"/{key}/{escaped(name)}")
        self.out[key] = held

    def _dependent(self, name: str, inner: Any, keyword: str) -> None:
        present = {"allOf": [{"required": [name]}, inner]}
        self._same({"anyOf": [{"properties": {name: False}}, present]}, keyword)

    def _property_names(self, names: Any) -> None:
        try:
            allowed = objects_with(names, self._resolve)
        except Inexpressible:
            self._problem("propertyNames", "is not supported with these keywords")
            return
        self._same(allowed, "propertyNames")

    # ── arrays ──

    def _arrays(self) -> None:
        items, prefix = self.given.get("items", True), self.given.get("prefixItems", ())
        if prefix:
            self.out["prefixItems"] = [
                self._inner(inner, f"/prefixItems/{i}") for i, inner in enumerate(prefix)
            ]
        if items is not True:
            self.out["items"] = self._inner(items, "/items")
        if self.given.get("uniqueItems") and self.given.get("maxItems", 2) > 1:
            self._problem("uniqueItems", "is not supported")
        if "contains" in self.given:
            self._contains(
                self.given["contains"],
                self.given.get("minContains", 1),
                self.given.get("maxContains"),
            )

    def _contains(self, inner: Any, least: int, most: int | None) -> None:
        if inner in (True, {}):
            self.parts.append(
                {"minItems": int(least), **({} if most is None else {"maxItems": int(most)})}
            )
        elif least <= 0 and most is None:
            return
        elif most is not None and most < least:
            self.parts.append(
                self._inner({"not": {"type": "array"}}, "/contains", is_same_value=True)
            )
        elif inner is False:
            if least > 0:
                self.parts.append(
                    self._inner({"not": {"type": "array"}}, "/contains", is_same_value=True)
                )
        else:
            self._problem("contains", "is not supported")

    # ── several schemas for one value ──

    def _alternatives(self) -> None:
        for key in LISTS[:3]:
            if key in self.given and not (key == "oneOf" and self._written_out(self.given[key])):
                self.out[key] = [
                    self._inner(inner, f"/{key}/{i}", is_same_value=True)
                    for i, inner in enumerate(self.given[key])
                ]
        try:
            if "not" in self.given:
                self._same(self._negated(self.given["not"]), "not")
        except Inexpressible:
            self._problem("not", "is not supported with these keywords")
        if "if" in self.given and ("then" in self.given or "else" in self.given):
            self._conditional(
                self.given["if"], self.given.get("then", True), self.given.get("else", True)
            )

    def _written_out(self, branches: list[Any]) -> bool:
        if not self.context.expand_one_of:
            return False
        try:
            others = [self._negated(inner) for inner in branches]
        except Inexpressible:
            return False
        exact = [
            {"allOf": [inner, *(other for j, other in enumerate(others) if j != i)]}
            for i, inner in enumerate(branches)
        ]
        self._same({"anyOf": exact}, "oneOf")
        return True

    def _conditional(self, condition: Any, then: Any, otherwise: Any) -> None:
        try:
            fails = self._negated(condition)
        except Inexpressible:
            self._problem("if", "is not supported with these keywords")
            return
        self._same({"anyOf": [{"allOf": [condition, then]}, {"allOf": [fails, otherwise]}]}, "if")

    def _references(self) -> None:
        found = []
        for key in ("$ref", "$dynamicRef"):
            if key not in self.given:
                continue
            reference = self.given[key]
            try:
                target = self.context.target(reference, self.place.base, key == "$dynamicRef")
            except references.Unresolved as problem:
                self._problem(key, f"to {str(reference)[:100]!r} is not supported: {problem}")
            else:
                found.append(self.context.referred(target, self.is_same_value))
        if len(found) == 1:
            self.out |= found[0]
        else:
            self.parts += found
