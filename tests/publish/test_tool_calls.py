"""Calls come in pieces that join to the result's, for any cut and any reader."""

import json
import math
from dataclasses import replace
from typing import NamedTuple

import pytest

from tests.publish.support import MODEL, Clock, FakeLog, delivery_of
from tests.support.tokenizers import byte_level, harmony
from tokenmill.operations.stream_position import StreamPosition
from tokenmill_schemas.chat import Message, Tool, ToolFunction
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import GeneratedCall
from tokenmill_worker.contract.events import TokenEvent
from tokenmill_worker.input.input_processor import InputProcessor
from tokenmill_worker.jobs import AdmittedJob, FinishedJob
from tokenmill_worker.publish.publisher import Publisher, PublishLimits
from tokenmill_worker.text.chat.tools import CHANNELS, HERMES, LLAMA3, XML, ToolFormat
from tokenmill_worker.text.tokenizer import Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ (tools or []) | length }} tools"
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": "é"}}\n</tool_call>'
IDS = byte_level().encode(f"I look. {CALL}\n{CALL}")
XML_CALL = "<tool_call>\n<function=get>\n<parameter=a>\né\n</parameter>\n</function>\n</tool_call>"
MESSAGE = "<|channel|>{}<|message|>{}"
NEXT = "<|end|><|start|>assistant"


class Case(NamedTuple):
    """An answer that calls `get` with {"a": "é"}, by a model with this form of calls."""

    form: ToolFormat
    tokenizer: Tokenizer
    answer: str
    num_calls: int

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(self.answer))


BYTES = Tokenizer(byte_level()._tokenizer, TEMPLATE)
CASES = {
    "hermes": Case(HERMES, BYTES, f"I look. {CALL}\n{CALL}", 2),
    "xml": Case(XML, BYTES, f"I look. {XML_CALL}\n{XML_CALL}", 2),
    "channels": Case(
        CHANNELS,
        harmony(),
        MESSAGE.format("analysis", "Hm")
        + NEXT
        + MESSAGE.format("commentary", "I look. ")
        + NEXT
        + MESSAGE.format("commentary to=functions.get <|constrain|>json", '{"a": "é"}'),
        1,
    ),
}
PARAMETERS: dict[str, object] = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = (Tool(ToolFunction("get", parameters=PARAMETERS)),)


def request_of(**fields) -> JobRequest:
    values = {"job_id": "job", "messages": (Message("user", "Hi"),), "tools": TOOLS} | fields
    return JobRequest(**values)


async def processed(
    request: JobRequest, log: tuple[Chunk, ...] = (), form=HERMES, tokenizer: Tokenizer = BYTES
):
    reasoning = tokenizer.reasoning_format("auto")
    model = replace(MODEL, eos_token_ids=tokenizer.eos_token_ids)
    processor = InputProcessor(
        tokenizer, model, clock=Clock(), reasoning=reasoning, tool_format=form
    )
    return processor.process(delivery_of(request, log))


async def admitted(
    request: JobRequest, log: tuple[Chunk, ...] = (), case: Case = CASES["hermes"]
) -> AdmittedJob:
    job = await processed(request, log, case.form, case.tokenizer)
    assert isinstance(job, AdmittedJob)
    return job


async def published(
    chunk_tokens: int,
    n: int = 1,
    ids=None,
    reason=FinishReason.STOP,
    case: Case = CASES["hermes"],
) -> tuple[list[Chunk], FinishedJob]:
    ids = case.ids if ids is None else ids
    log = FakeLog()
    limits = PublishLimits(chunk_tokens=chunk_tokens, chunk_wait_s=math.inf)
    publisher = Publisher(log, limits=limits)
    job = await admitted(request_of(params=SamplingParams(n=n)), case=case)
    publisher.open(job)
    finished: list[FinishedJob] = []
    for place, token_id in enumerate(ids):
        end = reason if place == len(ids) - 1 else None
        events = [
            TokenEvent(
                request_id=job.request_id, choice=c, token_ids=(token_id,), finish_reason=end
            )
            for c in range(n)
        ]
        finished += (await publisher.handle(events)).finished
    (one,) = finished
    return log.chunks.get("job", []), one


