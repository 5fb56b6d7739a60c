"""Translates regular expressions of JSON schemas (ECMA-262, Unicode mode) for the grammar compiler
(Rust's `regex`).
"""

from __future__ import annotations

import re
from typing import Any

from tokenmill_worker.engines.own.sampling.grammar.json_schema.keywords import subschemas

_SPACE = r"\t\n\x0B\f\r \u00A0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_", "s": _SPACE}
_DOT = r"[^\n\r\u2028\u2029]"
_ANY = r"[\s\S]"
MAX_LITERAL = 100
_TOKEN = re.compile(
    r"(?P<any>\[\^\]|\[\\s\\S\]|\[\\S\\s\]|\[\\d\\D\]|\[\\w\\W\])"
    r"|\\u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})"
    r"|\\c(?P<control>[A-Za-z])|\\(?P<escape>.)|\(\?(?P<group><?[=!]|:|<|.?)|(?P<other>.)",
    re.DOTALL,
)


class PatternProblem(ValueError):
    """A pattern that cannot be enforced; the text says why."""


def translated(pattern: str) -> str:
    """Return a pattern of the same language in the compiler's dialect; raises PatternProblem."""
    out: list[str] = []
    class_start: int | None = None
    for match in _TOKEN.finditer(pattern):
        text = match[0]
        if match["any"] is not None and class_start is None:
            out.append("(?s:.)")
        elif match["high"] is not None:
            code = (
                0x10000 + ((int(match["high"], 16) - 0xD800) << 10) + int(match["low"], 16) - 0xDC00
            )
            out.append(f"\\x{{{code:X}}}")
        elif match["control"] is not None:
            out.append(f"\\x{{{ord(match['control']) % 32:X}}}")
        elif match["escape"] is not None:
            out.append(_escape(match["escape"], class_start is not None))
        elif class_start is not None:
            closes = text == "]" and match.start() > class_start
            out.append(text if closes else _in_class(match, match.start() == class_start))
            class_start = None if closes else class_start
        elif match["group"] is not None:
            out.append(_group(text, match["group"]))
        elif text == "[":
            if pattern.startswith("]", match.end()):
                raise PatternProblem("the empty class is not supported")
            out.append(text)
            class_start = match.end()
        else:
            out.append(_DOT if text == "." else text)
    return "".join(out)


def _in_class(match: re.Match[str], is_first: bool) -> str:
    """Escape characters that combine classes in the compiler's dialect; in ECMA-262 they are
    literal.
    """
    text = match[0]
    if text == "^" and is_first:
        return text
    return "".join("\\" + char if char in "[&~" else char for char in text)


def _escape(char: str, in_class: bool) -> str:
    held = _CLASSES.get(char.lower())
    if held is not None:
        if char.islower():
            return held if in_class else f"[{held}]"
        return f"[^{held}]"
    if char == "b" and in_class:
        return r"\x08"
    if char == "0":
        return r"\x00"
    if char in "bB":
        raise PatternProblem("word boundaries are not supported")
    if char == "k" or char.isdigit():
        raise PatternProblem("references to groups are not supported")
    return "\\" + char


def _group(text: str, kind: str) -> str:
    if kind in ("=", "!", "<=", "<!"):
        raise PatternProblem("look-around is not supported")
    if kind not in (":", "<"):
        raise PatternProblem(f"{text!r} is not supported")
    return text


def other_than(literal: str) -> str | None:
    """Return a pattern of all strings but this one, or None if it is too long."""
    if len(literal) > MAX_LITERAL:
        return None
    found = f"{_ANY}+"
    for char in reversed(literal):
        code = char if char.isalnum() or ord(char) > 0xFFFF else f"\\u{ord(char):04X}"
        found = f"(?:[^{code}]{_ANY}*|{code}{found})?"
    return f"^{found}$"


def of_length(shortest: int, longest: int | None) -> str:
    return f"^{_ANY}{{{shortest},{'' if longest is None else longest}}}$"


def written_patterns(root: Any) -> frozenset[str]:
    """Return what stands under `pattern` anywhere in a schema."""
    found: set[str] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
            if isinstance(pattern := value.get("pattern"), str):
                found.add(pattern)
        elif isinstance(value, list):
            waiting += value
    return frozenset(found)


def most_patterns(main: Any, defs: dict[str, Any], given: set[str]) -> int:
    """Return how many of the given patterns one text must match in a rewritten schema, at most."""
    known: dict[str, int] = {}
    most = 0
    waiting = [main, *defs.values()]
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict):
            most = max(most, _patterns_of(schema, defs, given, known))
            waiting += [inner for _, inner in subschemas(schema)]
    return most


def _patterns_of(schema: Any, defs: dict[str, Any], given: set[str], known: dict[str, int]) -> int:
    if not isinstance(schema, dict):
        return 0
    count = int(schema.get("pattern") in given)
    count += sum(_patterns_of(inner, defs, given, known) for inner in schema.get("allOf", ()))
    for key in ("anyOf", "oneOf"):
        count += max(
            (_patterns_of(inner, defs, given, known) for inner in schema.get(key, ())), default=0
        )
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name not in known:
            known[name] = 0  # where it leads back to itself
            known[name] = _patterns_of(defs.get(name), defs, given, known)
        count += known[name]
    return count
