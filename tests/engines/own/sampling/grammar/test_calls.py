"""Whatever the logits say, each call that is written is one that its parser reads, with arguments
that keep their schema.
"""

import json

import jsonschema
import pytest

from tests.engines.own.sampling.grammar.test_masks import VOCAB as BYTES
from tests.engines.own.sampling.helpers import CPU, ToyModel, draw_to_end
from tests.text.chat.test_tools import FORMATS
from tokenmill_schemas.chat import Tool, ToolFunction
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_worker.engines.own.cpu.kernels.draw import DrawKernel
from tokenmill_worker.engines.own.sampling import GrammarCompiler, Sampler
from tokenmill_worker.engines.own.sampling.grammar.errors import GrammarError
from tokenmill_worker.engines.own.sequence import Sequence
from tokenmill_worker.text.chat.call_parser import CallParser
from tokenmill_worker.text.chat.tools import ToolFormat, call_grammar, call_ids

MARKS = ["<tool_call>", "[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>",
         "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"]  # fmt: skip
VOCAB = [*BYTES[:-1], *(mark.encode() for mark in MARKS), b""]
EOS = len(VOCAB) - 1
FIRST_MARK = len(BYTES) - 1
SPECIAL = {mark: FIRST_MARK + i for i, mark in enumerate(MARKS)}
CITY: dict[str, object] = {
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 2, 3]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (Tool(ToolFunction("get", parameters=CITY, strict=True)), Tool(ToolFunction("get_all")))
SCHEMAS = {"get": {"type": "object", **CITY}, "get_all": {"type": "object", "maxProperties": 0}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler.from_vocab(VOCAB, [EOS])


class Caller(ToyModel):
    """Random logits that favour marks, ends and brackets."""

    def favour(self, values):
        values[EOS] += 3.0
        values[[ord("\n"), ord(","), SPECIAL["<｜tool▁call▁begin｜>"]]] += 3.0
        values[[ord(c) for c in '"}]']] += 4.0
        values[FIRST_MARK:EOS] += 4.0
        values[128:256] -= 100.0
        values["▁".encode()[0]] += 100.0  # the second call's mark differs here from the last one


def answer(
    compiler: GrammarCompiler,
    form: ToolFormat,
    seed: int,
    choice: str = "auto",
    is_parallel: bool = True,
    resumed: tuple[int, ...] = (),
    tools: tuple[Tool, ...] = TOOLS,
) -> list[int]:
    calls = call_grammar(form, {}, tools, choice, is_parallel)
    return drawn(compiler, ResponseFormat(calls=calls), seed, resumed)


def drawn(
    compiler: GrammarCompiler, wanted: ResponseFormat, seed: int, resumed: tuple[int, ...] = ()
) -> list[int]:
    params = SamplingParams(temperature=1.0, response_format=wanted)
    sequence = Sequence("r", [1, 2, 3, *resumed], 3, params, seed=seed)
    sampler, model = (
        Sampler(len(VOCAB), CPU, frozenset({EOS}), compiler, DrawKernel()),
        Caller(len(VOCAB), 64),
    )
    return draw_to_end(sampler, model, sequence, EOS)


def read(
    form: ToolFormat,
    ids: list[int],
    choice: str = "auto",
    is_parallel: bool = True,
    tools: tuple[Tool, ...] = TOOLS,
):
    parser = CallParser(call_grammar(form, {}, tools, choice, is_parallel), call_ids("j", 0, 24))
    text = b"".join(VOCAB[i] for i in ids).decode()
    free = "".join(parser.push(letter)[0] for letter in text) + parser.close("")
    return free, parser, text


def check(form: ToolFormat, parser: CallParser, text: str) -> None:
    """Check that the calls are valid, and that they are the whole text behind the trigger."""
    assert parser.has_only_complete_calls
    for call in parser.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    bodies = [f"{form.before}{c.name}{form.after}{c.arguments}{form.end}" for c in parser.calls]
    assert text.endswith(form.trigger + (form.separator or "").join(bodies) + form.closing)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_every_required_call_is_valid_and_read(compiler: GrammarCompiler, form: ToolFormat) -> None:
    numbers = set()
    for seed in range(40):
        free, parser, text = read(form, answer(compiler, form, seed, "required"), "required")
        check(form, parser, text)
        assert free == ""
        numbers.add(len(parser.calls))
    assert len(numbers) > 1 or form.separator is None


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_calls_behind_free_text_are_read(compiler: GrammarCompiler, form: ToolFormat) -> None:
    with_calls = 0
    for seed in range(60):
        free, parser, text = read(form, answer(compiler, form, seed))
        if form.trigger in text:
            check(form, parser, text)
            with_calls += 1
        else:
            assert (free, parser.calls) == (text, ())
    assert with_calls or form.trigger not in MARKS


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_parallel_calls_can_be_forbidden_and_a_function_required(
    compiler: GrammarCompiler, form: ToolFormat
) -> None:
    for seed in range(15):
        ids = answer(compiler, form, seed, "required", is_parallel=False)
        _, parser, text = read(form, ids, "required", is_parallel=False)
        check(form, parser, text)
        assert len(parser.calls) == 1
        _, parser, text = read(form, answer(compiler, form, seed, "function:get_all"))
        assert [call.name for call in parser.calls] == ["get_all"]


ANSWER: dict[str, object] = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"const": "<tool_call>"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["HERMES", "MISTRAL", "DEEPSEEK"])
def test_a_schema_beside_tools_binds_the_text_answer(compiler: GrammarCompiler, name: str) -> None:
    form = FORMATS[name]
    calls = call_grammar(form, {}, TOOLS, "auto", is_parallel=True, has_schema=True)
    wanted = ResponseFormat(calls=calls, json_schema=ANSWER)

    def parsed(text: str) -> tuple[str, CallParser]:
        parser = CallParser(calls, call_ids("j", 0, 24))
        return "".join(parser.push(letter)[0] for letter in text) + parser.close(""), parser

    for seed in range(20):
        text = b"".join(VOCAB[i] for i in drawn(compiler, wanted, seed)).decode()
        free, parser = parsed(text)
        if text.startswith(form.trigger):
            check(form, parser, text)
        else:
            assert (free, parser.calls) == (text, ())
            jsonschema.validate(json.loads(free), ANSWER)
    answer = '{"a": "x", "b": "<tool_call>"}'
    matcher = compiler.compile(wanted).result(20)()
    assert all(matcher.accept_token(byte) for byte in answer.encode())
    assert matcher.is_terminated() or matcher.accept_token(EOS)
    free, parser = parsed(answer)
    assert (free, parser.calls) == (answer, ())


