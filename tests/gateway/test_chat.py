"""Chats and completions through OpenAI's own client, before a real worker."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.conftest import MODEL, Gateway

pytestmark = pytest.mark.redis
CHAT = [{"role": "user", "content": "Hello"}]


async def test_a_chat_and_its_stream_have_the_same_answer(client: Any) -> None:
    plain = await client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=12, temperature=0, n=2
    )
    stream = await client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=12, temperature=0, n=2, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens == 24
    for choice in plain.choices:
        own = [one.choices[0] for one in chunks[:-1] if one.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own if one.finish_reason] == ["length"]


async def test_a_streamed_token_has_its_log_probability_once(client: Any) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=8, logprobs=True, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    scores = [
        entry
        async for chunk in stream
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or ()
    ]
    assert [entry.logprob <= 0 for entry in scores] == [True] * 8


async def test_a_completion_and_its_stream_have_the_same_text(gateway: Gateway) -> None:
    async with gateway.client() as client:
        plain = await client.completions.create(model=MODEL, prompt="Hello", max_tokens=9, seed=1)
    # OpenAI's types want a reason in every chunk, and OpenAI sends null until the last
    lenient = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    async with lenient:
        stream = await lenient.completions.create(
            model=MODEL, prompt="Hello", max_tokens=9, seed=1, stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == plain.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_refusal_of_the_worker_has_its_status_also_as_a_stream(client: Any) -> None:
    long = [{"role": "user", "content": "x" * 200_000}]
    for is_stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=long, stream=is_stream)
        assert refused.value.code == "context_length_exceeded"


async def test_models_are_listed_with_their_length(client: Any) -> None:
    found = [model async for model in await client.models.list()]
    assert [model.id for model in found] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_the_bytes_of_a_chat_s_event_are_json_of_one_line(gateway: Gateway) -> None:
    async with (
        gateway.client() as client,
        client.chat.completions.with_streaming_response.create(
            model=MODEL, messages=CHAT, max_tokens=3, stream=True
        ) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line async for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: ")) for line in lines[:-1])
