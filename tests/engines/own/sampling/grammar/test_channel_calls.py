"""Calls in the channels of gpt-oss: whatever the logits say, the tokens are read as thoughts, text
and calls that keep their schema.
"""

import json
from collections import abc
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from torch import Tensor

from tests.engines.own.sampling.grammar.test_calls import SCHEMAS, TOOLS
from tests.engines.own.sampling.helpers import CPU, ToyModel, draw_to_end
from tests.support.tokenizers import channels, harmony
from tokenmill_schemas.chat import Message
from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import ChoiceResult
from tokenmill_worker.contract.requests import GenerationRequest, Prompt
from tokenmill_worker.engines.own.cpu.kernels.draw import DrawKernel
from tokenmill_worker.engines.own.model.vocabulary import vocabulary
from tokenmill_worker.engines.own.sampling import GrammarCompiler, Sampler
from tokenmill_worker.engines.own.sequence import Sequence
from tokenmill_worker.text.chat import tools as formats
from tokenmill_worker.text.chat.chat_format import AnswerForm, ChatFormat
from tokenmill_worker.text.chat.templates import TemplateError
from tokenmill_worker.text.job_output import JobOutput

EOS = next(iter(harmony().eos_token_ids))
THOUGHTS = "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
FINAL = "<|channel|>final<|message|>"
ANSWER: dict[str, object] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}


class Caller(ToyModel):
    """Random logits that favour marks and ends."""

    def favour(self, values: Tensor) -> None:
        values[256:] += 5.0
        values[[ord(c) for c in '"}c']] += 3.0
        values[128:256] -= 100.0


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    folder = tmp_path_factory.mktemp("harmony")
    harmony()._tokenizer.save_pretrained(folder)
    found = vocabulary(folder, EOS + 1, frozenset({EOS}), trust_remote_code=False)
    assert found is not None
    assert found.special_ids == tuple(range(256, EOS + 1))
    return GrammarCompiler(found.info, special_ids=found.special_ids, encode=found.encode)


def chat_format(tools: formats.ToolFormat = formats.CHANNELS) -> ChatFormat:
    return ChatFormat(harmony(), harmony().reasoning_format("auto"), tools)


def form_of(**fields: Any) -> tuple[AnswerForm, SamplingParams]:
    values: dict[str, Any] = {"job_id": "j", "messages": (Message("user", "Hi"),), "tools": TOOLS}
    request = JobRequest(**{**values, **fields})
    chat = chat_format()
    form = chat.answer_form(request, chat.render(request))
    generation = GenerationRequest(request_id="j", prompt=Prompt((1,)), params=request.params)
    bound = form.bound(generation)
    assert bound.thoughts is None
    return form, bound.params


def read(form: AnswerForm, ids: abc.Sequence[int]) -> tuple[ChoiceResult, JobOutput]:
    output = JobOutput.start(harmony(), SamplingParams(), form.opening, form.calls)
    for token_id in ids:
        output.push(0, (token_id,))
    output.end(0, FinishReason.STOP, with_last_token=True)
    return output.results()[0], output


def drawn(compiler: GrammarCompiler, params: SamplingParams, seed: int) -> list[int]:
    params = SamplingParams(temperature=1.0, response_format=params.response_format)
    sequence = Sequence("r", [1, 2, 3], 3, params, seed=seed)
    sampler, model = (
        Sampler(EOS + 1, CPU, frozenset({EOS}), compiler, DrawKernel()),
        Caller(EOS + 1, 64),
    )
    return draw_to_end(sampler, model, sequence, EOS)


def check(result: ChoiceResult) -> None:
    (call,) = result.tool_calls
    assert call.is_complete
    assert result.finish_reason is FinishReason.TOOL_CALLS
    jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
    deltas = result.call_deltas
    assert "".join(delta.arguments for delta in deltas) == call.arguments
    assert [(delta.id, delta.name) for delta in deltas if delta.name] == [(call.id, call.name)]


