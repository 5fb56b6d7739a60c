"""Refuses grammars in which a rule stands for itself: xgrammar compiles such a circle without end,
until the process dies of its stack.
"""

from __future__ import annotations

import re
from typing import Final

from tokenmill_worker.engine.sampling.grammar.errors import GrammarError

# A rule whose whole body is one rule, in the form in which xgrammar prints a parsed grammar.
_ALONE: Final = re.compile(r"^(\S+) ::= \(\((\w+)(?:\{-?\d+, -?\d+\})?\)\)$", re.MULTILINE)


def refuse_circles(parsed: str) -> None:
    """Raises GrammarError if rules stand for one another in a circle. `parsed` is the text of a
    parsed grammar.
    """
    stands_for = dict(_ALONE.findall(parsed))
    seen: set[str] = set()
    for first in stands_for:
        path: set[str] = set()
        name = first
        while name in stands_for and name not in seen:
            seen.add(name)
            path.add(name)
            name = stands_for[name]
        if name in path:
            raise GrammarError(f"the rule {name[:60]} stands for itself")
