"""Calls whose arguments are written one by one, in XML or as Python writes them: whatever the
logits say, each call is one that its parser reads, with arguments that keep their schema.
"""

import json

import jsonschema
import pytest

from tests.engines.own.sampling.grammar.test_calls import EOS, VOCAB, answer, read
from tokenmill_schemas.chat import Tool, ToolFunction
from tokenmill_schemas.generation import ResponseFormat
from tokenmill_worker.engines.own.sampling import GrammarCompiler
from tokenmill_worker.engines.own.sampling.grammar.errors import GrammarError
from tokenmill_worker.text.chat.call_parser import CallParser
from tokenmill_worker.text.chat.tools import PYTHONIC, XML, ToolFormat, call_grammar, call_ids

FORMS = {"XML": XML, "PYTHONIC": PYTHONIC}
TRIP: dict[str, object] = {
    "$defs": {
        "Pace": {"enum": ["slow", "fast"], "type": "string"},
        "Stop": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "properties": {
        "note": {"type": "string", "maxLength": 9},
        "city": {"type": "string", "minLength": 2, "maxLength": 8},
        "is_new": {"type": "boolean"},
        "pace": {"$ref": "#/$defs/Pace"},
        "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}, "maxItems": 2},
        "days": {"anyOf": [{"enum": [1, 2]}, {"type": "null"}]},
        "name": {"type": ["string", "null"], "maxLength": 4},
    },
    "required": ["city", "stops"],
}
TOOLS = (
    Tool(ToolFunction("trip", parameters=TRIP, strict=True)),
    Tool(ToolFunction("trip_home")),
)
SCHEMAS = {"trip": {"type": "object", **TRIP}, "trip_home": {"type": "object", "maxProperties": 0}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [EOS])


def check(parser: CallParser) -> None:
    assert parser.has_only_complete_calls
    for call in parser.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_required_call_is_valid_and_read(compiler: GrammarCompiler, form: ToolFormat) -> None:
    named: set[str] = set()
    for seed in range(40):
        ids = answer(compiler, form, seed, "required", tools=TOOLS)
        free, parser, _ = read(form, ids, "required", tools=TOOLS)
        check(parser)
        assert free == ""
        for call in parser.calls:
            named |= json.loads(call.arguments).keys()
    assert named == {"note", "city", "is_new", "pace", "stops", "days", "name"}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_text_without_a_call_is_read_as_text(compiler: GrammarCompiler, form: ToolFormat) -> None:
    for seed in range(40):
        free, parser, text = read(form, answer(compiler, form, seed, tools=TOOLS), tools=TOOLS)
        if parser.calls:
            check(parser)
        else:
            assert (free, text.startswith("[") and form.at_start) == (text, False)


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        (
            XML,
            'I see.<tool_call>\n<function=trip>\n<parameter=city>\na "b"\n<\n</parameter>\n'
            '<parameter=stops>\n[{"x": 1}]\n</parameter>\n</function>\n</tool_call>\n<tool_call>'
            "\n<function=trip_home>\n</function>\n</tool_call>",
            [("trip", {"city": 'a "b"\n<', "stops": [{"x": 1}]}), ("trip_home", {})],
        ),
        (
            PYTHONIC,
            '[trip(city="a, [b)]", is_new=True, stops=[{"x": 1}, {"x": 2}], days=None), '
            "trip_home()]",
            [
                (
                    "trip",
                    {
                        "city": "a, [b)]",
                        "is_new": True,
                        "stops": [{"x": 1}, {"x": 2}],
                        "days": None,
                    },
                ),
                ("trip_home", {}),
            ],
        ),
    ],
    ids=FORMS,
)
def test_usual_calls_are_admitted_and_read_at_every_cut(
    compiler: GrammarCompiler, form: ToolFormat, text: str, calls: list[tuple[str, object]]
) -> None:
    grammar = call_grammar(form, {}, TOOLS, "auto", is_parallel=True)
    matcher = compiler.compile(ResponseFormat(calls=grammar)).result(20)()
    assert all(matcher.accept_token(byte) for byte in text.encode())
    assert matcher.is_terminated() or matcher.accept_token(EOS)
    for cut in range(len(text)):
        parser = CallParser(grammar, call_ids("j", 0, 24))
        pieces = [parser.push(part) for part in (text[:cut], text[cut:])]
        assert "".join(free for free, _ in pieces) == ("I see." if form is XML else "")
        assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == calls
        for index, call in enumerate(parser.calls):
            deltas = [delta for _, found in pieces for delta in found if delta.index == index]
            assert "".join(delta.arguments for delta in deltas) == call.arguments


