"""litellm: chats, completions and Responses."""

# mypy: ignore-errors

from typing import Any

import litellm
from shapes import Colour
from trying import KEY, MODEL, QUESTION, SKY, URL, is_city, is_colour, tried

TO: dict[str, Any] = {
    "model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY, "timeout": 300, "max_retries": 0,
}  # fmt: skip
CHAT = {
    **TO,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 12,
    "temperature": 0,
}
FUNCTION = {"name": "sky", "parameters": SKY, "strict": True}


def plain() -> None:
    answer = litellm.completion(**CHAT)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens


def stream() -> None:
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    answer = litellm.stream_chunk_builder(chunks)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens


def structured() -> None:
    answer = litellm.completion(**{**CHAT, "max_tokens": 60, "response_format": Colour})
    is_colour(answer.choices[0].message.content)


def tools() -> None:
    options = {
        **CHAT, "max_tokens": 60, "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "required",
    }  # fmt: skip
    is_city(litellm.completion(**options).choices[0].message.tool_calls[0].function.arguments)
    answer = litellm.stream_chunk_builder(list(litellm.completion(**options, stream=True)))
    is_city(answer.choices[0].message.tool_calls[0].function.arguments)


def completion() -> None:
    answer = litellm.text_completion(
        **{**TO, "model": f"text-completion-openai/{MODEL}"}, prompt=QUESTION, max_tokens=6
    )
    assert answer.choices[0].text


def response() -> None:
    answer = litellm.responses(**TO, input=QUESTION, max_output_tokens=12, temperature=0)
    assert answer.output[0].content[0].text


def response_stream() -> None:
    events = list(
        litellm.responses(**TO, input=QUESTION, max_output_tokens=12, temperature=0, stream=True)
    )
    assert events[-1].type in ("response.completed", "response.incomplete"), events[-1]


def response_tools() -> None:
    answer = litellm.responses(
        **TO, input=QUESTION, max_output_tokens=60, temperature=0, tool_choice="required",
        tools=[{"type": "function", **FUNCTION}],
    )  # fmt: skip
    is_city(answer.output[-1].arguments)


tried("chat", "plain", plain)
tried("chat", "stream", stream)
tried("chat", "structured", structured)
tried("chat", "tools", tools)
tried("completions", "plain", completion)
tried("responses", "plain", response)
tried("responses", "stream", response_stream)
tried("responses", "tools", response_tools)
