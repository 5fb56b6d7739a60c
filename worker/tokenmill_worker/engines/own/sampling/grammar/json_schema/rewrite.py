"""Rewrites draft 2020-12 schemas with the keywords that the grammar compiler enforces.

The compiler (llguidance) merges `allOf`, `$ref` and adjacent keywords, reads constraints without
`type`, and filters `enum`. It refuses unknown keywords; these are expressed here by known ones. A
keyword that cannot be expressed is a problem, reported with its place. References become `$defs`,
so that rewriting moves no target.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenmill_worker.engines.own.sampling.grammar.json_schema import references
from tokenmill_worker.engines.own.sampling.grammar.json_schema.context import (
    MAX_SCHEMAS,
    RewriteContext,
    TooMuch,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema.patterns import (
    most_patterns,
    written_patterns,
)
from tokenmill_worker.engines.own.sampling.grammar.json_schema.reading import read

__all__ = ["Rewritten", "rewrite"]

MAX_PATTERNS = 10  # of one text


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A rewritten schema. `problems` has one sentence per keyword that the grammar would not
    enforce.
    """

    schema: Any
    problems: tuple[str, ...]


def rewrite(schema: Any, *, expand_one_of: bool = False) -> Rewritten:
    """Return an equal schema; if there are problems, the schema admits more.

    `expand_one_of` expands `oneOf` by the negation of its branches. Without it the compiler gets
    `oneOf`, and enforces it where branches visibly exclude each other.
    """
    try:
        resources = references.Resources(schema)
        context = RewriteContext(resources, expand_one_of, written_patterns(schema))
        return _rewritten(schema, context)
    except references.TooDeep:
        return Rewritten(
            True, (f"the schema is nested more than {references.MAX_DEPTH} levels deep",)
        )
    except TooMuch:
        return Rewritten(True, (f"written out, it has more than {MAX_SCHEMAS} schemas",))


def _rewritten(root: Any, context: RewriteContext) -> Rewritten:
    main = read(context, references.Place(root, "", context.resources.root_base))
    defs: dict[str, Any] = {}
    while context.waiting:
        context.current, place = context.waiting.pop()
        defs[context.current] = read(context, place)
    context.check_loops()
    # the compiler's time and memory double with each of them
    count = most_patterns(main, defs, context.given_patterns)
    if count > MAX_PATTERNS:
        problem = f"{count} patterns for one text are not supported; at most {MAX_PATTERNS} are"
        return Rewritten(True, (problem,))
    if defs and isinstance(main, dict):
        main = {**main, "$defs": defs}
    return Rewritten(main, tuple(context.problems))
