"""Producers and subscribers that meet faults as real ones do: a refused call is made again, a broken stream is taken
up where it broke. What they were told is kept for the checker.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from api_client import AsyncClient
from api_client.errors import QueueUnavailable
from tests.chaos.checker import Told

PAUSE_S = 0.1


async def submit(client: AsyncClient, key: str, **job: Any) -> str:
    """Until it is accepted; the key makes a repeated call the same job."""
    while True:
        try:
            return str(await client.submit(idempotency_key=key, **job))
        except QueueUnavailable:
            await asyncio.sleep(PAUSE_S)


async def listen(
    client: AsyncClient, job: str, told: Told, *, after_s: float = 0.0, leave_after: Callable[[], int] | None = None
) -> None:
    """To the end. `leave_after` says after how many chunks to hang up each time and call again later."""
    await asyncio.sleep(after_s)
    while not told.ended:
        left = leave_after() if leave_after is not None else 1 << 60
        try:
            stream = client.stream(job, starting_after=len(told.token_ids))
            try:
                async for chunk in stream:
                    told.hear(chunk)
                    left -= 1
                    if left <= 0:
                        break
            finally:
                await stream.aclose()
        except QueueUnavailable:
            pass
        await asyncio.sleep(PAUSE_S)


class Audience:
    """Of every four jobs one has a subscriber from the start, one who comes and goes, one who comes in the middle,
    and one who comes when all is over.
    """

    def __init__(self, client: AsyncClient, chance: random.Random) -> None:
        self.told: dict[str, list[Told]] = {}
        self._client = client
        self._chance = chance
        self._tasks: set[asyncio.Task[None]] = set()

    def attend(self, job: str) -> None:
        kind = len(self.told) % 4
        self.told[job] = [Told()]
        if kind == 0:
            self._listen(job)
        elif kind == 1:
            self._listen(job, leave_after=lambda: self._chance.randint(1, 20))
        elif kind == 2:
            self._listen(job, after_s=self._chance.uniform(0.2, 3.0))

    def _listen(self, job: str, **how: Any) -> None:
        task = asyncio.create_task(listen(self._client, job, self.told[job][0], **how))
        self._tasks.add(task)

    async def hear_the_end(self, timeout_s: float) -> None:
        """Everyone who listens hears the end, and then those who come late."""
        if self._tasks:
            done, pending = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for task in done:
                task.result()
        late = [(job, told[0]) for job, told in self.told.items() if not told[0].ended and not told[0].token_ids]
        for first in range(0, len(late), 50):
            group = late[first : first + 50]
            await asyncio.wait_for(asyncio.gather(*(listen(self._client, *item) for item in group)), timeout_s)
