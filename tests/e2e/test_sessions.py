"""Chats before two workers: the turns of each stay where its prefix is, and move if that ends."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import until
from tests.support.worker import client_of, database_url, running_worker
from tokenmill import AsyncClient

pytestmark = pytest.mark.redis
CHATS, TURNS = 8, 6
COMMON: dict[str, Any] = {"model": "synthetic?step_ms=3"}
LONG: dict[str, Any] = {"prompt": "long", "max_tokens": 4_000, "ignore_eos": True}


class Chat:
    """A chat that goes on from its earlier turns."""

    def __init__(self, client: AsyncClient, number: int) -> None:
        self._client, self._name, self._text = client, f"chat {number}", ""

    async def turn(self) -> tuple[str, int]:
        """Return the worker of the next turn, and how many tokens of its prompt were cached."""
        self._text += f"The next turn of {self._name}: go on. " * 2
        job = await self._client.submit(
            prompt=self._text, max_tokens=10, ignore_eos=True, session=self._name
        )
        result = await self._client.result(job, timeout=60)
        self._text += result.text
        return result.worker_id, result.usage.cached_tokens

    async def turns(self, count: int) -> list[tuple[str, int]]:
        return [await self.turn() for _ in range(count)]


async def test_a_chat_s_turns_stay_at_its_worker_and_move_when_that_has_ended(
    redis_url: str, tmp_path: Path
) -> None:
    """The second worker, which runs a job too, has half of the turns without sessions."""
    database = database_url(tmp_path)
    async with contextlib.AsyncExitStack() as first:
        client = await first.enter_async_context(client_of(redis_url, database))
        await first.enter_async_context(
            running_worker(redis_url, database, worker_id="a", **COMMON)
        )
        await client.submit(**LONG)
        chats = [Chat(client, number) for number in range(CHATS)]
        assert {worker for worker, _ in await gathered(chats, 1)} == {"a"}
        async with (
            running_worker(redis_url, database, worker_id="b", **COMMON),
            client_of(redis_url, database) as other,
        ):
            busy = await other.submit_many([LONG] * 2)  # one for each

            async def runs_at_b() -> bool:
                return "b" in {(await other.status(job)).worker_id for job in busy}

            await until(runs_at_b)
            found = await gathered(chats, TURNS)
            at_a = [cached for worker, cached in found if worker == "a"]
            assert len(at_a) >= 0.75 * len(found), found
            assert all(cached > 0 for cached in at_a)
            await first.aclose()
            again = [Chat(other, number) for number in range(CHATS)]
            assert {worker for worker, _ in await gathered(again, 2)} == {"b"}
            for job in busy:
                await other.cancel(job)


async def gathered(chats: list[Chat], count: int) -> list[tuple[str, int]]:
    found = await asyncio.gather(*(chat.turns(count) for chat in chats))
    return [turn for turns in found for turn in turns]
