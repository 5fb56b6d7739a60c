"""The `openai` package sends its requests to a queue and reads the answers: bodies that it writes
become jobs, and its own parsers and tool helpers read our bodies.
"""

import json
from typing import Any, Literal

import httpx2 as httpx
import msgspec
import pytest
from openai import OpenAI, pydantic_function_tool
from openai.types.responses import ParsedResponseFunctionToolCall
from pydantic import BaseModel

from tests.client.bulk.support import result
from tokenmill.bulk.formats.input_file import BadLine, BatchDefaults, parse, to_request
from tokenmill.bulk.formats.output_line import of_result
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.result import ChoiceResult, GeneratedCall
from tokenmill_schemas.validation import problems

BATCH = "batch_1"


class City(BaseModel):
    name: str
    size: Literal["small", "large"]


BERN = '{"name": "Bern", "size": "small"}'
CALL = ChoiceResult(
    tool_calls=(GeneratedCall("c1", "City", BERN),), finish_reason=FinishReason.TOOL_CALLS
)
TEXT = ChoiceResult(text=BERN, finish_reason=FinishReason.STOP)


class Queue:
    """Takes each request as a line of a bulk file, and answers it with a result."""

    def __init__(self, choice: ChoiceResult) -> None:
        self.jobs: list[JobRequest] = []
        self._choice = choice

    def __call__(self, request: httpx.Request) -> httpx.Response:
        line = {
            "custom_id": "a",
            "method": request.method,
            "url": request.url.path,
            "body": json.loads(request.content),
        }
        parsed = parse(1, json.dumps(line).encode())
        assert not isinstance(parsed, BadLine)
        job = to_request(parsed, BatchDefaults(BATCH))
        assert not isinstance(job, BadLine), job
        self.jobs.append(job)
        received = result(BATCH, 1, metadata=job.metadata, choices=(self._choice,))
        return httpx.Response(
            200, json=json.loads(of_result(BATCH, received).data)["response"]["body"]
        )

    @property
    def client(self) -> OpenAI:
        transport = httpx.Client(transport=httpx.MockTransport(self))
        return OpenAI(api_key="k", base_url="http://queue/v1", http_client=transport)


def test_openai_s_parser_reads_a_chat_answer_into_a_pydantic_model() -> None:
    queue = Queue(TEXT)
    received = queue.client.chat.completions.parse(
        model="m", messages=[{"role": "user", "content": "A city"}], response_format=City
    )
    assert received.choices[0].message.parsed == City(name="Bern", size="small")
    wanted = queue.jobs[0].params.response_format
    assert wanted is not None
    assert (wanted.strict, sorted(schema_of(wanted.json_schema)["required"])) == (
        True,
        ["name", "size"],
    )


def test_openai_s_parser_reads_chat_tool_calls_into_pydantic_models() -> None:
    queue = Queue(CALL)
    received = queue.client.chat.completions.parse(
        model="m",
        messages=[{"role": "user", "content": "A city"}],
        tools=[pydantic_function_tool(City)],
        tool_choice="required",
    )
    (call,) = received.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == City(name="Bern", size="small")
    assert [tool.function.name for tool in queue.jobs[0].tools] == ["City"]


@pytest.mark.parametrize("choice", [TEXT, CALL], ids=["answer", "call"])
def test_a_chat_with_tools_and_an_answer_model_is_parsed(choice: ChoiceResult) -> None:
    queue = Queue(choice)
    received = queue.client.chat.completions.parse(
        model="m",
        messages=[{"role": "user", "content": "A city"}],
        tools=[pydantic_function_tool(City)],
        response_format=City,
    )
    message = received.choices[0].message
    read = [call.function.parsed_arguments for call in message.tool_calls or []]
    assert [message.parsed, *read].count(City(name="Bern", size="small")) == 1
    (job,) = queue.jobs
    assert job.tools[0].function.strict
    assert job.params.response_format is not None
    assert problems(job) == []


def test_openai_s_parser_reads_a_response_into_a_pydantic_model() -> None:
    queue = Queue(TEXT)
    received = queue.client.responses.parse(model="m", input="A city", text_format=City)
    assert received.output_parsed == City(name="Bern", size="small")
    assert queue.jobs[0].params.response_format is not None


def test_openai_s_parser_reads_response_tool_calls_into_pydantic_models() -> None:
    queue = Queue(CALL)
    tool: Any = {"type": "function", **pydantic_function_tool(City)["function"]}
    received = queue.client.responses.parse(model="m", input="A city", tools=[tool])
    (call,) = received.output
    assert isinstance(call, ParsedResponseFunctionToolCall)
    assert json.loads(call.arguments) == {"name": "Bern", "size": "small"}
    assert queue.jobs[0].tools[0].function.strict


def test_a_chat_answer_is_accepted_as_history_of_the_next_request() -> None:
    queue = Queue(CALL)
    first = queue.client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "A city"}]
    )
    message: Any = first.choices[0].message
    queue.client.chat.completions.create(
        model="m",
        messages=[
            {"role": "user", "content": "A city"},
            message,
            {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        ],
    )
    messages = queue.jobs[1].messages
    assert messages is not None
    assert msgspec.to_builtins(messages[1].tool_calls)[0]["function"]["arguments"] == BERN


def schema_of(schema: dict[str, Any] | None) -> dict[str, Any]:
    assert schema is not None
    return schema
