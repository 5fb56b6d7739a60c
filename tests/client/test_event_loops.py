"""An AsyncClient in another event loop than its own."""

import asyncio

import pytest

from tokenmill import AsyncClient
from tokenmill.errors import ConfigurationError

pytestmark = pytest.mark.redis


def test_an_async_client_in_a_second_event_loop_raises_one_sentence(redis_url: str) -> None:
    client = AsyncClient(redis_url, queue="q")

    async def first_chunk() -> None:
        async for _ in client.stream("none"):
            pass

    with asyncio.Runner() as own, asyncio.Runner() as other:
        own.run(client.depth())
        for call in (client.depth, client.close, first_chunk, lambda: client.result("none")):
            with pytest.raises(ConfigurationError, match="was used in another event loop"):
                other.run(call())
        own.run(client.depth())
        own.run(client.close())


def test_an_async_client_may_be_created_outside_its_loop_and_closed_unused(redis_url: str) -> None:
    client, unused = AsyncClient(redis_url, queue="q"), AsyncClient(redis_url, queue="q")

    async def work() -> int:
        async with client:
            return (await client.depth()).num_queued

    assert asyncio.run(work()) == 0
    asyncio.run(unused.close())
