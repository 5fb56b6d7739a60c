"""A job's log is overwritten in mid-answer: its worker makes it again; subscribers see nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from redis.exceptions import ResponseError

from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill import AsyncClient
from tokenmill.transport.connect import connect_async
from tokenmill_schemas.chunk import Chunk

pytestmark = pytest.mark.redis

Spoil = Callable[[Any, str], Awaitable[object]]
MODEL = "synthetic?step_ms=30"  # there is no log for that time: a subscriber must handle it
NUM_TOKENS = 36
SPOILT_AT = (5, 15, 25)


async def write_over(redis: Any, log: str) -> None:
    await redis.set(log, "not a log", ex=60)


async def make_a_list(redis: Any, log: str) -> None:
    await redis.delete(log)
    await redis.rpush(log, "not a log")


async def delete(redis: Any, log: str) -> None:
    await redis.delete(log)


async def run_far_ahead(redis: Any, log: str) -> None:
    await redis.xadd(log, {"chunk": "not a chunk"})


async def run_ahead_to_the_end_of_all_ids(redis: Any, log: str) -> None:
    await redis.xadd(log, {"something": "else"}, id=f"{2**64 - 1}-{2**64 - 1}")


async def take_the_next_place(redis: Any, log: str) -> None:
    await add_behind_the_last(redis, log, "", lambda last: f"{last + 1}-0")


async def squeeze_in(redis: Any, log: str) -> None:
    await add_behind_the_last(redis, log, "?", lambda last: f"{last}-1")


async def add_behind_the_last(
    redis: Any, log: str, chunk: str, place: Callable[[int], str]
) -> None:
    """The worker may append between the two commands, or may be about to make the log again."""

    async def is_added() -> bool:
        with contextlib.suppress(ResponseError):
            for last, _ in await redis.xrevrange(log, count=1):
                await redis.xadd(log, {"chunk": chunk}, id=place(int(last.partition(b"-")[0])))
                return True
        return False

    await until(is_added, pause_s=0.001)


SPOILS = [
    write_over, make_a_list, delete, run_far_ahead, run_ahead_to_the_end_of_all_ids,
    take_the_next_place, squeeze_in,
]  # fmt: skip


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    connection: Any = connect_async(redis_url)
    yield connection
    await connection.aclose()


async def listen(
    client: AsyncClient, job: str, received: list[Chunk], *, leave_after: int = 1 << 30
) -> None:
    """To the end; hangs up after so many chunks, and comes back with its position."""
    while not received or not received[-1].is_last:
        stream = client.stream(
            job, starting_after=received[-1].position if received else 0, timeout=60
        )
        left = leave_after
        async for chunk in stream:
            received.append(chunk)
            left -= 1
            if not left:
                break
        await stream.aclose()


def answers_of(
    received: list[Chunk], num_choices: int
) -> list[tuple[list[int], tuple[int, ...], str]]:
    """Return for each choice the tokens' indexes, the tokens, and the text."""
    answers: list[tuple[list[int], tuple[int, ...], str]] = []
    for choice in range(num_choices):
        mine = [chunk for chunk in received if chunk.choice == choice]
        indexes = [index for chunk in mine for index in range(chunk.index, chunk.end)]
        ids = tuple(token for chunk in mine for token in chunk.token_ids)
        answers.append((indexes, ids, "".join(chunk.text for chunk in mine)))
    return answers


async def spoil_and_attend(
    client: AsyncClient, redis: Any, job: str, spoil: Spoil
) -> list[list[Chunk]]:
    """Overwrite the log three times, each with a new subscriber; return all received chunks."""
    audience: list[list[Chunk]] = [[], []]
    listening = [listen(client, job, audience[0]), listen(client, job, audience[1], leave_after=4)]
    tasks = [asyncio.create_task(each) for each in listening]
    for place in SPOILT_AT:
        while len(audience[0]) < place:
            assert not tasks[0].done()
            await asyncio.sleep(0.001)
        await spoil(redis, client.keys.log(job))
        audience.append([])
        tasks.append(asyncio.create_task(listen(client, job, audience[-1])))
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks)
    audience.append([])
    await listen(client, job, audience[-1])
    return audience


@pytest.mark.parametrize(
    ("spoil", "num_choices"), [*((spoil, 1) for spoil in SPOILS), (write_over, 3), (squeeze_in, 3)]
)
async def test_subscribers_get_each_token_once_and_in_order_though_the_log_is_overwritten(
    redis_url: str, redis: Any, tmp_path: Any, spoil: Spoil, num_choices: int
) -> None:
    asked: dict[str, Any] = {
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "seed": 5,
        "n": num_choices,
    }
    database = database_url(tmp_path)
    async with (
        running_worker(redis_url, database, model=MODEL),
        client_of(redis_url, database) as client,
    ):
        job, undisturbed = [await client.submit(prompt="go on", **asked) for _ in range(2)]
        audience = await spoil_and_attend(client, redis, job, spoil)
        wanted, result = (
            await client.result(undisturbed, timeout=60),
            await client.result(job, timeout=60),
        )
    everything = [(list(range(NUM_TOKENS)), each.token_ids, each.text) for each in wanted.choices]
    assert [answers_of(received, num_choices) for received in audience] == [everything] * len(
        audience
    )
    assert (result.status, result.choices) == (wanted.status, wanted.choices)
