"""Plays a worker: claims jobs and answers with numbered words, slowly enough for faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.support.queue import Queue, appended, end_of, token
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.codec import decode_request
from tokenmill_worker.errors import RedisUnavailable
from tokenmill_worker.jobs import AppendReply, Delivery
from tokenmill_worker.queue.job_stream import JobStream


async def answer(worker: JobStream, delivery: Delivery, num_tokens: int, pause_s: float) -> None:
    """Append tokens from the end of the job's log on, as a worker does.

    An append without confirmation is sent again. A cancelled job ends early.
    """
    index = len(delivery.log)
    while index < num_tokens:
        try:
            ((word, end),) = await appended(worker, [token(delivery, index)])
        except RedisUnavailable:
            await asyncio.sleep(0.02)
            continue
        if word is AppendReply.LOST:
            return
        index = end
        if word is AppendReply.CANCELLED:
            break
        await asyncio.sleep(pause_s)
    while True:
        try:
            await worker.finish([end_of(delivery, index)])
            return
        except RedisUnavailable:
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def playing(
    queue: Queue, *, pause_s: float = 0.002, worker_id: str = "player"
) -> AsyncIterator[JobStream]:
    """Answer every job with as many tokens as it asks for."""
    worker = queue.worker(worker_id)
    tasks: list[asyncio.Task[None]] = []

    async def run() -> None:
        while True:
            with contextlib.suppress(RedisUnavailable):
                for delivery in await worker.claim(8):
                    wanted = decode_request(delivery.payload).params.max_tokens or 1
                    tasks.append(asyncio.create_task(answer(worker, delivery, wanted, pause_s)))
            await asyncio.sleep(0.01)

    tasks.append(asyncio.create_task(run()))
    try:
        yield worker
    finally:
        while waiting := [task for task in tasks if not task.done()]:
            # again and again: Python 3.11's wait_for can swallow a cancellation
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting, timeout=0.2)
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


def assert_chunks(chunks: list[Chunk], num_tokens: int, first: int = 0) -> None:
    """Check that the tokens from `first` on came once each, in order, and then the end."""
    assert [i for chunk in chunks for i in chunk.token_ids] == list(range(first, num_tokens))
    assert "".join(chunk.text for chunk in chunks) == "".join(
        f"{i} " for i in range(first, num_tokens)
    )
    assert [chunk.index for chunk in chunks] == [*range(first, num_tokens), num_tokens]
    assert [chunk.is_last for chunk in chunks] == [False] * (num_tokens - first) + [True]
