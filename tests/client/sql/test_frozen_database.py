"""A database that answers nothing holds up its own look-ups, and nothing else of a program."""

import asyncio
import sys

import pytest

from tests.support.postgres import PostgresServer
from tokenmill import AsyncClient, Client
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


def test_a_thread_waits_for_a_frozen_database_no_longer_than_the_limit(
    redis_url: str, own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_postgres.create_database()
    upgrade(url)
    monkeypatch.setattr(look_ups, "LIMIT_S", 1.0)
    with Client(redis_url, queue="q", database=url) as client:
        own_postgres.freeze()
        try:
            with pytest.raises(QueueUnavailable, match="does not answer within 1 s"):
                client.status("none")
        finally:
            own_postgres.thaw()
        with pytest.raises(JobNotFound):
            client.status("none")


PROGRAM = """
import sys
from tokenmill import Client
from tokenmill.sql import look_ups
look_ups.LIMIT_S = 1.0
Client(sys.argv[1], queue="q", database=sys.argv[2]).status("none")
"""


async def test_a_program_ends_while_its_look_up_waits_for_a_frozen_database(
    redis_url: str, own_postgres: PostgresServer
) -> None:
    url = own_postgres.create_database()
    upgrade(url)
    own_postgres.freeze()
    try:
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, redis_url, url, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(60):
            _, said = await program.communicate()
    finally:
        own_postgres.thaw()
    assert b"the database does not answer within 1 s" in said
