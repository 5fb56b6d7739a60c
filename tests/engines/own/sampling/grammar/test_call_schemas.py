"""Any tools, in every family's form: arguments that the grammar draws at random are read as values
that keep their schema, and a call that is cut is not complete.
"""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.own.sampling.grammar.test_argument_rules import FORMS
from tests.engines.own.sampling.grammar.test_calls import EOS, VOCAB, answer
from tests.text.chat.test_tools import FORMATS
from tokenmill_schemas.chat import Tool, ToolFunction
from tokenmill_worker.engines.own.sampling import GrammarCompiler
from tokenmill_worker.text.chat.call_parser import CallParser
from tokenmill_worker.text.chat.tools import ToolFormat, call_grammar, call_ids

ALL = FORMATS | FORMS
NAMES = st.text("abcxyz_", min_size=1, max_size=4)
TEXTS = st.text('ab"\\<=,)]é\n', min_size=1, max_size=4)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Schemas of objects, of whose properties some are required."""

    def with_required(properties: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        names = st.sets(st.sampled_from(sorted(properties))) if properties else st.just(set[str]())
        return st.builds(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": False,
            },
            names,
        )

    return st.dictionaries(NAMES, values, max_size=3).flatmap(with_required)


SIMPLE: st.SearchStrategy[Any] = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 5)),
    st.builds(
        lambda low: {"type": "integer", "minimum": low, "maximum": low + 9}, st.integers(-999, 999)
    ),
    st.builds(lambda texts: {"enum": texts}, st.lists(TEXTS, min_size=1, unique=True, max_size=3)),
    st.builds(lambda text: {"const": text}, TEXTS),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"enum": [1, None, "a", True]}]),
    st.sampled_from([{"type": ["boolean", "null"]}, {"type": ["string", "null"], "maxLength": 3}]),
)
VALUES = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
        st.builds(lambda *options: {"anyOf": list(options)}, inner, inner),
        objects(inner),
    ),
    max_leaves=4,
)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [EOS])


@pytest.mark.parametrize("form", ALL.values(), ids=ALL)
@settings(max_examples=15, deadline=None)
@given(schemas=st.lists(objects(VALUES), min_size=1, max_size=2), seed=st.integers(0, 99),
       data=st.data())  # fmt: skip
def test_drawn_calls_are_read_and_valid(
    compiler: GrammarCompiler,
    form: ToolFormat,
    schemas: list[dict[str, Any]],
    seed: int,
    data: st.DataObject,
) -> None:
    tools = tuple(
        Tool(ToolFunction(f"tool_{i}", parameters=schema, strict=True))
        for i, schema in enumerate(schemas)
    )
    ids = answer(compiler, form, seed, "required", is_parallel=False, tools=tools)
    text = b"".join(VOCAB[i] for i in ids).decode()
    grammar = call_grammar(form, {}, tools, "required", is_parallel=False)

    whole = CallParser(grammar, call_ids("j", 0, 24))
    pieces = [whole.push(letter) for letter in text]
    assert "".join(free for free, _ in pieces) == ""
    assert whole.has_only_complete_calls
    for index, call in enumerate(whole.calls):
        jsonschema.validate(json.loads(call.arguments), schemas[int(call.name[-1])])
        deltas = [delta for _, found in pieces for delta in found if delta.index == index]
        assert "".join(delta.arguments for delta in deltas) == call.arguments

    cut = CallParser(grammar, call_ids("j", 0, 24))
    cut.push(text[: data.draw(st.integers(0, len(text)))])
    for call, entire in zip(cut.calls, whole.calls, strict=False):
        assert entire.arguments.startswith(call.arguments)
        assert call.is_complete == (call.arguments == entire.arguments)
