"""The rules of Open Responses' acceptance tests that need no image and no WebSocket, as
tests of our own. `ops/gateway-check` judges the schema of each answer and event.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import MODEL, Gateway, running_gateway
from tests.support.tiny_llama import save
from tests.support.worker import QUEUE, running_worker

pytestmark = pytest.mark.redis
MEMBERS = {
    "background", "completed_at", "created_at", "error", "frequency_penalty", "id",
    "incomplete_details", "instructions", "max_output_tokens", "max_tool_calls", "metadata",
    "model", "object", "output", "parallel_tool_calls", "presence_penalty", "previous_response_id",
    "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "status", "store",
    "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation", "usage",
}  # fmt: skip
WEATHER = {
    "type": "function", "name": "weather", "description": "The weather in a city", "strict": True,
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"], "additionalProperties": False,
    },
}  # fmt: skip
# a drawn model would think until its length is over
AT_ONCE: dict[str, Any] = {
    "max_output_tokens": 200, "parallel_tool_calls": False,
    "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object"}}


@pytest.fixture
async def gateway(redis_url: str, database: str, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway before a model that can call tools; its letters are drawn."""
    folder = save(tmp_path / "model")
    options: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "aliases": f"{MODEL}={folder}"}
    async with (
        running_worker(redis_url, database, model=str(folder), **options),
        running_gateway(redis_url, database, models={MODEL: QUEUE}) as gateway,
    ):
        yield gateway


async def asked(gateway: Gateway, **body: Any) -> str:
    whole = {"model": MODEL, "input": "Hello", "max_output_tokens": 60, **body}
    headers = {"content-type": "application/json"}

    def ask() -> str:
        url = f"{gateway.url}/v1/responses"
        request = urllib.request.Request(url, json.dumps(whole).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
            return bytes(answer.read()).decode()

    return await asyncio.to_thread(ask)


async def response(gateway: Gateway, **body: Any) -> dict[str, Any]:
    """Return an answer that has all members, at least one item, and no open item but the last."""
    found: dict[str, Any] = json.loads(await asked(gateway, **body))
    assert found.keys() >= MEMBERS
    is_complete(found)
    return found


async def events(gateway: Gateway, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which is named as its type and numbered."""
    *blocks, end = (await asked(gateway, stream=True, **body)).removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"  # and there is no id
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[0]["response"].keys() == found[-1]["response"].keys() >= MEMBERS
    is_complete(found[-1]["response"])
    return found


def is_complete(found: dict[str, Any]) -> None:
    statuses = [item["status"] for item in found["output"]]
    assert statuses
    assert set(statuses[:-1]) <= {"completed"}
    assert found["status"] in ("completed", "incomplete")
    assert statuses[-1] == found["status"] or found["output"][-1]["type"] != "message"


SAID: dict[str, Any] = {
    "a text": "Hello",
    "a user's message": [{"type": "message", "role": "user", "content": "Say three words."}],
    "a system's message": [
        {"type": "message", "role": "system", "content": "Be brief."},
        {"type": "message", "role": "user", "content": "Hello"},
    ],
    "several turns": [
        {"type": "message", "role": "user", "content": "I am Ada."},
        {"type": "message", "role": "assistant", "content": "Hello Ada."},
        {"type": "message", "role": "user", "content": "Who am I?"},
    ],
    "an assistant's message with its phase": [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "I look.", "phase": "commentary"},
        {"role": "assistant", "content": "Blue.", "phase": "final_answer"},
        {"role": "user", "content": "Why?"},
    ],
}  # fmt: skip


async def test_every_kind_of_input_has_an_answer_with_all_members(gateway: Gateway) -> None:
    for said in SAID.values():
        found = await response(gateway, input=said, temperature=0)  # else it may think first
        assert found["output"][0]["content"][0]["type"] == "output_text"


async def test_a_stream_has_named_numbered_events_and_ends_with_the_whole_answer(
    gateway: Gateway,
) -> None:
    found = await events(gateway, input=SAID["several turns"], temperature=0)
    text = "".join(e["delta"] for e in found if e["type"] == "response.output_text.delta")
    last = found[-1]["response"]
    assert found[-1]["type"] == f"response.{last['status']}"
    assert last["output"][0]["content"][0]["text"] == text


async def test_a_required_tool_is_called_and_its_output_is_taken(gateway: Gateway) -> None:
    found = await response(gateway, tools=[WEATHER], tool_choice="required", **AT_ONCE)
    call = found["output"][-1]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["city"] in ("Rome", "Oslo")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    asked_first = {"role": "user", "content": "Hello"}
    await response(gateway, input=[asked_first, call, output], tools=[WEATHER])
    await response(
        gateway, input=[output], tools=[WEATHER], previous_response_id=found["id"]
    )  # fmt: skip


async def test_a_streamed_call_begins_with_its_name_and_ends_whole(gateway: Gateway) -> None:
    found = await events(
        gateway, tools=[WEATHER], **AT_ONCE,
        tool_choice={"type": "function", "name": "weather"},
    )  # fmt: skip
    calls = [event for event in found if event.get("item", {}).get("type") == "function_call"]
    assert [event["type"].rpartition(".")[2] for event in calls] == ["added", "done"]
    assert calls[0]["item"]["name"] == "weather"
    pieces = [e for e in found if e["type"].startswith("response.function_call_arguments.")]
    assert "".join(e["delta"] for e in pieces[:-1]) == calls[1]["item"]["arguments"]
    assert pieces[-1]["arguments"] == calls[1]["item"]["arguments"]


async def test_no_tool_is_called_that_is_not_allowed(gateway: Gateway) -> None:
    allowed = {"type": "function", "name": "weather"}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "mode": mode, "tools": [allowed]}
        found = await response(gateway, tools=[CLOCK, WEATHER], tool_choice=choice, **AT_ONCE)
        called = {item["name"] for item in found["output"] if item["type"] == "function_call"}
        assert called <= {"weather"}
        assert called or mode == "auto"
        assert (found["tool_choice"], len(found["tools"])) == (choice, 2)  # as they were asked
