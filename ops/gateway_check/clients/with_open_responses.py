"""Judges answers and events by the types that are made from Open Responses' schema."""

# mypy: ignore-errors

import inspect
import json
import urllib.request
from typing import Any

import openresponses_types
from openresponses_types import ResponseResource
from trying import COLOUR, KEY, MODEL, QUESTION, SKY, URL, is_city, is_colour, tried

BODY: dict[str, Any] = {
    "model": MODEL, "input": QUESTION, "max_output_tokens": 60, "temperature": 0,
}  # fmt: skip
TOOL = {"type": "function", "name": "sky", "parameters": SKY, "strict": True}
NAMED = {"type": "function", "name": "sky"}
EVENTS = {
    next(iter(kind.model_fields["type"].annotation)).value: kind
    for name, kind in inspect.getmembers(openresponses_types)
    if name.endswith("StreamingEvent")
}


def ask(path: str, body: dict[str, Any] | None = None) -> str:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(URL + path, data, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return str(answer.read().decode())


def judged(response: dict[str, Any]) -> dict[str, Any]:
    """Return a response that fits, as far as the schema has room: for the echo of a JSON schema,
    which OpenAI's API sends, it has null alone.
    """
    form = response["text"]["format"]
    shown = {**form, "schema": None} if "schema" in form else form
    found = {**response, "text": {**response["text"], "format": shown}}
    ResponseResource.model_validate(found)
    assert not ResponseResource.model_fields.keys() - found.keys()
    return found


def whole(path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ask(path, body))
    judged(found)
    return found


def events(text: str) -> list[dict[str, Any]]:
    *blocks, end = text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]", end
    found = []
    for block in blocks:
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[0] != ":")
        event = json.loads(fields["data"])
        assert fields["event"] == event["type"]
        inner = {"response": judged(event["response"])} if "response" in event else {}
        EVENTS[event["type"]].model_validate(event | inner)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(body: dict[str, Any]) -> dict[str, Any]:
    return dict(events(ask("/responses", body | {"stream": True}))[-1]["response"])


def both(body: dict[str, Any]) -> dict[str, Any]:
    """Return the plain answer, after the streamed one was judged too."""
    streamed(body)
    return whole("/responses", body)


def plain() -> None:
    answer = whole("/responses", BODY | {"instructions": "Be brief.", "metadata": {"a": "b"}})
    assert answer["status"] == "completed", answer["status"]
    cut = whole("/responses", BODY | {"max_output_tokens": 2, "top_logprobs": 2})
    assert cut["status"] == "incomplete", cut["status"]


def stream() -> None:
    assert streamed(BODY)["status"] == "completed"
    scores = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    assert streamed(BODY | scores | {"max_output_tokens": 2})["status"] == "incomplete"


def structured() -> None:
    form = {"type": "json_schema", "name": "colour", "schema": COLOUR, "strict": True}
    answer = both(BODY | {"text": {"format": form}})
    is_colour(answer["output"][-1]["content"][0]["text"])


def tools() -> None:
    answer = both(BODY | {"tools": [TOOL], "tool_choice": "required"})
    call = answer["output"][-1]
    is_city(call["arguments"])
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "blue"}
    asked = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
    both(BODY | {"input": [asked, call, output], "tools": [TOOL], "tool_choice": "none"})
    choice = {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}
    assert both(BODY | {"tools": [TOOL], "tool_choice": choice})["output"][-1]["name"] == "sky"


def resume() -> None:
    first = whole("/responses", BODY | {"background": True})
    path = f"/responses/{first['id']}"
    found = events(ask(f"{path}?stream=true"))
    assert found[1]["type"] == "response.queued"
    assert whole(path) == found[-1]["response"]


def conversation() -> None:
    first = both(BODY)
    second = both(BODY | {"previous_response_id": first["id"]})
    assert second["previous_response_id"] == first["id"]


tried("responses", "plain", plain)
tried("responses", "stream", stream)
tried("responses", "structured", structured)
tried("responses", "tools", tools)
tried("responses", "resume", resume)
tried("responses", "conversation", conversation)
