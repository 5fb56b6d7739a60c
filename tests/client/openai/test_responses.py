"""Lines of OpenAI's Responses API: the same job as the chat that they mean, and their answers."""

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response as TheirResponse
from openai.types.responses import (
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from tests.client.bulk.support import result
from tests.client.openai.openai_bodies import CHAT, SCHEMA, TOOL
from tokenmill.bulk.formats.input_file import BadLine, BatchDefaults, parse, to_request
from tokenmill.bulk.formats.output_line import of_result
from tokenmill.openai.forms import read_forms
from tokenmill.openai.request_body import fields_of
from tokenmill_schemas.chat import Message, Tool, ToolFunction
from tokenmill_schemas.generation import FinishReason, ResponseFormat
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.openai import CHAT_URL, RESPONSES_URL
from tokenmill_schemas.result import GeneratedCall, JobResult

BATCH = "batch_abc"
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "g"}}


def job_of(**body: Any) -> JobRequest | BadLine:
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": RESPONSES_URL,
        "body": {"model": "m", "input": "Hi", **body},
    }
    parsed = parse(3, json.dumps(line).encode())
    return parsed if isinstance(parsed, BadLine) else to_request(parsed, BatchDefaults("batch_1"))


def taken(**body: Any) -> JobRequest:
    job = job_of(**body)
    assert isinstance(job, JobRequest), job
    return job


def test_text_input_with_instructions_becomes_a_system_and_a_user_message() -> None:
    job = taken(instructions="Be brief.", max_output_tokens=7, temperature=0.5, store=False)
    assert job.messages == (Message("system", "Be brief."), Message("user", "Hi"))
    assert (job.params.max_tokens, job.params.temperature) == (7, 0.5)
    assert job.metadata["endpoint"] == RESPONSES_URL


def test_response_items_as_input_become_the_messages_of_the_chat() -> None:
    job = taken(
        input=[
            {"role": "developer", "content": "Use tools."},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "Ask."}]},
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "content": [{"type": "output_text", "text": "Let me see."}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"n": 1}'},
            {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
            {"type": "function_call_output", "call_id": "c2",
             "output": [{"type": "input_text", "text": "sun"}]},
        ]
    )  # fmt: skip
    assert job.messages is not None
    asked, called, rain, sun = job.messages[1:]
    assert asked == Message("user", "Weather?")
    assert (called.role, called.content, called.reasoning) == ("assistant", "Let me see.", "Ask.")
    assert [(call.id, call.function.arguments) for call in called.tool_calls] == [
        ("c1", '{"n": 1}'),
        ("c2", "{}"),
    ]
    assert (rain.role, rain.tool_call_id, rain.content) == ("tool", "c1", "rain")
    assert (sun.tool_call_id, sun.content) == ("c2", "sun")


def test_the_output_items_of_an_answer_are_accepted_as_input() -> None:
    """A client appends the items of an answer to its input."""
    items = body_of(answer())["output"]
    said = [{"type": "function_call_output", "call_id": "c1", "output": "7"}]
    job = taken(input=[{"role": "user", "content": "Hi"}, *items, *said])
    assert job.messages is not None
    assert [message.role for message in job.messages] == ["user", "assistant", "tool"]
    assert (job.messages[1].reasoning, job.messages[1].content) == ("Hm", "☁")


def test_format_tools_effort_and_logprobs_of_a_response_are_read() -> None:
    form = {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA}
    assert taken(text={"format": form}).params.response_format == ResponseFormat(json_schema=SCHEMA)
    assert taken(text={"format": {"type": "text"}}).params.response_format is None
    job = taken(
        tools=[FUNCTION],
        tool_choice={"type": "function", "name": "f"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert job.tools == (Tool(ToolFunction("f", parameters={"type": "object"}, strict=True)),)
    assert (job.tool_choice, job.parallel_tool_calls) == ("function:f", False)
    assert job.chat_template_kwargs == {"reasoning_effort": "low"}
    assert (job.params.wants_logprobs, job.params.num_top_logprobs) == (True, 2)


def test_allowed_tools_are_the_only_ones_of_the_job() -> None:
    tools = [{**FUNCTION, "name": name} for name in "abc"]
    named = [{"type": "function", "name": name} for name in "ca"]
    for mode in ("auto", "required"):
        job = taken(
            tools=tools, tool_choice={"type": "allowed_tools", "mode": mode, "tools": named}
        )
        assert [tool.function.name for tool in job.tools or ()] == ["a", "c"]
        assert job.tool_choice == mode
        chat = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [CHAT_TOOL]}}
        body = {**CHAT, "model": "m", "tools": [CHAT_TOOL, TOOL], "tool_choice": chat}
        fields = fields_of(CHAT_URL, body)
        read_forms(fields)
        assert [tool["function"]["name"] for tool in fields["tools"]] == ["g"]


