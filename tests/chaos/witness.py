"""Listens on every channel of a queue and finds chunks that were published twice.

It reads the bytes as plain MessagePack and takes part in no protocol. Messages are missed while its
connection is down, but a message that arrives twice was published twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import RedisError

from tests.chaos.checker import Violation


class Witness:
    """One per queue; `run` it until cancelled."""

    def __init__(self, url: str, queue: str) -> None:
        self.num_heard = 0
        self._client = redis.asyncio.Redis.from_url(url)
        self._pattern = f"tm:{{{queue}}}:chunks:*"
        self._tokens: Counter[tuple[str, int, int]] = Counter()
        self._ends: Counter[str] = Counter()

    async def run(self) -> None:
        while True:
            with contextlib.suppress(RedisError, OSError):
                async with self._client.pubsub() as pubsub:
                    await pubsub.psubscribe(self._pattern)
                    async for message in pubsub.listen():
                        if message["type"] == "pmessage":
                            self.receive(msgspec.msgpack.decode(message["data"]))
            await asyncio.sleep(0.05)

    def receive(self, chunk: dict[str, Any]) -> None:
        self.num_heard += 1
        job = chunk["job_id"]
        if chunk.get("status"):
            self._ends[job] += 1
        for place in range(len(chunk.get("token_ids", ()))):
            self._tokens[job, chunk.get("choice", 0), chunk["index"] + place] += 1

    def violations(self) -> list[Violation]:
        """Return the double publications."""
        found = [
            Violation(
                "duplicate",
                f"token {index} of choice {choice} of job {job} was published {count} times",
            )
            for (job, choice, index), count in self._tokens.items()
            if count > 1
        ]
        for job, count in self._ends.items():
            if count > 1:
                found.append(
                    Violation("duplicate", f"the end of job {job} was published {count} times")
                )
        return found

    async def close(self) -> None:
        await self._client.aclose()
