"""Responses through OpenAI's own client, in its strict mode, before a real worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.conftest import MODEL, SLOW, Gateway, new_key, running_gateway
from tests.support.waiting import until
from tests.support.worker import QUEUE, client_of, running_worker

pytestmark = pytest.mark.redis
LONG: dict[str, Any] = {
    "model": SLOW, "input": "Hello", "max_output_tokens": 3_000,
    "extra_body": {"ignore_eos": True},
}  # fmt: skip


@pytest.fixture
async def slow_client(redis_url: str, database: str) -> AsyncIterator[AsyncOpenAI]:
    """A client whose answers take long: 20 ms a token."""
    async with (
        running_worker(redis_url, database, model=SLOW),
        running_gateway(redis_url, database, models={SLOW: QUEUE}) as gateway,
        gateway.client() as client,
    ):
        yield client


async def streamed(client: Any, **body: Any) -> list[Any]:
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 12, **body}
    return [event async for event in await client.responses.create(stream=True, **body)]


async def test_a_plain_response_and_its_stream_have_the_same_answer(client: Any) -> None:
    plain = await client.responses.create(
        model=MODEL, input="Hello", max_output_tokens=12, temperature=0, metadata={"a": "b"}
    )
    events = await streamed(client, temperature=0)
    last = events[-1].response
    assert (plain.status, plain.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (plain.metadata, plain.temperature, plain.store) == ({"a": "b"}, 0, True)
    assert plain.output_text == last.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == plain.output_text
    assert plain.usage.output_tokens == last.usage.output_tokens == 12


async def test_a_stream_is_read_again_from_any_number_on_another_gateway(
    gateway: Gateway, client: Any
) -> None:
    events = await streamed(client)
    response_id = events[0].response.id
    async with (
        running_gateway(gateway.redis_url, gateway.database) as other,
        other.client() as there,
    ):
        for seen in (-1, 0, 5, len(events) - 2):
            after = {} if seen < 0 else {"starting_after": seen}
            again = await there.responses.retrieve(response_id, stream=True, **after)
            assert [event async for event in again] == events[seen + 1 :]


async def test_a_background_response_is_read_while_it_waits_and_after_its_end(
    redis_url: str, database: str
) -> None:
    async with running_gateway(redis_url, database) as gateway, gateway.client() as client:
        asked = await client.responses.create(
            model=MODEL,
            input="Hello",
            max_output_tokens=8,
            background=True,
            extra_body={"ignore_eos": True},
        )
        waiting = await client.responses.retrieve(asked.id)
        assert (asked.status, waiting.status, waiting.background) == ("queued", "queued", True)
        async with running_worker(redis_url, database):

            async def is_over() -> bool:
                return bool((await client.responses.retrieve(asked.id)).status == "incomplete")

            await until(is_over)
            over = await client.responses.retrieve(asked.id)
            assert over.usage is not None
            assert (over.usage.output_tokens, over.created_at) == (8, asked.created_at)


async def test_the_last_event_has_the_response_that_is_retrieved_afterwards(client: Any) -> None:
    for _ in range(12):  # they end in several parts of a second
        last = (await streamed(client))[-1].response
        assert await client.responses.retrieve(last.id) == last


async def test_a_cancelled_background_response_keeps_its_text_and_may_be_cancelled_again(
    slow_client: Any,
) -> None:
    client = slow_client
    asked = await client.responses.create(background=True, **LONG)
    first = await client.responses.cancel(asked.id)
    second = await client.responses.cancel(asked.id)
    assert (first.status, first) == ("cancelled", second)


async def test_a_conversation_goes_on_from_input_and_output_of_its_chain(
    client: Any,
) -> None:
    first = await client.responses.create(
        model=MODEL, input="One", max_output_tokens=4, instructions="Be brief."
    )
    second = await client.responses.create(
        model=MODEL, input="Two", max_output_tokens=4, previous_response_id=first.id
    )
    third = await client.responses.create(
        model=MODEL, input="Three", max_output_tokens=4, previous_response_id=second.id
    )
    whole = await client.responses.create(
        model=MODEL,
        max_output_tokens=4,
        input=[
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "Two"},
            {"role": "assistant", "content": second.output_text},
            {"role": "user", "content": "Three"},
        ],
    )
    assert third.usage is not None
    assert whole.usage is not None
    assert third.usage.input_tokens == whole.usage.input_tokens
    assert third.previous_response_id == second.id
    items = await client.responses.input_items.list(third.id)
    assert [item.content[0].text for item in items.data] == ["Three"]


async def test_a_deleted_or_unstored_response_is_gone_and_cannot_be_continued(
    client: Any,
) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": "Hello", "max_output_tokens": 4}
    deleted = await client.responses.create(**body)
    await client.responses.delete(deleted.id)
    unstored = await client.responses.create(**body, store=False)
    for gone in (deleted.id, unstored.id):
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone)
        with pytest.raises(openai.BadRequestError, match="no stored response"):
            await client.responses.create(**body, previous_response_id=gone)


async def test_another_tenant_s_response_is_as_one_that_never_was(
    redis_url: str, database: str
) -> None:
    mine, theirs = new_key(database, "mine"), new_key(database, "theirs")
    async with (
        running_worker(redis_url, database),
        running_gateway(redis_url, database, is_open=False) as gateway,
        gateway.client(mine) as me,
        gateway.client(theirs) as they,
    ):
        made = await me.responses.create(model=MODEL, input="Hi", max_output_tokens=4)
        assert (await me.responses.retrieve(made.id)).id == made.id
        unknown = "resp_01a22303-9cf8-7bcc-a910-a8c23f13e97a"
        for call in (they.responses.retrieve, they.responses.delete, they.responses.cancel):
            said = []
            for response_id in (made.id, unknown):
                with pytest.raises(openai.NotFoundError) as refused:
                    await call(response_id)
                said.append(str(refused.value).replace(response_id, "ID"))
            assert said[0] == said[1]


async def test_a_client_that_hangs_up_cancels_its_answer(
    redis_url: str, database: str, slow_client: Any
) -> None:
    stream = await slow_client.responses.create(stream=True, **LONG)
    first = await anext(aiter(stream))
    await stream.close()
    job = first.response.id.removeprefix("resp_")
    async with client_of(redis_url, database) as queue:
        result = await queue.result(job, timeout=60)
    assert result.status.value == "cancelled"


async def test_a_background_stream_goes_on_without_its_client(slow_client: Any) -> None:
    client = slow_client
    stream = await client.responses.create(
        stream=True, background=True, **{**LONG, "max_output_tokens": 60}
    )
    first = await anext(aiter(stream))
    await stream.close()
    again = await client.responses.retrieve(first.response.id, stream=True)
    events = [event async for event in again]
    assert events[0] == first
    assert events[-1].response.usage.output_tokens == 60


async def test_a_silent_stream_has_comments_that_openai_s_client_skips(
    redis_url: str, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill_gateway.sse.SILENCE_S", 0.1)
    async with running_gateway(redis_url, database) as gateway, gateway.client() as client:
        asked = await client.responses.create(
            model=MODEL, input="Hello", max_output_tokens=4, background=True
        )
        again = await client.responses.retrieve(asked.id, stream=True)  # its events have ids
        reading = asyncio.ensure_future(all_of(again))
        raw = client.responses.with_streaming_response.retrieve(asked.id, stream=True)
        async with raw as answer:
            lines = [line async for line in until_comment(answer)]
        assert lines[-1].startswith(":")
        assert lines[-2] == ""
        async with running_worker(redis_url, database):
            events = await reading
    assert events[-1].response.usage.output_tokens == 4


async def all_of(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def until_comment(answer: Any) -> AsyncIterator[str]:
    """Yield the lines of a stream up to its first comment."""
    async for line in answer.iter_lines():
        yield line
        if line.startswith(":"):
            return


UNSUPPORTED: list[tuple[dict[str, Any], str | None]] = [
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": "scale"}, "service_tier"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"tools": [{"type": "web_search"}]}, None),
    ({"background": True, "store": False}, "store"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"background_options": {"completion_window": "2h"}}, "background_options"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"nonsense": 1}, "nonsense"),
]


async def test_a_parameter_that_is_not_supported_is_refused_by_name(client: Any) -> None:
    for body, param in UNSUPPORTED:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="Hello", extra_body=body)
        assert param is None or refused.value.param == param


async def test_a_tier_is_a_class_of_the_queue(gateway: Gateway, client: Any) -> None:
    tiers = {"priority": "interactive", "default": "standard", "flex": "bulk"}
    async with client_of(gateway.redis_url, gateway.database) as queue:
        for tier, priority in tiers.items():
            made = await client.responses.create(
                model=MODEL, input="Hi", max_output_tokens=4, service_tier=tier
            )
            job = await queue.status(made.id.removeprefix("resp_"))
            assert (made.service_tier, job.priority) == (tier, priority)


async def test_requests_with_one_idempotency_key_have_one_answer(client: Any) -> None:
    headers = {"Idempotency-Key": "once"}
    first, second = await asyncio.gather(
        *(streamed(client, extra_headers=headers) for _ in range(2))
    )
    assert first == second
    with pytest.raises(openai.UnprocessableEntityError):
        await streamed(client, extra_headers=headers, input="Other")