def test_an_answer_resumed_at_any_token_continues_the_same(compiler: GrammarCompiler) -> None:
    form = FORMATS["HERMES"]
    whole = answer(compiler, form, 3, "required")
    for cut in range(len(whole)):
        assert answer(compiler, form, 3, "required", resumed=tuple(whole[:cut])) == whole, cut


def test_a_special_token_triggers_a_call(compiler: GrammarCompiler) -> None:
    vocab = [b"" if i >= FIRST_MARK else word for i, word in enumerate(VOCAB)]
    special = GrammarCompiler.from_vocab(vocab, [EOS], special_ids=[*SPECIAL.values(), EOS])
    form = FORMATS["MISTRAL"]
    marks = {mark: SPECIAL[mark] for mark in ("[TOOL_CALLS]", "[ARGS]")}
    wanted = ResponseFormat(calls=call_grammar(form, marks, TOOLS, "auto", is_parallel=True))
    matcher = special.compile(wanted).result(20)()
    text = [*b"Hi [TOOL_CALLS]", marks["[TOOL_CALLS]"], *b"get_all", marks["[ARGS]"], *b"{}"]
    for token_id in text:
        assert matcher.accept_token(token_id)
    assert not matcher.accept_token(ord("x"))
    assert matcher.accept_token(EOS)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"type": "object", "properties": {"a": {"type": "wizard"}}}, "are no valid JSON schema"),
        ({"properties": {"a": {"$ref": "https://example.org/a.json"}}}, "'get'"),
    ],
)
def test_unusable_tool_parameters_are_refused_by_name(
    compiler: GrammarCompiler, parameters: dict[str, object], sentence: str
) -> None:
    tools = (Tool(ToolFunction("get", parameters=parameters, strict=True)),)
    calls = call_grammar(FORMATS["HERMES"], {}, tools, "auto", is_parallel=True)
    with pytest.raises(GrammarError, match=sentence):
        compiler.compile(ResponseFormat(calls=calls)).result(20)
