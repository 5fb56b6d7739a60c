"""Rewriting a JSON schema changes what it says and not what it means."""

import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill_worker.engines.own.sampling.grammar.json_schema import MAX_DEPTH, rewrite
from tokenmill_worker.engines.own.sampling.grammar.json_schema.patterns import (
    PatternProblem,
    other_than,
    translated,
)

VALUES = [
    None, True, False, 0, 1, 2, 5, 2.5, -3, "", "a", "b", "ab", "abc", [], [1], [1, "a"],
    ["a", "a", None], {},
    {"a": 1}, {"b": 1}, {"a": "a"}, {"a": 1, "b": "x"}, {"ab": None}, {"a": 5, "b": 5, "c": [1]},
    {"c": True},
]  # fmt: skip

SCHEMAS = [
    {"type": "object", "required": ["a", "b"], "properties": {"a": {"type": "integer"}}},
    {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n", "minimum": 2},
    {"properties": {"a": {"$anchor": "n", "type": "integer"}, "b": {"$ref": "#n"}}},
    {
        "$id": "http://x.test/root",
        "$defs": {"n": {"$id": "inner", "type": "null"}},
        "items": {"$ref": "inner"},
    },
    {"$defs": {"n": {"$dynamicAnchor": "it", "type": "string"}}, "items": {"$dynamicRef": "#it"}},
    {"not": {"type": "string"}},
    {"not": {"const": "ab"}},
    {"not": {"enum": ["a", 2, None, True]}},
    {"not": {"required": ["a"]}},
    {"not": {"properties": {"a": {"minimum": 2}}}},
    {"not": {"anyOf": [{"type": "object"}, {"maxLength": 1}]}},
    {"not": {"not": {"minItems": 2}}},
    {"if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": {"required": ["b"]}},
    {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "object"}},
    {"if": {"type": "string"}},
    {"then": {"type": "string"}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"maxProperties": 1}}},
    {"propertyNames": {"maxLength": 1}},
    {"propertyNames": {"pattern": "^a"}},
    {"propertyNames": {"enum": ["a", "b"]}},
    {"propertyNames": {"const": "a"}},
    {"propertyNames": False},
    {"propertyNames": {"maxLength": 1}, "properties": {"a": {"type": "integer"}}},
    {"minContains": 2},
    {"contains": True},
    {"contains": {"type": "string"}, "minContains": 0},
    {"contains": False},
    {"contains": True, "maxContains": 1},
    {"uniqueItems": True, "maxItems": 1},
    {"properties": {"a": True}, "unevaluatedProperties": False},
    {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": {"type": "integer"}},
    {
        "anyOf": [{"properties": {"a": {"type": "integer"}}}, {"required": ["b"]}],
        "unevaluatedProperties": False,
    },
    {"oneOf": [{"required": ["a"]}, {"properties": {"b": True}}], "unevaluatedProperties": False},
    {
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"properties": {"b": True}},
        "else": {"properties": {"c": True}},
        "unevaluatedProperties": False,
    },
    {
        "$defs": {"n": {"properties": {"a": True}}},
        "$ref": "#/$defs/n",
        "unevaluatedProperties": False,
    },
    {
        "dependentSchemas": {"a": {"properties": {"b": True}}},
        "unevaluatedProperties": {"type": "integer"},
    },
    {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    {"allOf": [{"prefixItems": [True, True]}], "unevaluatedItems": {"type": "null"}},
    {"minLength": 2.0, "unknown": {"not": {}}, "title": "t", "format": "my-own"},
    {
        "properties": {
            "not": {"type": "string"},
            "if": {"const": {"not": 1}},
            "contains": {"enum": ["uniqueItems"]},
        }
    },
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"format": "json-pointer"},
]


