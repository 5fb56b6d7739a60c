"""Helpers of the queue's tests: jobs, chunks and ends made in one line, on a real server."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.waiting import until
from tokenmill import AsyncClient
from tokenmill.transport.connect import connect_async
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus, Usage
from tokenmill_worker.jobs import AppendReply, ChunkAppend, Delivery, FinishedJob
from tokenmill_worker.queue.job_stream import JobStream, StreamOptions

QUEUE = "q"


@dataclass(slots=True)
class Queue:
    """One queue on one server: `client` submits, `worker()` claims, `redis` looks inside."""

    client: AsyncClient
    redis: Any  # an asyncio client
    keys: Keys

    def worker(self, worker_id: str = "w1", **options: Any) -> JobStream:
        return JobStream(
            self.redis, self.keys, worker_id, StreamOptions(**{"sweep_s": 0.0, **options})
        )

    async def submit(self, **fields: Any) -> str:
        return str(await self.client.submit(**{"prompt": "hello", "max_tokens": 10, **fields}))

    async def field(self, job_id: str, name: str) -> str | None:
        value: Any = await self.redis.hget(self.keys.job(job_id), name)
        return None if value is None else value.decode()

    async def everything(self) -> dict[bytes, tuple[int, bytes]]:
        """Return all keys of the server with their TTL (ms) and dump, for `go_back`."""
        names = await self.redis.keys("*")
        return {
            name: (max(0, await self.redis.pttl(name)), await self.redis.dump(name))
            for name in names
        }

    async def go_back(self, held: dict[bytes, tuple[int, bytes]]) -> None:
        """Restore the keys of `everything`, like a server that died and lost its last writes."""
        await self.redis.flushall()
        for name, (ttl_ms, value) in held.items():
            await self.redis.restore(name, ttl_ms, value)

    @asynccontextmanager
    async def followed(self, readers: int = 1) -> AsyncIterator[None]:
        """Wait at the end for readers that begin inside: each subscribes, then reads the log."""
        before = await self._log_reads()
        yield

        async def have_read() -> bool:
            return await self._log_reads() >= before + readers

        await until(have_read)

    async def _log_reads(self) -> int:
        found: Any = await self.redis.info("commandstats")
        return int(found.get("cmdstat_xrange", {}).get("calls", 0))

    async def pass_deadline(self, job_id: str) -> None:
        """Move the job's deadline into the past, so that no test waits for a clock."""
        await self.redis.hset(self.keys.job(job_id), "deadline_ms", 1)
        await self.redis.zadd(self.keys.deadlines, {job_id: 1}, xx=True)

    async def pass_delay(self, job_id: str) -> None:
        """Move the job's earliest start into the past, so that no test waits for a clock."""
        assert await self.redis.zscore(self.keys.delayed, job_id) > time.time() * 1000, (
            "it must wait until now"
        )
        await self.redis.zadd(self.keys.delayed, {job_id: 1}, xx=True)


async def open_queue(url: str) -> Queue:
    return Queue(AsyncClient(url, queue=QUEUE), connect_async(url), Keys(QUEUE))


async def close_queue(queue: Queue) -> None:
    await queue.client.close()
    await queue.redis.aclose()


def token(
    delivery: Delivery, index: int, count: int = 1, *, text: str | None = None
) -> ChunkAppend:
    """Make a chunk of tokens index … index+count-1, n = 1; token i has id i and text "<i> "."""
    ids = tuple(range(index, index + count))
    words = "".join(f"{i} " for i in ids) if text is None else text
    chunk = Chunk(job_id=delivery.job_id, index=index, token_ids=ids, text=words)
    return ChunkAppend(delivery.token, chunk, index)


async def appended(worker: JobStream, items: list[ChunkAppend]) -> list[tuple[AppendReply, int]]:
    """Append chunks; return for each the reply and the number of the log's last entry after the
    call.
    """
    exceptions = await worker.append(items)
    return [exceptions.get(place, (AppendReply.OK, item.end)) for place, item in enumerate(items)]


def end_of(
    delivery: Delivery, num_tokens: int = 0, status: JobStatus = JobStatus.SUCCEEDED
) -> FinishedJob:
    words = [f"{i} " for i in range(num_tokens)]
    ends = tuple(itertools.accumulate(map(len, words)))
    reason = FinishReason.STOP if status is JobStatus.SUCCEEDED else FinishReason.CANCELLED
    choice = ChoiceResult(
        text="".join(words),
        token_ids=tuple(range(num_tokens)),
        text_ends=ends,
        finish_reason=reason,
    )
    usage = Usage(prompt_tokens=3, completion_tokens=num_tokens)
    result = JobResult(job_id=delivery.job_id, status=status, choices=(choice,), usage=usage)
    chunk = Chunk(
        job_id=delivery.job_id, index=num_tokens, finish_reason=reason, status=status, usage=usage
    )
    return FinishedJob(delivery.token, result, chunk)
