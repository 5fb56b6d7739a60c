"""Measures the cost of our scripts on the main thread of a real queue server.

The cost is the thread's processor time, as the server counts it. It includes more than the scripts:
the thread also reads commands, writes replies, sends messages to subscribers (one per job) and
writes the log to disk.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, fields
from typing import Any

import redis.asyncio

from tokenmill import AsyncClient
from tokenmill.transport.cancellation import end_task
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus, Usage
from tokenmill_worker.consume.job_stream import JobStream
from tokenmill_worker.jobs import ChunkAppend, Delivery, FinishedJob
from tokenmill_worker.local.valkey_server import ValkeyServer
from tokenmill_worker.publish.chunker import CHECKPOINT_TOKENS

NUM_JOBS, NUM_SINGLE = 256, 64  # jobs; those claimed and finished one by one
GROUP, NUM_GROUPS = 16, 12  # the others
NUM_STEPS = 40
NUM_SUBSCRIBERS = 8  # connections; a backend shares one between its streams
JOB: dict[str, Any] = {"prompt": "calibration " * 20, "max_tokens": 128}


@dataclass(frozen=True, slots=True)
class ScriptCosts:
    """Seconds of the server's main thread per call and per item of a call.

    Args:
        chunk: per chunk of one token, while the worker's ownership version is valid.
        token: per further token of a chunk.
        opened: per first chunk of a job, for which the job is looked up and its log begun.
        checkpoint: per chunk that is logged and not published.
    """

    append: float
    chunk: float
    token: float
    opened: float
    checkpoint: float
    claim: float
    claimed: float
    finish: float
    finished: float
    submit: float


# `calibrate` measured these on two cores of a Xeon with AMX (lscpu: model 167 of family 6), Valkey
# 9.1.2, append-only file on: the least of 45 rounds within a quarter of an hour on a machine that
# was not idle.
STORED = ScriptCosts(
    append=21.2e-6,
    chunk=3.1e-6,
    token=0.086e-6,
    opened=10.6e-6,
    checkpoint=3.7e-6,
    claim=115.7e-6,
    claimed=25.4e-6,
    finish=69.2e-6,
    finished=21.0e-6,
    submit=69.7e-6,
)


def calibrate(rounds: int = 3) -> ScriptCosts:
    """Return each cost's least value of all rounds; other load on the machine only adds time."""
    found = []
    for _ in range(rounds):
        with ValkeyServer() as server:
            found.append(asyncio.run(_measure(server.url)))
    names = (each.name for each in fields(ScriptCosts))
    return ScriptCosts(**{name: min(getattr(costs, name) for costs in found) for name in names})


async def _measure(url: str) -> ScriptCosts:
    connection: Any = redis.asyncio.Redis.from_url(url, protocol=2)
    keys, deliveries = Keys("q"), list[Delivery]()
    stream = JobStream(connection, keys, "w")
    ends: defaultdict[str, int] = defaultdict(int)

    async def claim(count: int) -> None:
        deliveries.extend(await stream.claim(count))

    async def append(count: int, tokens: int = 1, checkpoint: bool = False) -> None:
        items = []
        for delivery in deliveries[:count]:
            items.append(_append(delivery, ends[delivery.job_id], tokens, checkpoint))
            ends[delivery.job_id] += tokens
        if await stream.append(items):
            raise RuntimeError("the server refused a chunk of the calibration")

    async def finish(count: int) -> None:
        await stream.finish([_finished(deliveries.pop()) for _ in range(count)])

    async with connection, AsyncClient(url, queue="q") as client, AsyncExitStack() as stack:
        await stream.open()
        meter = _Meter(connection)
        submit = await meter.per_call(lambda: client.submit(**JOB), NUM_JOBS)
        claims = await meter.fit(claim, (1, NUM_SINGLE), (GROUP, NUM_GROUPS))
        await _listen(stack, url, [keys.chunks(delivery.job_id) for delivery in deliveries])
        first = await meter.per_call(lambda: append(NUM_JOBS), 1)
        # from here on the ownership version is valid for all jobs
        call, chunk = await meter.fit(append, (1, NUM_STEPS), (NUM_JOBS, NUM_STEPS))
        eights = await meter.per_call(lambda: append(NUM_JOBS, 8), NUM_STEPS)
        checkpoints = await meter.per_call(
            lambda: append(NUM_JOBS, CHECKPOINT_TOKENS, True), NUM_STEPS
        )
        finishes = await meter.fit(finish, (1, NUM_SINGLE), (GROUP, NUM_GROUPS))
    opened, chunk_of_8, checkpoint = (
        (seconds - call) / NUM_JOBS for seconds in (first, eights, checkpoints)
    )
    return ScriptCosts(
        call, chunk, max(0.0, chunk_of_8 - chunk) / 7, opened, checkpoint,
        *claims, *finishes, submit,
    )  # fmt: skip


class _Meter:
    """Reads the main thread's processor time, as the server counts it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def fit(
        self, call: Callable[[int], Awaitable[None]], few: tuple[int, int], many: tuple[int, int]
    ) -> tuple[float, float]:
        """Return the cost of a call and of each item, from calls of two sizes (size, times)."""
        (small, small_times), (large, large_times) = few, many
        low = await self.per_call(lambda: call(small), small_times)
        high = await self.per_call(lambda: call(large), large_times)
        item = max(0.0, high - low) / (large - small)
        return max(0.0, low - item * small), item

    async def per_call(self, call: Callable[[], Awaitable[object]], times: int) -> float:
        before = await self._spent()
        for _ in range(times):
            await call()
        return (await self._spent() - before) / times

    async def _spent(self) -> float:
        cpu = await self._connection.info("cpu")
        return float(cpu["used_cpu_user_main_thread"]) + float(cpu["used_cpu_sys_main_thread"])


async def _listen(stack: AsyncExitStack, url: str, channels: list[str]) -> None:
    """Subscribe to the channels over a few connections, and read all messages."""

    async def read_all(pubsub: Any) -> None:
        async for _ in pubsub.listen():
            pass

    for number in range(NUM_SUBSCRIBERS):
        connection: Any = redis.asyncio.Redis.from_url(url, protocol=2)
        pubsub = connection.pubsub()
        await pubsub.subscribe(*channels[number::NUM_SUBSCRIBERS])
        stack.push_async_callback(connection.aclose)
        stack.push_async_callback(end_task, asyncio.create_task(read_all(pubsub)))


def _append(delivery: Delivery, index: int, tokens: int, checkpoint: bool) -> ChunkAppend:
    ids = tuple(17_000 + index + n for n in range(tokens))
    chunk = Chunk(job_id=delivery.job_id, index=index, token_ids=ids, text=" word" * tokens)
    return ChunkAppend(delivery.token, chunk, index, checkpoint=checkpoint)


def _finished(delivery: Delivery) -> FinishedJob:
    job_id, usage = delivery.job_id, Usage(prompt_tokens=50, completion_tokens=180)
    status, reason = JobStatus.SUCCEEDED, FinishReason.LENGTH
    ids = tuple(range(17_000, 17_180))
    choice = ChoiceResult(text=" word" * 180, token_ids=ids, finish_reason=reason)
    result = JobResult(job_id=job_id, status=status, choices=(choice,), usage=usage)
    final = Chunk(job_id=job_id, index=10_000, finish_reason=reason, status=status, usage=usage)
    return FinishedJob(delivery.token, result, final)
