"""A schema that cannot be read is refused before a token is generated; one of an earlier draft
keeps its meaning.
"""

import jsonschema_rs
import pytest

from tests.engines.own.sampling.grammar.test_json_rewrite import VALUES
from tests.engines.own.sampling.grammar.test_masks import VOCAB
from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engines.own.sampling import GrammarCompiler, GrammarError
from tokenmill_worker.engines.own.sampling.grammar.json_schema import rewrite
from tokenmill_worker.engines.own.sampling.grammar.json_schema.drafts import modern

DRAFT4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT6 = {"$schema": "http://json-schema.org/draft-06/schema"}
DRAFT7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DRAFT2019 = {"$schema": "https://json-schema.org/draft/2019-09/schema"}
EARLIER = {"4": DRAFT4, "6": DRAFT6, "7": DRAFT7, "2019-09": DRAFT2019}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [256])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"type": 5}, "'type' at /type is invalid: 5 is not a value that it may have"),
        ({"minimum": "a"}, '\'minimum\' at /minimum is invalid: "a" is not of type "number"'),
        (
            {"properties": {"a/b": {"minLength": -1}}},
            "'minLength' at /properties/a~1b/minLength is invalid: -1 is",
        ),
        ({"items": [{}]}, "'items' at /items is invalid"),
        ({"required": ["x" * 500, 5, 5, "x" * 500]}, "is invalid"),
        ({"$schema": 5}, "'$schema' at /$schema is invalid"),
        (
            {"$schema": "http://x.test/y"},
            "'$schema' at /$schema names a draft that is not supported: 'http://x.test/y'",
        ),
        (
            {**DRAFT7, "exclusiveMinimum": True},
            "'exclusiveMinimum' at /exclusiveMinimum is invalid",
        ),
        ({"then": {"pattern": "("}, "if": True}, "'pattern' at /then/pattern is invalid"),
        (
            {"$defs": {"a": {"$ref": "http://x.test/y"}}},
            "'$ref' at /$defs/a/$ref leads to 'http://x.test/y', which",
        ),
        (
            {"$id": "http://x.test/y", "items": {"$ref": "z#/a"}},
            "'$ref' at /items/$ref leads to 'z', which is not part",
        ),
    ],
)
def test_an_unreadable_schema_is_refused_with_its_place(
    compiler: GrammarCompiler, schema: dict[str, object], problem: str, strict: bool
) -> None:
    with pytest.raises(GrammarError) as refusal:
        compiler.compile(ResponseFormat(json_schema=schema, strict=strict)).result(60)
    sentence = str(refusal.value)
    assert sentence.startswith("response_format.json_schema is no valid JSON schema: ")
    assert problem in sentence
    assert "\n" not in sentence
    assert len(sentence) < 600


@pytest.mark.parametrize(
    ("schema", "sentence"),
    [
        ({"multipleOf": 1e-30}, "Value for 'multipleOf' has too many digits"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "no value satisfies it, or a part of it"),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            "no value satisfies it, or a part of it",
        ),
        ({"items": {"oneOf": [{}, {"pattern": "a"}]}}, "'oneOf' is not supported where its"),
    ],
)
def test_a_schema_that_the_compiler_refuses_has_one_sentence_for_its_reason(
    compiler: GrammarCompiler, schema: dict[str, object], sentence: str
) -> None:
    with pytest.raises(
        GrammarError, match=rf"^response_format\.json_schema cannot be enforced: {sentence}"
    ) as refusal:
        compiler.compile(ResponseFormat(json_schema=schema)).result(60)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 2**31},
        {"type": "number", "multipleOf": 2**31, "minimum": -1, "exclusiveMaximum": 2**31},
        {"allOf": [{"type": "integer", "multipleOf": 10007}, {"multipleOf": 10009}]},
        {"anyOf": [{"type": "integer", "multipleOf": 65537}, {"multipleOf": 65539}]},
    ],
)
def test_multiples_with_too_many_remainders_are_refused_or_left_open(
    compiler: GrammarCompiler, schema: dict[str, object]
) -> None:
    with pytest.raises(GrammarError, match=r"'multipleOf' at /.* needs too large a grammar"):
        compiler.compile(ResponseFormat(json_schema=schema)).result(60)
    compiler.compile(ResponseFormat(json_schema=schema, strict=False)).result(60)