def admits(schema: object, value: object) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_a_rewritten_schema_admits_the_same_values(schema: dict[str, object], expand: bool) -> None:
    rewritten = rewrite(schema, expand_one_of=expand)
    assert rewritten.problems == ()
    changed = [
        value for value in VALUES if admits(schema, value) != admits(rewritten.schema, value)
    ]
    if schema == {"format": "json-pointer"}:  # an annotation becomes an assertion
        changed = [value for value in changed if not isinstance(value, str)]
    assert changed == []


KNOWN = {
    "$ref", "$defs", "allOf", "anyOf", "oneOf", "type", "enum", "const", "properties",
    "patternProperties",
    "additionalProperties", "required", "items", "prefixItems", "pattern", "format", "minimum",
    "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems",
    "maxItems",
    "minProperties", "maxProperties",
}  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_the_rewrite_uses_known_keywords_alone(schema: dict[str, object]) -> None:
    def check(inner: object) -> None:
        if isinstance(inner, dict):
            assert inner.keys() <= KNOWN
            for key in ("properties", "patternProperties", "$defs"):
                for child in inner.get(key, {}).values():
                    check(child)
            for key in ("allOf", "anyOf", "oneOf", "prefixItems"):
                for child in inner.get(key, ()):
                    check(child)
            check(inner.get("items"))
            check(inner.get("additionalProperties"))

    check(rewrite(schema).schema)


LEAVES = st.sampled_from(
    [
        True, False, {}, {"type": "string"}, {"type": ["object", "null"]}, {"type": "number"},
        {"const": "a"},
        {"const": 1}, {"enum": ["a", "b", None]}, {"minimum": 2}, {"maxLength": 1}, {"minItems": 1},
        {"required": ["a"]}, {"maxProperties": 1}, {"propertyNames": {"maxLength": 1}},
        {"$ref": "#/$defs/d"},
    ]
)  # fmt: skip


def grown(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    some = st.lists(inner, min_size=1, max_size=3)
    names = st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2)
    keywords = {
        "allOf": some, "anyOf": some, "oneOf": some, "not": inner, "if": inner, "then": inner,
        "else": inner,
        "properties": names, "additionalProperties": inner, "items": inner, "prefixItems": some,
        "dependentSchemas": names, "unevaluatedProperties": inner, "unevaluatedItems": inner,
        "required": st.just(["b"]), "type": st.sampled_from(["object", "array", "string"]),
    }  # fmt: skip
    return st.lists(st.sampled_from(sorted(keywords)), min_size=1, max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({key: keywords[key] for key in chosen})
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(LEAVES, grown, max_leaves=8), st.booleans())
def test_random_schemas_mean_the_same_or_are_refused(schema: object, expand: bool) -> None:
    whole: dict[str, object] = {
        "$defs": {"d": {"type": "integer", "minimum": 1}},
        "allOf": [schema],
    }
    rewritten = rewrite(whole, expand_one_of=expand)
    if not rewritten.problems:
        assert [
            value for value in VALUES if admits(whole, value) != admits(rewritten.schema, value)
        ] == []


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {"properties": {"x": {"contains": {"type": "null"}}}},
            "'contains' at /properties/x/contains is not",
        ),
        (
            {"$defs": {"a/b": {"uniqueItems": True}}, "$ref": "#/$defs/a~1b"},
            "'uniqueItems' at /$defs/a~1b/uniqueItems",
        ),
        (
            {"$ref": "http://example.org/schema"},
            "'$ref' at /$ref to 'http://example.org/schema' is not supported",
        ),
        ({"$ref": "#/$defs/nowhere"}, "there is nothing at that place"),
        ({"$ref": "#nowhere"}, "there is no anchor 'nowhere'"),
        (
            {"$ref": "#"},
            "'$ref' at the top is not supported: it leads back to the schema that it stands in",
        ),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "leads back"),
        ({"pattern": "^(?!a)b"}, "'pattern' at /pattern is not supported: look-around"),
        ({"not": {"pattern": "a"}}, "'not' at /not"),
        ({"format": "iri"}, "'format' at /format 'iri' is not supported"),
        ({"minimum": -(2**63)}, "'minimum' at /minimum is beyond ±2^53"),
        ({"exclusiveMaximum": 1e21}, "'exclusiveMaximum' at /exclusiveMaximum is beyond ±2^53"),
        ({"properties": {"a": 5}}, "a value at /properties/a that is no schema"),
        ({"properties": 5}, "a keyword at the top has a value of a wrong type"),
    ],
)
def test_inexpressible_keywords_are_named_with_their_place(
    schema: dict[str, object], problem: str
) -> None:
    found = rewrite(schema).problems
    assert len(found) == 1
    assert problem in found[0]


