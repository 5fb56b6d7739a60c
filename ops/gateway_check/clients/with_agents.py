"""OpenAI's Agents SDK for Python: chats and Responses."""

# mypy: ignore-errors

import asyncio
from functools import partial
from typing import Any, Literal

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from openai import AsyncOpenAI
from shapes import Colour
from trying import KEY, MODEL, QUESTION, URL, tried


@function_tool
def sky(city: Literal["Rome", "Oslo"]) -> str:
    """Return the sky over a city."""
    return f"blue over {city}"


async def run(is_responses: bool, tokens: int, is_stream: bool = False, **agent: Any) -> Any:
    async with AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=300) as client:
        config = RunConfig(
            model_provider=OpenAIProvider(openai_client=client, use_responses=is_responses),
            tracing_disabled=True,
        )
        settings = ModelSettings(
            max_tokens=tokens, temperature=0, include_usage=True, **agent.pop("more", {})
        )
        asked = Agent(name="a", model=MODEL, model_settings=settings, **agent)
        if not is_stream:
            return await Runner.run(asked, QUESTION, run_config=config)
        streamed = Runner.run_streamed(asked, QUESTION, run_config=config)
        kinds = {event.type async for event in streamed.stream_events()}
        assert "raw_response_event" in kinds
        return streamed


def plain(is_responses: bool) -> None:
    found = asyncio.run(run(is_responses, 12))
    assert found.final_output
    assert found.context_wrapper.usage.output_tokens


def stream(is_responses: bool) -> None:
    assert asyncio.run(run(is_responses, 12, is_stream=True)).final_output


def structured(is_responses: bool) -> None:
    assert asyncio.run(run(is_responses, 60, output_type=Colour)).final_output.colour


def tools(is_responses: bool) -> None:
    for is_stream in (False, True):
        found = asyncio.run(
            run(
                is_responses, 60, is_stream, tools=[sky], more={"tool_choice": "required"},
                tool_use_behavior="stop_on_first_tool",
            )
        )  # fmt: skip
        assert found.final_output.startswith("blue over"), found.final_output


for api in ("chat", "responses"):
    for function in (plain, stream, structured, tools):
        tried(api, function.__name__, partial(function, api == "responses"))
