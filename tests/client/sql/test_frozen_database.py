"""A database that answers nothing holds up its own look-ups, and nothing else of the event loop."""

import asyncio

import pytest

from tests.support.postgres import PostgresServer
from tokenmill import AsyncClient
from tokenmill.errors import JobNotFound, QueueUnavailable
from tokenmill.sql import look_ups
from tokenmill_worker.record.migrate import upgrade

pytestmark = [pytest.mark.redis, pytest.mark.postgres]


async def test_a_frozen_database_blocks_no_thread_of_the_event_loop(
    redis_url: str, own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_postgres.create_database()
    upgrade(url)
    monkeypatch.setattr(look_ups, "LIMIT_S", 1.0)
    async with AsyncClient(redis_url, queue="q", database=url) as client:
        with pytest.raises(JobNotFound):
            await client.status("none")
        own_postgres.freeze()
        try:
            many = [client.status(f"none-{number}") for number in range(40)]
            found = await asyncio.gather(*many, return_exceptions=True)
            assert {type(error) for error in found} == {QueueUnavailable}
            assert {str(error) for error in found} == {"the database does not answer within 1 s"}
            async with asyncio.timeout(60):
                assert await asyncio.to_thread(lambda: "free") == "free"
        finally:
            own_postgres.thaw()
        with pytest.raises(JobNotFound):
            await client.status("none")
        # those that waited for the thaw
        await asyncio.to_thread(lambda: client._look_ups.close(wait=True))