@pytest.mark.parametrize("answer", [None, ANSWER], ids=["text", "json"])
def test_drawn_answers_are_calls_or_answers(
    compiler: GrammarCompiler, answer: dict[str, object] | None
) -> None:
    wanted = None if answer is None else ResponseFormat(json_schema=answer)
    form, params = form_of(params=SamplingParams(response_format=wanted))
    num_calls = num_thoughts = 0
    for seed in range(40):
        ids = drawn(compiler, params, seed)
        result, _ = read(form, ids)
        num_thoughts += bool(result.reasoning)
        if result.tool_calls:
            num_calls += 1
            check(result)
        elif answer is not None:
            jsonschema.validate(json.loads(result.text), answer)
    assert 0 < num_calls < 40
    assert num_thoughts


def test_a_required_call_follows_thoughts_only(compiler: GrammarCompiler) -> None:
    form, params = form_of(tool_choice="required")
    for seed in range(20):
        check(read(form, drawn(compiler, params, seed))[0])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHTS + CALL.format("get_all", "{}"), ("I look.", "", ["get_all"])),
        (THOUGHTS + PREAMBLE + CALL.format("get_all", "{}"), ("I look.", "Wait.", ["get_all"])),
        (CALL.format("get", '{"city": "Rom"}'), ("", "", ["get"])),
        (THOUGHTS + FINAL + "commentary to=functions.get", ("I look.", None, [])),
    ],
)
def test_usual_channel_answers_are_admitted_and_read(
    compiler: GrammarCompiler, text: str, expected: tuple[str, str | None, list[str]]
) -> None:
    form, params = form_of()
    ids = harmony().encode(text)
    assert params.response_format is not None
    matcher = compiler.compile(params.response_format).result(20)()
    assert all(matcher.accept_token(token_id) for token_id in ids)
    assert matcher.is_terminated() or matcher.accept_token(EOS)
    result, _ = read(form, ids)
    thoughts, free, names = expected
    assert result.reasoning == thoughts
    assert result.text == (free if free is not None else text.partition(FINAL)[2])
    assert [call.name for call in result.tool_calls] == names


def test_an_answer_cut_at_any_token_is_incomplete_and_resumed_the_same() -> None:
    form, _ = form_of()
    ids = harmony().encode(THOUGHTS + CALL.format("get", '{"city": "Rom"}'))
    whole, output = read(form, ids)
    assert output.usage(1).reasoning_tokens < len(ids)
    for cut in range(len(ids)):
        result, _ = read(form, ids[:cut])
        assert not any(call.is_complete for call in result.tool_calls)
        assert [call.name for call in result.tool_calls] in ([], ["get"])
        assert whole.call_deltas[: len(result.call_deltas)] == result.call_deltas


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"params": SamplingParams(thinking_budget=5)}, "thinking_budget"),
        ({"add_generation_prompt": False}, "a prompt that does not end where an answer begins"),
    ],
)
def test_options_incompatible_with_calls_in_channels_are_refused(
    fields: dict[str, object], sentence: str
) -> None:
    with pytest.raises(TemplateError, match=sentence):
        form_of(**fields)


def test_calls_in_channels_need_thoughts_in_channels() -> None:
    request = JobRequest(job_id="j", messages=(Message("user", "Hi"),), tools=TOOLS)
    for tokenizer in (channels(), harmony()):
        chat = ChatFormat(tokenizer, None, formats.CHANNELS)
        with pytest.raises(TemplateError, match="no form of tool calls"):
            chat.answer_form(request, "<|start|>assistant")


@pytest.mark.parametrize("form", [formats.LLAMA3, formats.PYTHONIC])
def test_a_format_that_may_begin_as_a_call_does_is_refused(form: formats.ToolFormat) -> None:
    wanted = SamplingParams(response_format=ResponseFormat(json_schema={}))
    request = JobRequest(job_id="j", messages=(Message("user", "Hi"),), tools=TOOLS, params=wanted)
    with pytest.raises(TemplateError, match="response_format: a JSON answer may begin as a call"):
        chat_format(replace(form)).answer_form(request, "Hi")
