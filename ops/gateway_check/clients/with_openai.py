"""OpenAI's client for Python, which refuses answers and events that its types do not fit."""

# mypy: ignore-errors

import json
import time
from typing import Any

from openai import OpenAI
from trying import COLOUR, KEY, MODEL, QUESTION, SKY, URL, is_city, is_colour, tried

client: Any = OpenAI(
    base_url=URL, api_key=KEY, max_retries=0, timeout=300, _strict_response_validation=True
)
CHAT: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12,
    "temperature": 0,
}  # fmt: skip
TOOL = {"name": "sky", "description": "The sky over a city", "parameters": SKY, "strict": True}
TOOLS = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
RESPONSE: dict[str, Any] = {
    "model": MODEL, "input": QUESTION, "max_output_tokens": 12, "temperature": 0,
}  # fmt: skip


# ── chats and completions ──


def chat() -> None:
    answer = client.chat.completions.create(**CHAT, n=2, logprobs=True, top_logprobs=2)
    assert answer.choices[1].message.content
    assert answer.choices[0].logprobs.content[0].top_logprobs
    assert answer.usage.completion_tokens


def chat_stream() -> None:
    options = {"include_usage": True, "include_obfuscation": True}
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options))
    whole = client.chat.completions.create(**CHAT).choices[0].message.content
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == whole
    assert chunks[-1].usage.completion_tokens


def chat_structured() -> None:
    schema = {"name": "colour", "schema": COLOUR, "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    options = {**CHAT, "max_tokens": 60, "response_format": form}
    is_colour(client.chat.completions.create(**options).choices[0].message.content)


def chat_tools() -> None:
    options = {**CHAT, "max_tokens": 60, **TOOLS}
    message = client.chat.completions.create(**options).choices[0].message
    call = message.tool_calls[0]
    is_city(call.function.arguments)
    arguments = ""
    for chunk in client.chat.completions.create(**options, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            arguments += piece.function.arguments or ""
    is_city(arguments)
    turns = [
        *CHAT["messages"], message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "blue"},
    ]  # fmt: skip
    again = client.chat.completions.create(**{**CHAT, "messages": turns, "tools": TOOLS["tools"]})
    assert again.choices[0].finish_reason


def chat_resume() -> None:
    headers = {"Idempotency-Key": f"chat-{time.time_ns()}"}
    options = {**CHAT, "temperature": 1, "stream": True, "extra_headers": headers}
    stream = client.chat.completions.create(**options)
    first = next(iter(stream))
    stream.close()
    again = list(client.chat.completions.create(**options))
    assert again[0] == first
    assert again[-1].choices[0].finish_reason


def completion() -> None:
    answer = client.completions.create(
        model=MODEL, prompt=["Red is", "Two is"], max_tokens=6, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1]


def completion_stream() -> None:
    # OpenAI sends a reason of null before the last chunk, which its strict types refuse
    lenient = OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
    chunks = list(lenient.completions.create(model=MODEL, prompt="Red", max_tokens=6, stream=True))
    assert chunks[-1].choices[0].finish_reason


# ── responses ──


def response() -> None:
    answer = client.responses.create(
        **RESPONSE, top_logprobs=2, include=["message.output_text.logprobs"], metadata={"a": "b"}
    )
    assert answer.output_text
    assert answer.output[0].content[0].logprobs[0].top_logprobs
    assert client.responses.retrieve(answer.id).output_text == answer.output_text


def response_stream() -> None:
    events = list(client.responses.create(**RESPONSE, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text


def response_structured() -> None:
    form = {"type": "json_schema", "name": "colour", "schema": COLOUR, "strict": True}
    options = {**RESPONSE, "max_output_tokens": 60, "text": {"format": form}}
    is_colour(client.responses.create(**options).output_text)


def response_tools() -> None:
    tool = {"type": "function", **TOOL}
    options = {**RESPONSE, "max_output_tokens": 60, "tools": [tool], "tool_choice": "required"}
    first = client.responses.create(**options)
    is_city(first.output[-1].arguments)
    events = list(client.responses.create(**options, stream=True))
    names = {event.type for event in events}
    assert "response.function_call_arguments.delta" in names, names
    output = {
        "type": "function_call_output", "call_id": first.output[-1].call_id, "output": "blue",
    }  # fmt: skip
    again = client.responses.create(
        **{**RESPONSE, "input": [output]}, previous_response_id=first.id, tools=[tool]
    )
    assert again.status in ("completed", "incomplete")


def response_resume() -> None:
    stream = client.responses.create(**RESPONSE, background=True, stream=True)
    seen = []
    for event in stream:
        seen.append(event)
        if len(seen) == 6:
            break
    stream.close()
    name, number = seen[0].response.id, seen[-1].sequence_number
    seen += client.responses.retrieve(name, stream=True, starting_after=number)
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen == list(client.responses.retrieve(name, stream=True))
    with client.responses.stream(response_id=name, starting_after=number) as helper:
        assert len(list(helper)) == len(seen) - number - 1
    assert client.responses.cancel(name).id == name


def response_conversation() -> None:
    first = client.responses.create(**RESPONSE)
    second = client.responses.create(**RESPONSE, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    client.responses.delete(first.id)


# ── files and batches ──


def batch() -> None:
    line = {
        "custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT,
    }  # fmt: skip
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    made = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    until = time.monotonic() + 300
    while made.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until, made
        time.sleep(0.5)
        made = client.batches.retrieve(made.id)
    answers = client.files.content(made.output_file_id).text.splitlines()
    assert [json.loads(answer)["custom_id"] for answer in answers] == ["a"]
    assert made.id in [one.id for one in client.batches.list()]
    assert file.id in [one.id for one in client.files.list()]
    assert client.files.delete(file.id).deleted


def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


tried("chat", "plain", chat)
tried("chat", "stream", chat_stream)
tried("chat", "structured", chat_structured)
tried("chat", "tools", chat_tools)
tried("chat", "resume", chat_resume)
tried("completions", "plain", completion)
tried("completions", "stream", completion_stream)
if hasattr(client, "responses"):
    tried("responses", "plain", response)
    tried("responses", "stream", response_stream)
    tried("responses", "structured", response_structured)
    tried("responses", "tools", response_tools)
    tried("responses", "resume", response_resume)
    tried("responses", "conversation", response_conversation)
tried("files, batches", "batch", batch)
tried("models", "plain", models)