def test_recursive_schemas_stay_recursive() -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}},
        "required": ["left"],
    }
    rewritten = rewrite(tree)
    assert rewritten.problems == ()
    assert not admits(rewritten.schema, {"left": {}})


def test_a_schema_nested_too_deep_is_refused() -> None:
    schema: dict[str, object] = {"type": "integer"}
    for _ in range(MAX_DEPTH + 1):
        schema = {"type": "array", "items": schema}
    assert "levels deep" in rewrite(schema).problems[0]


def test_a_schema_that_grows_too_large_is_refused() -> None:
    defs: dict[str, object] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 10} for i in range(6)
    }
    schema = {"$defs": {**defs, "d6": {"type": "string"}}, "not": {"$ref": "#/$defs/d0"}}
    assert "more than" in rewrite(schema).problems[0]


def test_many_patterns_of_one_text_are_refused_but_not_those_of_a_complement() -> None:
    """The compiler's time and memory double with each of them."""
    parts = [{"pattern": f"xy{i}"} for i in range(11)]
    refused: list[dict[str, object]] = [
        {"allOf": parts},
        {"allOf": [{"allOf": parts[:6]}, {"anyOf": [{"minLength": 1}, {"allOf": parts[6:]}]}]},
        {"$defs": {"a": {"allOf": parts[:10]}}, "properties": {"b": {"$ref": "#/$defs/a",
                                                                    "pattern": "z"}}},
    ]  # fmt: skip
    for schema in refused:
        found = rewrite(schema)
        assert found.problems == ("11 patterns for one text are not supported; at most 10 are",)
        assert found.schema is True
    allowed: list[dict[str, object]] = [
        {"allOf": parts[:10]},
        {"anyOf": parts},
        {"properties": {str(i): part for i, part in enumerate(parts)}},
        {"type": "string", "not": {"enum": [f"v{i}" for i in range(30)]}},
    ]
    for schema in allowed:
        assert rewrite(schema).problems == ()


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"^\d{3}$", "^[0-9]{3}$"),
        (r"[\d_]\W", "[0-9_][^A-Za-z0-9_]"),
        (r"[a&&b]", r"[a\&\&b]"),
        (r"[[]", r"[\[]"),
        (r"\uD83D\uDE00", r"\x{1F600}"),
        (r"\cA", r"\x{1}"),
        (r"[^\b]", r"[^\x08]"),
        (r"(?:a|(?<n>b))", r"(?:a|(?<n>b))"),
    ],
)
def test_javascript_patterns_are_translated(pattern: str, expected: str) -> None:
    assert translated(pattern) == expected


@pytest.mark.parametrize(
    "pattern", [r"(?=a)", r"(?<!a)", r"\bfoo", r"(a)\1", r"\k<n>", "(?i)a", "[]"]
)
def test_patterns_that_are_not_regular_are_refused(pattern: str) -> None:
    with pytest.raises(PatternProblem, match="not supported"):
        translated(pattern)


@given(st.text("ab\n\U0001f600", max_size=4), st.text("ab\n\U0001f600", max_size=5))
def test_a_pattern_of_all_other_strings_matches_every_string_but_one(
    literal: str, text: str
) -> None:
    pattern = other_than(literal)
    assert pattern is not None
    assert bool(re.fullmatch(pattern[1:-1], text)) == (text != literal)
