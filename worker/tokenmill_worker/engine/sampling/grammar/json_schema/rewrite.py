"""Rewrites draft 2020-12 schemas with the keywords that the grammar compiler enforces.

The compiler (llguidance) merges `allOf`, `$ref` and adjacent keywords, reads constraints without
`type`, and filters `enum`. It refuses unknown keywords; these are expressed here by known ones. A
keyword that cannot be expressed is a problem, reported with its place. References become `$defs`,
so that rewriting moves no target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill_worker.engine.sampling.grammar.json_schema import references
from tokenmill_worker.engine.sampling.grammar.json_schema.complement import (
    Inexpressible,
    complement,
)
from tokenmill_worker.engine.sampling.grammar.json_schema.keywords import (
    COUNTS,
    LISTS,
    NUMBERS,
    Schema,
    escaped,
)
from tokenmill_worker.engine.sampling.grammar.json_schema.names import objects_with
from tokenmill_worker.engine.sampling.grammar.json_schema.patterns import PatternProblem, translated
from tokenmill_worker.engine.sampling.grammar.json_schema.unevaluated import KEYWORDS as UNEVALUATED
from tokenmill_worker.engine.sampling.grammar.json_schema.unevaluated import without_unevaluated

__all__ = ["Rewritten", "rewrite"]

# most that are visited: an expanded schema may be far larger than the original
MAX_SCHEMAS = 20_000
_COPIED = (*NUMBERS, "type", "enum", "const", "required")
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


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A rewritten schema.

    `problems` has one sentence per keyword that the grammar would not enforce. `places` maps each
    name in `$defs` to its place in the original schema.
    """

    schema: Any
    problems: tuple[str, ...]
    places: dict[str, str]


def rewrite(schema: Any, *, expand_one_of: bool = False) -> Rewritten:
    """Return an equal schema; if there are problems, the schema admits more.

    `expand_one_of` expands `oneOf` by the negation of its branches. Without it the compiler gets
    `oneOf`, and enforces it where branches visibly exclude each other.
    """
    try:
        resources = references.Resources(schema)
        return _Rewriter(resources, expand_one_of).run(schema)
    except references.TooDeep:
        return Rewritten(
            True, (f"the schema is nested more than {references.MAX_DEPTH} levels deep",), {}
        )
    except _TooMuch:
        return Rewritten(True, (f"written out, it has more than {MAX_SCHEMAS} schemas",), {})


class _TooMuch(Exception):
    """More than MAX_SCHEMAS schemas were visited."""


class _Rewriter:
    def __init__(self, resources: references.Resources, expand_one_of: bool) -> None:
        self._resources = resources
        self._expand_one_of = expand_one_of
        self._problems: dict[str, None] = {}
        self._names: dict[str, str] = {}  # names of referenced schemas by pointer
        self._waiting: list[tuple[str, references.Place]] = []
        self._beside: dict[
            str, set[str]
        ] = {}  # by referenced schema: those that it applies to the same value
        self._current = ""
        self._num_schemas = 0

    def run(self, root: Any) -> Rewritten:
        main = self._schema(
            references.Place(root, "", self._resources.root_base), 0, is_same_value=True
        )
        defs: dict[str, Any] = {}
        while self._waiting:
            self._current, place = self._waiting.pop()
            defs[self._current] = self._schema(place, 0, is_same_value=True)
        self._check_loops()
        if defs and isinstance(main, dict):
            main = {**main, "$defs": defs}
        return Rewritten(
            main, tuple(self._problems), {name: pointer for pointer, name in self._names.items()}
        )

    # ── one schema ──

    def _schema(self, place: references.Place, depth: int, *, is_same_value: bool) -> Schema:
        self._count(depth)
        schema = place.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._problem("a value", "that is no schema", place.pointer)
            return True
        base = self._resources.base_of(place.pointer, place.base)
        return _Reading(
            self, references.Place(schema, place.pointer, base), depth, is_same_value
        ).read()

    def _count(self, depth: int) -> None:
        if depth > 2 * references.MAX_DEPTH:
            raise references.TooDeep
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise _TooMuch

    def _problem(self, keyword: str, why: str, pointer: str) -> None:
        where = f"at {pointer[:200]}" if pointer else "at the top"
        self._problems[f"{keyword} {where} {why}"] = None

    # ── references ──

    def _target(self, reference: Any, base: str, dynamic: bool) -> references.Place:
        """Return the target of a reference; raises references.Unresolved."""
        if not isinstance(reference, str):
            raise references.Unresolved("it is no text")
        if dynamic and self._resources.is_ambiguous(reference):
            raise references.Unresolved("what it means depends on how it is reached")
        return self._resources.resolve(reference, base)

    def _referred(self, target: references.Place, is_same_value: bool) -> dict[str, Any]:
        name = self._names.get(target.pointer)
        if name is None:
            name = self._names[target.pointer] = f"r{len(self._names)}"
            self._waiting.append((name, target))
        if is_same_value:
            self._beside.setdefault(self._current, set()).add(name)
        return {"$ref": f"#/$defs/{name}"}

    def _check_loops(self) -> None:
        """Report schemas that apply themselves to the same value, since they cannot be expanded."""
        pointers = {name: pointer for pointer, name in self._names.items()}
        for name in self._names.values():
            seen: set[str] = set()
            stack = list(self._beside.get(name, ()))
            while stack:
                following = stack.pop()
                if following not in seen:
                    seen.add(following)
                    stack += self._beside.get(following, ())
            if name in seen:
                self._problem(
                    "'$ref'",
                    "is not supported: it leads back to the schema that it stands in",
                    pointers[name],
                )


class _Reading:
    """One schema with keywords; results are collected in `out`, and additional schemas in
    `parts`.
    """

    def __init__(
        self, owner: _Rewriter, place: references.Place, depth: int, is_same_value: bool
    ) -> None:
        self.owner, self.place, self.depth, self.is_same_value = owner, place, depth, is_same_value
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
                self.owner._problem("a keyword", "has a value of a wrong type", self.place.pointer)
        if self.parts:
            self.out["allOf"] = [*self.out.get("allOf", ()), *self.parts]
        return self.out

    # ── helpers ──

    def _problem(self, keyword: str, why: str) -> None:
        self.owner._problem(f"{keyword!r}", why, f"{self.place.pointer}/{keyword}")

    def _inner(self, schema: Any, steps: str, *, is_same_value: bool = False) -> Schema:
        same = is_same_value and self.is_same_value
        return self.owner._schema(
            references.Place(schema, self.place.pointer + steps, self.place.base),
            self.depth + 1,
            is_same_value=same,
        )

    def _resolve(self, reference: str) -> Any:
        """Return the target of a reference for expansion here; its own references must have the
        same base.
        """
        self.owner._count(0)
        target = self.owner._target(reference, self.place.base, dynamic=True)
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
            if key in self.given:
                self.out[key] = self.given[key]
        for key in COUNTS:
            if key in self.given:
                self.out[key] = int(self.given[key])

    def _texts(self) -> None:
        if (
            "pattern" in self.given
            and (pattern := self._pattern(self.given["pattern"], "pattern")) is not None
        ):
            self.out["pattern"] = pattern
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
        if not self.owner._expand_one_of:
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
                target = self.owner._target(reference, self.place.base, key == "$dynamicRef")
            except references.Unresolved as problem:
                self._problem(key, f"to {str(reference)[:100]!r} is not supported: {problem}")
            else:
                found.append(self.owner._referred(target, self.is_same_value))
        if len(found) == 1:
            self.out |= found[0]
        else:
            self.parts += found
