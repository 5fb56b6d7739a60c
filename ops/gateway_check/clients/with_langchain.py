"""LangChain for Python: chats and Responses."""

# mypy: ignore-errors

from functools import partial
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from shapes import Colour
from trying import COLOUR, KEY, MODEL, QUESTION, URL, is_city, tried


@tool
def sky(city: Literal["Rome", "Oslo"]) -> str:
    """Return the sky over a city."""
    return f"blue over {city}"


def model(is_responses: bool, tokens: int = 12) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=URL, api_key=KEY, use_responses_api=is_responses,
        max_tokens=tokens, temperature=0, max_retries=0, timeout=300, stream_usage=True,
    )  # fmt: skip


def plain(is_responses: bool) -> None:
    answer = model(is_responses).invoke(QUESTION)
    assert answer.text
    assert answer.usage_metadata["output_tokens"]


def stream(is_responses: bool) -> None:
    whole = None
    for chunk in model(is_responses).stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.text
    assert whole.usage_metadata["output_tokens"]


def structured(is_responses: bool) -> None:
    asked = model(is_responses, 60)
    assert asked.with_structured_output(Colour, method="json_schema").invoke(QUESTION).colour
    raw = asked.with_structured_output(
        {"title": "colour", "description": "A colour", **COLOUR}, method="json_schema"
    )
    assert raw.invoke(QUESTION)["colour"]


def tools(is_responses: bool) -> None:
    bound = model(is_responses, 60).bind_tools([sky], tool_choice="required", strict=True)
    answer = bound.invoke(QUESTION)
    is_city(answer.tool_calls[0]["args"])
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    is_city(whole.tool_calls[0]["args"])
    said = sky.invoke(answer.tool_calls[0])
    again = model(is_responses).bind_tools([sky]).invoke([("user", QUESTION), answer, said])
    assert again.usage_metadata["output_tokens"]


def conversation() -> None:
    first = model(True).invoke(QUESTION)
    following = model(True).invoke(
        "And one more?", previous_response_id=first.response_metadata["id"]
    )
    assert following.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


for api in ("chat", "responses"):
    for function in (plain, stream, structured, tools):
        tried(api, function.__name__, partial(function, api == "responses"))
tried("responses", "conversation", conversation)