def joined(chunks: list[Chunk]) -> list[tuple[str, str, str]]:
    found: dict[int, list[str]] = {}
    for delta in (delta for chunk in chunks for delta in chunk.tool_calls):
        call = found.setdefault(delta.index, ["", "", ""])
        for place, text in enumerate((delta.id, delta.name, delta.arguments)):
            call[place] += text
    return [(call[0], call[1], call[2]) for _, call in sorted(found.items())]


def fields_of(calls: tuple[GeneratedCall, ...]) -> list[tuple[str, str, str]]:
    return [(call.id, call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [1, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_pieces_of_calls_join_to_the_result(case: Case, chunk_tokens: int, n: int) -> None:
    chunks, finished = await published(chunk_tokens, n, case=case)
    for choice in finished.result.choices:
        assert choice.finish_reason is FinishReason.TOOL_CALLS
        assert choice.text == "I look. "
        arguments = [json.loads(call.arguments) for call in choice.tool_calls]
        assert arguments == [{"a": "é"}] * case.num_calls
        own = [chunk for chunk in [*chunks, finished.final_chunk] if chunk.choice == choice.index]
        assert joined(own) == fields_of(choice.tool_calls)
        assert "".join(chunk.text for chunk in own) == choice.text
    ids = {call.id for choice in finished.result.choices for call in choice.tool_calls}
    assert len(ids) == case.num_calls * n


@pytest.mark.parametrize("source", ["log", "result"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_a_reader_that_begins_at_any_token_gets_the_remaining_calls(
    case: Case, source: str
) -> None:
    chunks, finished = await published(5, case=case)
    (choice,) = finished.result.choices
    for after in range(len(case.ids) + 1):
        seen = list(StreamPosition("job").accept_result(finished.result))[:after]
        cursor = StreamPosition("job", after)
        rest = (
            list(cursor.accept_result(finished.result))
            if source == "result"
            else [t for c in [*chunks, finished.final_chunk] for t in cursor.accept(c) or ()]
        )
        assert joined([*seen, *rest]) == fields_of(choice.tool_calls)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_an_answer_resumed_anywhere_has_the_same_calls(case: Case) -> None:
    _, finished = await published(1, case=case)
    for cut in range(1, len(case.ids), 3):
        log = Chunk(job_id="job", index=0, token_ids=case.ids[:cut])
        job = await admitted(request_of(), (log,), case)
        job.answer.push(0, case.ids[cut:])
        job.answer.end(0, FinishReason.STOP, with_last_token=True)
        assert job.answer.results() == finished.result.choices


async def test_a_cut_call_is_incomplete_and_the_finish_reason_is_length() -> None:
    _, finished = await published(1, ids=IDS[:-20], reason=FinishReason.LENGTH)
    (choice,) = finished.result.choices
    assert choice.finish_reason is FinishReason.LENGTH
    assert [call.is_complete for call in choice.tool_calls] == [True, False]
    job = await published(1, ids=IDS[:-20], reason=FinishReason.STOP)
    assert job[1].result.finish_reason is FinishReason.STOP


async def test_tools_are_passed_as_a_grammar_to_the_engine_and_to_the_template() -> None:
    job = await admitted(request_of(tool_choice="required"))
    bound = job.generation.params.response_format
    assert bound is not None
    assert bound.calls is not None
    assert bound.calls.is_required
    assert byte_level().decode(job.generation.prompt.token_ids) == "Hi1 tools"
    free = await admitted(request_of(tool_choice="none"))
    assert free.generation.params.response_format is None
    assert free.answer.choices[0].stream.is_plain
    assert byte_level().decode(free.generation.prompt.token_ids) == "Hi0 tools"


async def test_tools_for_a_model_without_a_call_form_are_refused() -> None:
    ended = await processed(request_of(), form=None)
    assert isinstance(ended, FinishedJob)
    assert ended.result.error is not None
    assert ended.result.error.message == (
        "tools cannot be used with this model: its chat template has no form of tool calls that is "
        "known"
    )
    assert not isinstance(await processed(request_of(tool_choice="none"), form=None), FinishedJob)
    assert isinstance(await processed(request_of(), form=LLAMA3), AdmittedJob)
