"""Calls are read from text as their grammar writes it, cut anywhere, for every known family."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tokenizers import byte_level, channels
from tests.text.chat.families import DEEPSEEK, GPT_OSS, HERMES, LLAMA3, MISTRAL, PHI4, QWEN3
from tokenmill_schemas.chat import Tool, ToolFunction
from tokenmill_schemas.generation import CallGrammar
from tokenmill_worker.text.chat import tools as formats
from tokenmill_worker.text.chat.call_parser import CallParser
from tokenmill_worker.text.chat.tools import (
    ToolFormat,
    call_grammar,
    call_ids,
    detect_tools,
    special_marks,
)

FORMATS = {
    name: getattr(formats, name)
    for name in ("HERMES", "LLAMA3", "MISTRAL", "MISTRAL_LIST", "DEEPSEEK", "DEEPSEEK_V3")
}
TOOLS = tuple(Tool(ToolFunction(name)) for name in ("get", "get_more", "f.x-1"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"\\{}[]é\n<', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
CALLS = st.lists(
    st.tuples(
        st.sampled_from([tool.function.name for tool in TOOLS]),
        st.dictionaries(st.text(max_size=4), VALUES, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


def grammar_of(form: ToolFormat, choice: str = "auto", is_parallel: bool = True) -> CallGrammar:
    return call_grammar(form, {}, TOOLS, choice, is_parallel)


def written(form: ToolFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    bodies = [
        f"{form.before}{name}{form.after}{json.dumps(arguments)}{form.end}"
        for name, arguments in calls
    ]
    return form.trigger + (form.separator or "").join(bodies) + form.closing


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@given(calls=CALLS, before=st.text("ab<[{ \n", max_size=8), data=st.data())
def test_text_cut_anywhere_gives_the_same_calls(form, calls, before, data):
    if form.separator is None:
        calls = calls[:1]
    if form.trigger in before + form.trigger[:-1]:
        return
    text = before + written(form, calls)
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    parser = CallParser(grammar_of(form), call_ids("job", 0, form.id_chars))
    free, deltas = "", []
    for start, end in zip([0, *borders], [*borders, len(text)], strict=True):
        out, pieces = parser.push(text[start:end])
        free += out
        deltas += pieces
    free += parser.close("")
    assert free == before
    assert [(c.name, json.loads(c.arguments), c.is_complete) for c in parser.calls] == [
        (name, arguments, True) for name, arguments in calls
    ]
    for index, call in enumerate(parser.calls):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.arguments for delta in own) == call.arguments
        assert [(d.id, d.name) for d in own if d.name] == [(call.id, call.name)]
        assert len(call.id) == form.id_chars
    assert parser.has_only_complete_calls


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_cut_call_is_incomplete(form: ToolFormat) -> None:
    text = written(form, [("get", {"a": "b"})])
    end = text.index("}")
    parser = CallParser(grammar_of(form), call_ids("job", 0, form.id_chars))
    parser.push(text[:end])
    (call,) = parser.calls
    assert not call.is_complete
    assert not parser.has_only_complete_calls
    assert parser.close("") == ""


def test_text_that_only_begins_like_a_call_is_text() -> None:
    parser = CallParser(grammar_of(formats.HERMES), call_ids("job", 0, 24))
    pushed = [parser.push(piece)[0] for piece in ("a <tool", "_box> ", "<tool_")]
    assert pushed == ["a ", "<tool_box> ", ""]
    assert parser.close("\ufffd") == "<tool_\ufffd"
    assert parser.calls == ()


def test_a_mark_written_in_letters_is_text_and_its_token_is_a_mark() -> None:
    form = formats.MISTRAL
    grammar = call_grammar(form, {"[TOOL_CALLS]": 7, "[ARGS]": 8}, TOOLS, "auto", is_parallel=True)
    parser = CallParser(grammar, call_ids("job", 0, 9))
    free = parser.push("the mark [TOOL_CALLS]get[ARGS]{} ")[0]
    for text in (parser.marks[7], "get", parser.marks[8], '{"a": 1}', parser.marks[7], "f.x-1"):
        free += parser.push(text)[0]
    parser.push(parser.marks[8] + "{}")
    assert free == "the mark [TOOL_CALLS]get[ARGS]{} "
    assert [(c.name, c.arguments) for c in parser.calls] == [("get", '{"a": 1}'), ("f.x-1", "{}")]


def test_call_ids_follow_from_the_job_and_the_position() -> None:
    first, again, other = (call_ids(job, c, 24) for job, c in (("a", 0), ("a", 0), ("a", 1)))
    assert first(0) == again(0)
    assert len({first(0), first(1), other(0), call_ids("b", 0, 24)(0)}) == 4


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QWEN3 + "{{ tools }}", formats.HERMES),
        (HERMES + "{{ tools }}", formats.HERMES),
        (LLAMA3 + "{{ tools }}", formats.LLAMA3),
        (MISTRAL + "{{ tools }}", None),
        (MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS][") + "{{ tools }}", formats.MISTRAL_LIST),
        (MISTRAL + "[ARGS]{{ tools }}", formats.MISTRAL),
        (DEEPSEEK + "<｜tool▁calls▁begin｜>{{ tools }}", formats.DEEPSEEK_V3),
        (QWEN3 + "<function=f>\n<parameter=a>{{ tools }}", formats.XML),
        (LLAMA3 + "[func_name1(params_name1=params_value1)]{{ tools }}", formats.PYTHONIC),
        (DEEPSEEK + "<｜tool▁calls▁begin｜>```json{{ tools }}", formats.DEEPSEEK),
        (QWEN3 + "<function={{ tools }}", "none"),
        (GPT_OSS + "{{ tools }}", formats.CHANNELS),
        (QWEN3, "none"),
        (PHI4 + "{{ tools }}", "none"),
    ],
)
def test_the_call_form_is_detected_from_the_template(template, expected):
    found = detect_tools(template, "auto")
    if expected is None:
        assert found is not None
        assert found.trigger == "[TOOL_CALLS] ["
    else:
        assert found == (None if expected == "none" else expected)


def test_a_named_call_form_is_used_and_none_disables_calls() -> None:
    assert detect_tools("{{ tools }}", "hermes") == formats.HERMES
    assert detect_tools("{{ tools }}", "pythonic") == formats.PYTHONIC
    assert detect_tools(QWEN3 + "{{ tools }}", "none") is None


def test_special_tokens_of_a_call_form_are_its_marks() -> None:
    form = ToolFormat(trigger="<end>[", before="", after="<user>", end="")
    assert set(special_marks(byte_level()._tokenizer, form)) == {"<end>"}
    assert special_marks(channels()._tokenizer, formats.HERMES) == {}


def test_tool_choice_limits_the_tools() -> None:
    one = grammar_of(formats.HERMES, "function:get_more")
    assert [tool.name for tool in one.tools] == ["get_more"]
    assert (one.is_required, one.separator) == (True, None)
    assert grammar_of(formats.HERMES, "required").is_required
    assert grammar_of(formats.HERMES, is_parallel=False).separator is None


MARKS = {"<tool_call>": 1, "</tool_call>": 2, "[TOOL_CALLS]": 3, "<parameter=": 4}


def marked(form: ToolFormat) -> CallParser:
    """Make a parser whose marks are special tokens of these ids."""
    marks = {mark: id_ for mark, id_ in MARKS.items() if any(mark in text for text in form.texts)}
    grammar = call_grammar(form, marks, TOOLS, "auto", True)
    return CallParser(grammar, call_ids("job", 0, 9))


@pytest.mark.parametrize("form", [formats.HERMES, formats.XML], ids=["json", "xml"])
def test_a_misplaced_mark_is_letters_in_a_call_and_dropped_in_free_text(form):
    parser = marked(form)
    end = parser.marks[2]
    named = f"{form.before}ge{end}t{form.after}"
    value = f'{{"x": "a{end}b"'
    if form.arguments is not None:
        value = f"<parameter=x{end}>\n7{end}\n</parameter>\n"
    free, deltas = parser.push(f"I {end}look{end}. {parser.marks[1]}{named}{value}")
    assert free == "I look. "
    (call,) = parser.calls
    assert call.name == "ge</tool_call>t"
    assert "</tool_call>" in call.arguments
    assert [delta.arguments for delta in deltas if delta.arguments] == [call.arguments]
    for text in (free, call.name, call.arguments, *(delta.name for delta in deltas)):
        text.encode()


@pytest.mark.parametrize("form", [formats.HERMES, formats.MISTRAL_LIST], ids=["hermes", "mistral"])
def test_an_answer_that_ends_within_a_mark_s_text_has_no_lone_surrogate(form):
    parser = marked(form)
    first = next(iter(parser.marks.values()))
    free, _ = parser.push(f"I look{first}"[:-1] + first)
    assert (free + parser.close("")).encode() == b"I look"


def test_the_letters_of_a_mark_are_text():
    parser = marked(formats.HERMES)
    free, _ = parser.push("a </tool_call> b")
    assert free + parser.close("") == "a </tool_call> b"
