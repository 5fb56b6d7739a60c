"""Draws response formats and tools: schemas, regular expressions, grammars and tags, of which many
are wrong, enormous, endless or hostile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from tests.fuzz.jobs.texts import draw_text
from tests.support.tiny_llama import MARKS, SPECIAL

Schema = dict[str, Any]

_LENGTHS: Final = (0, 1, 2, 5, 100, 10_000, 10**9, 2**53, 2**64, -1, 1.5, None, "3")
_BOUNDS: Final = (0, 1, -1, 1.5, 1e308, -1e308, 1e-300, 2**31, 2**63 - 1, 2**63, -(2**63), 10**30)
_TYPES: Final = ("object", "array", "string", "number", "integer", "boolean", "null")
_REFS: Final = (
    "#", "#/$defs/a", "#/$defs/none", "file:///etc/passwd", "http://127.0.0.1:1/x", "", "#/%", 5,
)  # fmt: skip
_PATTERNS: Final = (
    "", "a", "[a-z]+", ".*", "^x$", "(a|b)*c", "\\d{2,4}", "[^\\x00-\\x1f]", "(?:é|漢)+", "\\p{L}+",
    "(a*)*", "(a+)+$", "a{0}", "a{5,2}", "[z-a]", "(", "*", "\\", "(?=a)b", "(?<n>a)\\k<n>", "\\1",
    "[\U0001f600-\U0001f64f]", "\\u{1F600}", "\\bword\\b", "a{1000}", "(a{30}){30}", "x{100000}",
    "((((((((((a?)*)*)*)*)*)*)*)*)*)*", "[^a]", "\\s+\\S+", "(?i)abc", "[[:alpha:]]", "\0", "$^",
)  # fmt: skip


def draw_format(chance: random.Random) -> Any:
    """Return a value for `response_format`."""
    kind = chance.random()
    if kind < 0.4:
        schema = draw_schema(chance)
        if chance.random() < 0.3:
            envelope = {"name": draw_text(chance, 2), "schema": schema, "strict": _flag(chance)}
            return {"type": "json_schema", "json_schema": envelope}
        return {"json_schema": schema, "strict": _flag(chance)}
    if kind < 0.6:
        return {"regex": draw_regex(chance)}
    if kind < 0.75:
        return {"grammar": draw_grammar(chance)}
    if kind < 0.85:
        return {
            "choice": [draw_text(chance, 3) or "a" for _ in range(chance.choice((0, 1, 2, 3, 200)))]
        }
    if kind < 0.95:
        return _tag(chance)
    return chance.choice(
        (
            {}, [], "json", {"type": "json_object"}, {"type": "text"}, {"type": draw_text(chance)},
            {"regex": "a", "grammar": "root ::= 'a'"}, {"calls": {"trigger": "<", "before": "a"}},
            {"json_schema": None}, {"regex": 5}, {"json_schema": {}}, {"strict": True},
        )
    )  # fmt: skip


def _flag(chance: random.Random) -> Any:
    return chance.choice((True, True, False, False, False, None))


# ── schemas ──


def draw_schema(chance: random.Random, depth: int = 3) -> Schema:
    """Return a JSON schema. Half of its keywords fit its type, and few of its values are wrong."""
    if chance.random() < 0.03:
        return _deep(chance)
    schema: Schema = {}
    for _ in range(chance.choice((1, 1, 1, 2))):
        draw = chance.choice(_KEYWORDS if depth else _LEAVES)
        schema |= draw(chance, depth - 1)
    if chance.random() < 0.04:
        schema |= {"$defs": {"a": draw_schema(chance, 1)}, "$ref": chance.choice(_REFS)}
    if chance.random() < 0.05:
        schema[draw_text(chance, 2)] = draw_value(chance)
    return schema


def draw_value(chance: random.Random, depth: int = 2) -> Any:
    """Return any JSON value."""
    kind = chance.randrange(8 if depth else 5)
    if kind < 2:
        return draw_text(chance, 3)
    if kind < 4:
        return chance.choice((*_BOUNDS, True, False, None, 7))
    if kind == 4:
        return chance.choice((*SPECIAL, *MARKS)) + draw_text(chance, 1)
    if kind < 7:
        return [draw_value(chance, depth - 1) for _ in range(chance.randint(0, 3))]
    return {draw_text(chance, 2): draw_value(chance, depth - 1) for _ in range(3)}


def _deep(chance: random.Random) -> Schema:
    schema: Schema = {"type": "string"}
    key = chance.choice(("items", "not", "additionalProperties", "p"))
    for _ in range(chance.choice((10, 60, 64, 65, 500))):
        schema = {"properties": {"a": schema}} if key == "p" else {key: schema}
    return schema


def _typed(chance: random.Random, depth: int) -> Schema:
    kind = chance.choice(_TYPES)
    return {"type": kind if chance.random() < 0.9 else [kind, chance.choice(_TYPES)]}


def _fixed(chance: random.Random, depth: int) -> Schema:
    if chance.random() < 0.5:
        return {"const": draw_value(chance)}
    return {"enum": [draw_value(chance) for _ in range(chance.choice((0, 1, 2, 5, 300)))]}


def _string(chance: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "string"}
    if chance.random() < 0.5:
        schema["pattern"] = draw_regex(chance)
    if chance.random() < 0.4:
        schema[chance.choice(("minLength", "maxLength"))] = chance.choice(_LENGTHS)
    if chance.random() < 0.2:
        names = ("date-time", "email", "uuid", "ipv4", "uri", "regex", "json-pointer", "wrong")
        schema["format"] = chance.choice(names)
    return schema


def _number(chance: random.Random, depth: int) -> Schema:
    names = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    chosen = chance.sample(names, chance.randint(0, 3))
    bounds = {name: chance.choice(_BOUNDS) for name in chosen}
    return {"type": chance.choice(("number", "integer")), **bounds}


def _array(chance: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": draw_schema(chance, depth)}
    if chance.random() < 0.4:
        schema[chance.choice(("minItems", "maxItems"))] = chance.choice(_LENGTHS)
    if chance.random() < 0.2:
        schema["prefixItems"] = [draw_schema(chance, depth) for _ in range(2)]
    if chance.random() < 0.1:
        schema[chance.choice(("uniqueItems", "contains"))] = True
    return schema


def _object(chance: random.Random, depth: int) -> Schema:
    names = [draw_text(chance, 2) for _ in range(chance.choice((0, 1, 2, 3, 3, 30)))]
    schema: Schema = {
        "type": "object",
        "properties": {name: draw_schema(chance, depth if len(names) < 9 else 0) for name in names},
    }
    if chance.random() < 0.6:
        schema["required"] = names[: chance.randint(0, len(names))]
    if chance.random() < 0.5:
        schema["additionalProperties"] = chance.choice((True, False, False, {"type": "string"}))
    if chance.random() < 0.1:
        schema["patternProperties"] = {draw_regex(chance): draw_schema(chance, depth)}
    if chance.random() < 0.1:
        schema[chance.choice(("minProperties", "maxProperties"))] = chance.choice(_LENGTHS)
    return schema


def _combined(chance: random.Random, depth: int) -> Schema:
    name = chance.choice(("anyOf", "oneOf", "allOf"))
    return {name: [draw_schema(chance, depth) for _ in range(chance.randint(0, 3))]}


_Draw = Callable[[random.Random, int], Schema]
_LEAVES: Final[tuple[_Draw, ...]] = (_typed, _fixed, _string, _number)
_KEYWORDS: Final[tuple[_Draw, ...]] = (*_LEAVES, _array, _object, _object, _object, _combined)


# ── regular expressions and grammars ──


def draw_regex(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.5:
        return chance.choice(_PATTERNS)
    if kind < 0.8:
        parts = [chance.choice(_PATTERNS) for _ in range(chance.randint(1, 4))]
        return chance.choice(("", "|", "+", "{2,3}")).join(parts)
    if kind < 0.85:
        return "|".join(f"{chance.getrandbits(32):x}" for _ in range(chance.choice((3, 300, 3000))))
    if kind < 0.9:
        inner, outer = chance.choice((2, 10, 100)), chance.choice((2, 10, 100))
        return f"(x{{{inner}}}){{{outer}}}"
    return draw_text(chance, 4)


def draw_grammar(chance: random.Random) -> str:
    """Return an EBNF grammar: rules that use one another at random, or one of the known bombs."""
    kind = chance.random()
    if kind < 0.1:
        return draw_text(chance, 5)
    if kind < 0.25:
        return doubling(chance.choice((3, 8, 12, 16, 40)))
    if kind < 0.35:
        return chance.choice(
            (
                "root ::= root", "root ::= root | root root", 'root ::= "a" root | ""', "root ::= ",
                'root ::= ("a"*)*', "root ::= other", 'a ::= "x"', 'root ::= "a"\nroot ::= "b"',
                'root ::= [\\u0000-\\U0010ffff]{1,5}', 'root ::= "\\x"', "root ::= [^]", "::=",
            )
        )  # fmt: skip
    count = chance.randint(1, 4)
    names = ["root", *(f"r{number}" for number in range(1, count))]
    return "\n".join(f"{name} ::= {_rule(chance, names)}" for name in names)


def doubling(levels: int) -> str:
    """Return a grammar that forces 2 ** levels characters."""
    rules = [f"a{level} ::= a{level + 1} a{level + 1}" for level in range(levels)]
    return "\n".join(["root ::= a0", *rules, f'a{levels} ::= "x"'])


def _rule(chance: random.Random, names: list[str]) -> str:
    words = []
    for _ in range(chance.randint(1, 4)):
        kind = chance.random()
        if kind < 0.4:
            text = draw_text(chance, 2)
            words.append('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"')
        elif kind < 0.6:
            words.append(chance.choice(("[a-z]", "[^a]", "[0-9]", "[漢-字]", "[\\n\\t ]")))
        else:
            words.append(chance.choice(names))
        words[-1] += chance.choice(("", "", "", "*", "+", "?", "{2}", "{1,3}", "{1000}", "{0,}"))
        words.append(chance.choice(("", "", "|")))
    return " ".join(words).rstrip("| ")


def _tag(chance: random.Random) -> Any:
    begin, end = chance.choice(MARKS), chance.choice(MARKS)
    schema = draw_schema(chance, 1)
    if chance.random() < 0.5:
        tag = {"begin": begin + draw_text(chance, 1), "schema": schema, "end": end}
        triggers = [begin] if chance.random() < 0.8 else [draw_text(chance, 1)]
        return {"type": "structural_tag", "structures": [tag], "triggers": triggers}
    content = {"type": "json_schema", "json_schema": schema}
    tag = {"type": "tag", "begin": begin, "content": content, "end": end}
    kinds = (tag, {"type": "const_string", "value": draw_text(chance, 2)}, draw_value(chance))
    kind = {"type": "sequence", "elements": [chance.choice(kinds) for _ in range(2)]}
    return {"type": "structural_tag", "format": chance.choice((tag, kind, draw_value(chance)))}


# ── tools ──


def draw_tools(chance: random.Random) -> list[Any]:
    names = ["f", "get_weather", "a.b-c", "x" * 64, "tool_call", "now"]
    chosen = chance.sample(names, chance.choice((1, 1, 2, 3)))
    if chance.random() < 0.05:
        chosen.append(draw_text(chance, 2))
    return [_tool(chance, name) for name in chosen]


def _tool(chance: random.Random, name: str) -> Any:
    function: dict[str, Any] = {"name": name}
    if chance.random() < 0.5:
        function["description"] = draw_text(chance, 4)
    if chance.random() < 0.85:
        properties = {draw_text(chance, 2): draw_schema(chance, 1) for _ in range(2)}
        function["parameters"] = {"type": "object", "properties": properties}
        if chance.random() < 0.5:
            function["parameters"]["required"] = list(properties)
        if chance.random() < 0.1:
            function["parameters"] = draw_schema(chance)
    if chance.random() < 0.4:
        function["strict"] = chance.random() < 0.7
    return {"type": "function", "function": function}
