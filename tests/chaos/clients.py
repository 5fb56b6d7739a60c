"""Producers and subscribers that handle faults as real ones do.

A refused call is made again, and a broken stream is resumed at its position. All that they receive
is kept for the checker.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.chaos.checker import Received
from tokenmill import AsyncClient, Client
from tokenmill.errors import QueueUnavailable

PAUSE_S = 0.1
NUM_THREADS = 4


async def submit(client: AsyncClient, key: str, **job: Any) -> str:
    """Submit a job and retry until the queue accepts it.

    `key` makes a repeated call the same job.
    """
    while True:
        try:
            return str(await client.submit(idempotency_key=key, **job))
        except QueueUnavailable:
            await asyncio.sleep(PAUSE_S)


async def cancel(client: AsyncClient, job: str, after_s: float) -> str:
    """Cancel a job after `after_s` seconds, retrying while the queue is unavailable.

    Returns the client's answer.
    """
    await asyncio.sleep(after_s)
    while True:
        try:
            return str(await client.cancel(job))
        except QueueUnavailable:
            await asyncio.sleep(PAUSE_S)


async def listen(
    client: AsyncClient,
    job: str,
    received: Received,
    *,
    after_s: float = 0.0,
    leave_after: Callable[[], int] | None = None,
) -> None:
    """Read a job's stream to its end.

    `leave_after` is the number of chunks after which to disconnect each time and resume later.
    """
    await asyncio.sleep(after_s)
    while not received.ended:
        left = leave_after() if leave_after is not None else 1 << 60
        try:
            stream = client.stream(job, starting_after=received.position)
            try:
                async for chunk in stream:
                    received.receive(chunk)
                    left -= 1
                    if left <= 0:
                        break
            finally:
                await stream.aclose()
        except QueueUnavailable:
            pass
        await asyncio.sleep(PAUSE_S)


def listen_in_a_thread(client: Client, job: str, received: Received) -> None:
    """Do what `listen` does with the threaded client, which opens one connection per stream."""
    while not received.ended:
        try:
            for chunk in client.stream(job, starting_after=received.position):
                received.receive(chunk)
        except QueueUnavailable:
            pass
        time.sleep(PAUSE_S)


class Subscribers:
    """The subscribers of one queue.

    Jobs get in turn one from the start, one that disconnects and resumes, one that joins in the
    middle, and one that joins after the end. A few jobs have one more, in a thread.
    """

    def __init__(self, client: AsyncClient, threaded: Client, chance: random.Random) -> None:
        self.received: dict[str, list[Received]] = {}
        self._client = client
        self._threaded = threaded
        self._chance = chance
        self._tasks: set[asyncio.Future[None]] = set()
        self._threads = ThreadPoolExecutor(NUM_THREADS, "subscribers")
        self._num_in_threads = 0

    def attend(self, job: str) -> None:
        kind = len(self.received) % 4
        self.received[job] = [Received()]
        if kind == 0:
            self._listen(job)
        elif kind == 1:
            self._listen(job, leave_after=lambda: self._chance.randint(1, 20))
        elif kind == 2:
            self._listen(job, after_s=self._chance.uniform(0.2, 3.0))
        if self._num_in_threads < NUM_THREADS:
            self._listen_in_a_thread(job)

    def _listen(self, job: str, **how: Any) -> None:
        self._tasks.add(
            asyncio.create_task(listen(self._client, job, self.received[job][0], **how))
        )

    def _listen_in_a_thread(self, job: str) -> None:
        received = Received()
        self.received[job].append(received)
        self._num_in_threads += 1
        task = asyncio.get_running_loop().run_in_executor(
            self._threads, listen_in_a_thread, self._threaded, job, received
        )
        task.add_done_callback(self._leave_thread)
        self._tasks.add(task)

    def _leave_thread(self, _task: object) -> None:
        self._num_in_threads -= 1

    async def wait_for_ends(self, timeout_s: float) -> None:
        """Wait until all subscribers have the end, then run the late ones.

        The checker reports a subscriber that gets no end.
        """
        if self._tasks:
            done, pending = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for task in done:
                task.result()
        late = [
            (job, received[0])
            for job, received in self.received.items()
            if not received[0].ended and not received[0].num_tokens
        ]
        for first in range(0, len(late), 50):
            group = [
                asyncio.create_task(listen(self._client, *item))
                for item in late[first : first + 50]
            ]
            _, pending = await asyncio.wait(group, timeout=timeout_s)
            for task in pending:
                task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