@pytest.mark.parametrize(
    ("allowed", "param"),
    [
        ({"mode": "auto", "tools": []}, "tool_choice.allowed_tools.tools"),
        ({"mode": "auto", "tools": [{"type": "function"}]}, "tool_choice.allowed_tools.tools[0]"),
        ({"mode": "any", "tools": [FUNCTION]}, "tool_choice.allowed_tools.mode"),
        ({"mode": ["auto"], "tools": [FUNCTION]}, "tool_choice.allowed_tools.mode"),
        ({"mode": "auto", "tools": [{**FUNCTION, "name": "g"}]}, "tool_choice"),
        ({"mode": "auto", "tools": [FUNCTION], "x": 1}, "tool_choice.allowed_tools.x"),
    ],
)
def test_a_wrong_choice_of_allowed_tools_is_refused_by_name(
    allowed: dict[str, Any], param: str
) -> None:
    refused = job_of(tools=[FUNCTION], tool_choice={"type": "allowed_tools", **allowed})
    assert isinstance(refused, BadLine), refused
    assert (refused.status, (refused.param or "").startswith(param)) == (400, True), refused


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": None}, "input", "missing_required_parameter"),
        ({"input": 5}, "input", "invalid_value"),
        ({"input": [5]}, "input[0]", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_parameter"),
        ({"input": [{"type": []}]}, "input[0]", "unsupported_parameter"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
            "unsupported_parameter",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
            "unknown_parameter",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "invalid_value"),
        ({"include": ["file_search_call.results"]}, "include", "unsupported_parameter"),
        ({"text": {"verbosity": "low"}}, "verbosity", "unsupported_parameter"),
        ({"reasoning": {"effort": "some"}}, "reasoning_effort", "invalid_value"),
        ({"messages": []}, "messages", "unknown_parameter"),
        ({"n": 2}, "n", "unknown_parameter"),
        ({"model": ""}, "model", "missing_required_parameter"),
    ],
)
def test_a_refused_response_body_names_the_parameter_and_the_code(
    body: dict[str, Any], param: str, code: str
) -> None:
    refused = job_of(**body)
    assert isinstance(refused, BadLine), refused
    assert (refused.status, refused.param, refused.message and refused.code) == (400, param, code)


# ── answers ──


def answer(**changes: Any) -> JobResult:
    job = result(BATCH, 4, metadata={"custom_id": "line-4", "endpoint": RESPONSES_URL})
    (choice,) = job.choices
    thinking = {
        "text": "☁",
        "text_ends": (0, 1),
        "reasoning": "Hm",
        "reasoning_ends": (2,),
        "tool_calls": (
            GeneratedCall("c1", "f", '{"n": 1}'),
            GeneratedCall("c2", "f", '{"n', is_complete=False),
        ),
    }
    return msgspec.structs.replace(
        job, choices=(msgspec.structs.replace(choice, **thinking | changes),)
    )


def body_of(job: JobResult) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(of_result(BATCH, job).data)["response"]["body"]
    return body


def test_an_answer_is_read_by_openai_s_response_type() -> None:
    received = TheirResponse.model_validate(body_of(answer()), strict=True)
    thoughts, message, call, cut = received.output
    assert isinstance(thoughts, ResponseReasoningItem)
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert isinstance(cut, ResponseFunctionToolCall)
    assert thoughts.content is not None
    assert (thoughts.content[0].text, received.output_text) == ("Hm", "☁")
    assert (call.call_id, call.name, call.arguments) == ("c1", "f", '{"n": 1}')
    assert [item["status"] for item in body_of(answer())["output"]] == [
        *["completed"] * 3,
        "incomplete",
    ]
    assert (received.status, received.model) == ("incomplete", "m")
    assert received.incomplete_details is not None
    assert received.incomplete_details.reason == "max_output_tokens"
    assert received.usage is not None
    assert (
        received.usage.input_tokens,
        received.usage.output_tokens,
        received.usage.total_tokens,
    ) == (5, 2, 7)
    assert received.usage.input_tokens_details.cached_tokens == 2
    assert received.usage.output_tokens_details.reasoning_tokens == 1
    (part,) = message.content
    assert part.type == "output_text"
    assert [entry.token for entry in part.logprobs or ()] == ["☁"]


def test_an_answer_of_calls_alone_has_no_message_item() -> None:
    calls = (GeneratedCall("c1", "f", "{}"),)
    job = answer(text="", tool_calls=calls, finish_reason=FinishReason.TOOL_CALLS, logprobs=None)
    received = TheirResponse.model_validate(body_of(job), strict=True)
    assert [item.type for item in received.output] == ["reasoning", "function_call"]
    assert (received.status, received.incomplete_details) == ("completed", None)
    assert of_result(BATCH, job).share.reasoning_tokens == 1