@pytest.mark.parametrize("multiple", [0.01, 1e-8, 7, 1000, 86_400, 3_600_000, 10**6, 10**9])
def test_usual_multiples_are_compiled(compiler: GrammarCompiler, multiple: float) -> None:
    schema: dict[str, object] = {"type": "number", "multipleOf": multiple}
    compiler.compile(ResponseFormat(json_schema=schema)).result(60)


@pytest.mark.parametrize("draft", EARLIER)
@pytest.mark.parametrize(
    "schema",
    [
        {"items": [{"type": "integer"}, {}]},
        {"items": [{"type": "integer"}], "additionalItems": {"type": "string"}},
        {"items": [{"type": "integer"}], "additionalItems": False},
        {"additionalItems": False},
        {"items": {"type": "string"}, "additionalItems": False},
        {"prefixItems": [{"type": "string"}]},
        {"definitions": {"n": {"type": "integer"}}, "$ref": "#/definitions/n", "minimum": 3},
        {
            "not": {"$ref": "#/definitions/n", "type": "string"},
            "definitions": {"n": {"type": ["string", "number"]}},
        },
        {"dependencies": {"a": ["b"], "b": {"maxProperties": 2}}},
        {"dependentRequired": {"a": ["b"]}},
        {"properties": {"a": {"const": 1, "minContains": 2}}},
        {"propertyNames": {"maxLength": 1}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"properties": {"a": {}}, "unevaluatedProperties": False},
        {"items": [{}], "unevaluatedItems": False},
        {"properties": {"items": {"type": "integer"}, "a": {"items": [{}]}}},
    ],
    ids=str,
)
def test_an_earlier_draft_keeps_its_meaning(draft: str, schema: dict[str, object]) -> None:
    whole = {**EARLIER[draft], **schema}
    validator = jsonschema_rs.validator_for(whole)
    read = modern(whole)
    rewritten = rewrite(read.schema)
    assert (read.problems, rewritten.problems) == ((), ())
    written = jsonschema_rs.Draft202012Validator(rewritten.schema)
    assert [value for value in VALUES if validator.is_valid(value) != written.is_valid(value)] == []


def test_draft_4_reads_exclusive_bounds() -> None:
    read = modern(
        {**DRAFT4, "minimum": 1, "exclusiveMinimum": True, "maximum": 5, "exclusiveMaximum": False}
    ).schema
    assert read == {"exclusiveMinimum": 1, "maximum": 5}


def test_anchors_of_earlier_drafts_are_found() -> None:
    schema = {
        **DRAFT7,
        "definitions": {"n": {"$id": "#n", "type": "integer"}},
        "items": {"$ref": "#n"},
    }
    rewritten = rewrite(modern(schema).schema)
    assert rewritten.problems == ()
    written = jsonschema_rs.Draft202012Validator(rewritten.schema)
    assert written.is_valid([1])
    assert not written.is_valid(["a"])


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {**DRAFT2019, "properties": {"a": {"$recursiveRef": "#"}}},
            "'$recursiveRef' at /properties/a/$recursiveRef",
        ),
        ({"properties": {"a": DRAFT7}}, "'$schema' at /properties/a is not supported"),
        ({**DRAFT7, "not": DRAFT2019}, "'$schema' at /not is not supported"),
    ],
)
def test_keywords_without_meaning_in_the_newest_draft_are_refused(
    compiler: GrammarCompiler, schema: dict[str, object], problem: str
) -> None:
    with pytest.raises(GrammarError) as refusal:
        compiler.compile(ResponseFormat(json_schema=schema)).result(60)
    assert problem in str(refusal.value)
    compiler.compile(ResponseFormat(json_schema=schema, strict=False)).result(60)
