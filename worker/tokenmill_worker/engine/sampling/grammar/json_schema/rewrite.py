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
from tokenmill_worker.engine.sampling.grammar.json_schema.keywords import Schema
from tokenmill_worker.engine.sampling.grammar.json_schema.patterns import (
    most_patterns,
    written_patterns,
)
from tokenmill_worker.engine.sampling.grammar.json_schema.reading import SchemaReader

__all__ = ["Rewritten", "rewrite"]

MAX_PATTERNS = 10  # of one text
# most that are visited: an expanded schema may be far larger than the original
MAX_SCHEMAS = 20_000


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
        return Rewriter(resources, expand_one_of).run(schema)
    except references.TooDeep:
        return Rewritten(
            True, (f"the schema is nested more than {references.MAX_DEPTH} levels deep",), {}
        )
    except _TooMuch:
        return Rewritten(True, (f"written out, it has more than {MAX_SCHEMAS} schemas",), {})


class _TooMuch(Exception):
    """More than MAX_SCHEMAS schemas were visited."""


class Rewriter:
    def __init__(self, resources: references.Resources, expand_one_of: bool) -> None:
        self._resources = resources
        self.expand_one_of = expand_one_of
        self._problems: dict[str, None] = {}
        self._names: dict[str, str] = {}  # names of referenced schemas by pointer
        self._waiting: list[tuple[str, references.Place]] = []
        self._beside: dict[
            str, set[str]
        ] = {}  # by referenced schema: those that it applies to the same value
        self.written = frozenset[str]()  # patterns of the request; complements add cheap ones
        self.given_patterns: set[str] = set()  # the same, translated
        self._current = ""
        self._num_schemas = 0

    def run(self, root: Any) -> Rewritten:
        self.written = written_patterns(root)
        main = self.schema(
            references.Place(root, "", self._resources.root_base), 0, is_same_value=True
        )
        defs: dict[str, Any] = {}
        while self._waiting:
            self._current, place = self._waiting.pop()
            defs[self._current] = self.schema(place, 0, is_same_value=True)
        self._check_loops()
        # the compiler's time and memory double with each of them
        count = most_patterns(main, defs, self.given_patterns)
        if count > MAX_PATTERNS:
            problem = f"{count} patterns for one text are not supported; at most {MAX_PATTERNS} are"
            return Rewritten(True, (problem,), {})
        if defs and isinstance(main, dict):
            main = {**main, "$defs": defs}
        return Rewritten(
            main, tuple(self._problems), {name: pointer for pointer, name in self._names.items()}
        )

    # ── one schema ──

    def schema(self, place: references.Place, depth: int, *, is_same_value: bool) -> Schema:
        self.count(depth)
        schema = place.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self.problem("a value", "that is no schema", place.pointer)
            return True
        base = self._resources.base_of(place.pointer, place.base)
        return SchemaReader(
            self, references.Place(schema, place.pointer, base), depth, is_same_value
        ).read()

    def count(self, depth: int) -> None:
        if depth > 2 * references.MAX_DEPTH:
            raise references.TooDeep
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise _TooMuch

    def problem(self, keyword: str, why: str, pointer: str) -> None:
        where = f"at {pointer[:200]}" if pointer else "at the top"
        self._problems[f"{keyword} {where} {why}"] = None

    # ── references ──

    def target(self, reference: Any, base: str, dynamic: bool) -> references.Place:
        """Return the target of a reference; raises references.Unresolved."""
        if not isinstance(reference, str):
            raise references.Unresolved("it is no text")
        if dynamic and self._resources.is_ambiguous(reference):
            raise references.Unresolved("what it means depends on how it is reached")
        return self._resources.resolve(reference, base)

    def referred(self, target: references.Place, is_same_value: bool) -> dict[str, Any]:
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
                self.problem(
                    "'$ref'",
                    "is not supported: it leads back to the schema that it stands in",
                    pointers[name],
                )
