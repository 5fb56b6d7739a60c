"""The session of a request's job: by its `prompt_cache_key`, or by its conversation."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from tests.gateway.conftest import MODEL, Gateway
from tests.support.worker import QUEUE
from tokenmill_schemas.keys import Keys

pytestmark = pytest.mark.redis
BODY: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}


async def session_of(gateway: Gateway, shown_id: str) -> Any:
    """Return the session in the hash of a job: a digest, or None."""
    async with Redis.from_url(gateway.redis_url) as redis:
        job: str = shown_id.partition("_")[2] or shown_id.partition("-")[2]
        return await redis.hget(Keys(QUEUE).job(job), "session")


async def test_the_turns_of_a_conversation_have_one_session(gateway: Gateway, client: Any) -> None:
    first = await client.responses.create(**BODY)
    second = await client.responses.create(**BODY, previous_response_id=first.id)
    third = await client.responses.create(**BODY, previous_response_id=second.id)
    other = await client.responses.create(**BODY)
    sessions = [await session_of(gateway, each.id) for each in (first, second, third, other)]
    assert sessions[0] == sessions[1] == sessions[2] is not None
    assert sessions[3] not in (None, sessions[0])


async def test_a_conversation_keeps_its_prompt_cache_key_until_another_comes(
    gateway: Gateway, client: Any
) -> None:
    first = await client.responses.create(**BODY, prompt_cache_key="a")
    second = await client.responses.create(**BODY, previous_response_id=first.id)
    third = await client.responses.create(
        **BODY, previous_response_id=second.id, prompt_cache_key="b"
    )
    fourth = await client.responses.create(**BODY, previous_response_id=third.id)
    sessions = [await session_of(gateway, each.id) for each in (first, second, third, fourth)]
    assert sessions[0] == sessions[1] is not None
    assert sessions[2] == sessions[3] not in (None, sessions[0])


async def test_chats_and_completions_with_one_prompt_cache_key_have_one_session(
    gateway: Gateway, client: Any
) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    one = await client.chat.completions.create(**chat, prompt_cache_key="a")
    plain = {"model": MODEL, "prompt": "Hi", "max_tokens": 4}
    other = await client.completions.create(**plain, extra_body={"prompt_cache_key": "a"})
    none = await client.chat.completions.create(**chat)
    unstored = await client.responses.create(**BODY, store=False)
    sessions = [await session_of(gateway, each.id) for each in (one, other, none, unstored)]
    assert sessions[0] == sessions[1] is not None
    assert sessions[2:] == [None, None]


async def test_a_repeated_request_with_an_idempotency_key_is_one_job(client: Any) -> None:
    """The first turn's session is its id, which a repeated request makes anew."""
    headers = {"Idempotency-Key": "k"}
    one = await client.responses.create(**BODY, extra_headers=headers)
    assert (await client.responses.create(**BODY, extra_headers=headers)).id == one.id


async def test_a_prompt_cache_key_that_is_too_long_is_refused_by_name(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt_cache_key must be a text") as refused:
        await client.responses.create(**BODY, prompt_cache_key="x" * 10_000)
    assert refused.value.param == "prompt_cache_key"
