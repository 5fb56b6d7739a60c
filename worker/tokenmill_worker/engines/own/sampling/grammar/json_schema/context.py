"""Keeps what one rewriting has found: problems, referenced schemas, and how many were visited."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from tokenmill_worker.engines.own.sampling.grammar.json_schema import references

# The compiler keeps a state for each remainder: 2^31 of them take all memory before its limits end
# it. So many take a second or two.
MAX_REMAINDERS = 300_000
# most that are visited: an expanded schema may be far larger than the original
MAX_SCHEMAS = 20_000


class TooMuch(Exception):
    """More than MAX_SCHEMAS schemas were visited."""


class RewriteContext:
    """The state of one rewriting, which all schemas of the document share.

    `written` are the patterns of the request; complements add cheap ones. `given_patterns` are the
    same, translated. `names` has the name in `$defs` of each referenced schema, by its pointer, and
    `waiting` those that are not read yet.
    """

    def __init__(
        self, resources: references.Resources, expand_one_of: bool, written: frozenset[str]
    ) -> None:
        self.resources, self.expand_one_of, self.written = resources, expand_one_of, written
        self.given_patterns: set[str] = set()
        self.problems: dict[str, None] = {}
        self.names: dict[str, str] = {}
        self.waiting: list[tuple[str, references.Place]] = []
        self.current = ""  # name of the referenced schema that is read
        # by referenced schema: those that it applies to the same value
        self._beside: dict[str, set[str]] = {}
        self._num_schemas = 0
        self._multiple, self._zeros = 1, 0  # of all that `takes_multiple` has taken

    def count(self, depth: int) -> None:
        if depth > 2 * references.MAX_DEPTH:
            raise references.TooDeep
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise TooMuch

    def takes_multiple(self, value: float) -> bool:
        """Return whether the compiler can hold one more `multipleOf`. It may apply several to one
        number, which has the remainders of their least common multiple; each zero at its end takes
        about four times the states, not ten times.
        """
        _, digits, exponent = Decimal(str(value)).normalize().as_tuple()
        multiple = math.lcm(self._multiple, int("".join(map(str, digits))))
        zeros = max(self._zeros, int(exponent))
        if multiple * 4**zeros > MAX_REMAINDERS:
            return False
        self._multiple, self._zeros = multiple, zeros
        return True

    def problem(self, keyword: str, why: str, pointer: str) -> None:
        where = f"at {pointer[:200]}" if pointer else "at the top"
        self.problems[f"{keyword} {where} {why}"] = None

    def target(self, reference: Any, base: str, dynamic: bool) -> references.Place:
        """Return the target of a reference; raises references.Unresolved."""
        if not isinstance(reference, str):
            raise references.Unresolved("it is no text")
        if dynamic and self.resources.is_ambiguous(reference):
            raise references.Unresolved("what it means depends on how it is reached")
        return self.resources.resolve(reference, base)

    def referred(self, target: references.Place, is_same_value: bool) -> dict[str, Any]:
        name = self.names.get(target.pointer)
        if name is None:
            name = self.names[target.pointer] = f"r{len(self.names)}"
            self.waiting.append((name, target))
        if is_same_value:
            self._beside.setdefault(self.current, set()).add(name)
        return {"$ref": f"#/$defs/{name}"}

    def check_loops(self) -> None:
        """Report schemas that apply themselves to the same value, since they cannot be expanded."""
        pointers = {name: pointer for pointer, name in self.names.items()}
        for name in self.names.values():
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