def test_pythonic_calls_behind_text_are_read_as_text() -> None:
    grammar = call_grammar(PYTHONIC, {}, TOOLS, "auto", is_parallel=True)
    parser = CallParser(grammar, call_ids("j", 0, 24))
    assert [parser.push(text)[0] for text in ("See ", "[1] and [trip_home()]")] == [
        "See ",
        "[1] and [trip_home()]",
    ]
    assert (parser.close("."), parser.calls) == (".", ())


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"properties": {"a>b": {}}}, "have an argument 'a>b', which this model's form cannot"),
        ({"minProperties": 1}, "'minProperties'"),
        ({"properties": {"a": {"type": "string", "pattern": "x+"}}}, "'pattern'"),
        ({"properties": {"a": {"type": "string", "maxLength": 10**6}}}, "'maxLength'"),
        ({"anyOf": [{"properties": {"a": {}}}]}, "are not named under 'properties'"),
        ({"properties": 5}, "are no valid JSON schema"),
        ({"properties": {"a": {"const": "a\n</parameter>\nb"}}}, "'</parameter>', which ends"),
        ({"properties": {"a": {"enum": ["b", "a\n</parameter>\n"]}}}, "'</parameter>', which ends"),
    ],
)
def test_keywords_that_this_form_cannot_enforce_are_refused_by_name(
    compiler: GrammarCompiler, parameters: dict[str, object], sentence: str
) -> None:
    tools = (Tool(ToolFunction("get", parameters=parameters, strict=True)),)
    calls = call_grammar(XML, {}, tools, "auto", is_parallel=True)
    with pytest.raises(GrammarError, match=f"the parameters of 'get' .*{sentence}"):
        compiler.compile(ResponseFormat(calls=calls)).result(20)


@pytest.mark.parametrize(
    ("parameters", "text", "arguments"),
    [
        ({"properties": {"a": {"type": "string", "maxLength": 10**6}}}, "x y", {"a": "x y"}),
        ({"properties": {"a": {"type": ["string"], "minLength": 1.0}}}, "x", {"a": "x"}),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "integer"}}}}},
            "12",
            {"a": 12},
        ),
    ],
)
def test_a_loose_tool_enforces_the_keywords_that_this_form_can(
    compiler: GrammarCompiler, parameters: dict[str, object], text: str, arguments: object
) -> None:
    tools = (Tool(ToolFunction("get", parameters=parameters)),)
    grammar = call_grammar(XML, {}, tools, "auto", is_parallel=True)
    written = (
        f"<tool_call>\n<function=get>\n<parameter=a>\n{text}\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    matcher = compiler.compile(ResponseFormat(calls=grammar)).result(20)()
    assert all(matcher.accept_token(byte) for byte in written.encode())
    parser = CallParser(grammar, call_ids("j", 0, 24))
    parser.push(written)
    assert [json.loads(call.arguments) for call in parser.calls] == [arguments]


def test_a_parser_is_made_for_an_unreadable_schema() -> None:
    """The worker makes the parser before the engine refuses the schema."""
    tools = (Tool(ToolFunction("get", parameters={"properties": 5})),)
    CallParser(call_grammar(XML, {}, tools, "auto", is_parallel=True), call_ids("j", 0, 24))
