"""pydantic-ai: chats and Responses."""

# mypy: ignore-errors

import asyncio
from functools import partial
from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from shapes import Colour
from trying import KEY, MODEL, QUESTION, URL, tried


def agent(is_responses: bool, tokens: int = 12, **more: Any) -> Agent[None, Any]:
    kind = OpenAIResponsesModel if is_responses else OpenAIChatModel
    model = kind(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
    return Agent(
        model, model_settings={"max_tokens": tokens, "temperature": 0, "timeout": 300}, **more
    )


def plain(is_responses: bool) -> None:
    found = agent(is_responses).run_sync(QUESTION)
    assert found.output
    assert found.usage.output_tokens


def stream(is_responses: bool) -> None:
    async def read() -> str:
        async with agent(is_responses).run_stream(QUESTION) as found:
            return "".join([text async for text in found.stream_text(delta=True)])

    assert asyncio.run(read())


def structured(is_responses: bool) -> None:
    assert agent(is_responses, 60, output_type=NativeOutput(Colour)).run_sync(QUESTION).output


def tools(is_responses: bool) -> None:
    asked = agent(is_responses, 60, output_type=ToolOutput(Colour))
    assert asked.run_sync(QUESTION).output.colour

    async def read() -> Any:
        async with asked.run_stream(QUESTION) as found:
            return await found.get_output()

    assert asyncio.run(read()).colour


for api in ("chat", "responses"):
    for function in (plain, stream, structured, tools):
        tried(api, function.__name__, partial(function, api == "responses"))
