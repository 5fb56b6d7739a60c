"""Measures the cost of our scripts on the main thread of a real queue server.

The cost is the thread's processor time, as the server counts it. It includes more than the scripts:
the thread also reads commands, writes replies, sends messages to subscribers (one per job) and
writes the log to disk.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields
from functools import partial
from typing import Any

import redis.asyncio

from ops.benchmarks.simulation.queue_load import CHECKPOINTS, EIGHTS, TOKENS, Cutting
from ops.benchmarks.simulation.queue_server import ScriptCosts
from tokenmill import AsyncClient
from tokenmill.transport.cancellation import end_task
from tokenmill_schemas.chunk import Chunk
from tokenmill_schemas.control import WorkerStatus
from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus, Usage
from tokenmill_worker.consume.job_stream import JobStream
from tokenmill_worker.jobs import ChunkAppend, Delivery, FinishedJob
from tokenmill_worker.local.valkey_server import ValkeyServer

NUM_JOBS, NUM_SINGLE, GROUP = (
    256,
    64,
    16,
)  # jobs; those claimed and finished one by one; jobs per group of the others
NUM_STEPS = 40
NUM_SUBSCRIBERS = 8  # connections; a backend shares one between its streams

# `calibrate` measured these on two cores of a Xeon with AMX (lscpu: model 167 of family 6), Valkey
# 9.1.2, append-only
# file on: the least of 45 rounds within a quarter of an hour on a machine that was not idle.
STORED = ScriptCosts(
    append=21.2e-6,
    chunk={1: 3.1e-6, 8: 3.7e-6, 32: 3.7e-6},
    opened=10.6e-6,
    claim=115.7e-6,
    claimed=25.4e-6,
    finish=69.2e-6,
    finished=21.0e-6,
    heartbeat=37.4e-6,
    held=1.4e-6,
    submit=69.7e-6,
)

_CALLS = tuple(each.name for each in fields(ScriptCosts) if each.name != "chunk")


def calibrate(rounds: int = 3) -> ScriptCosts:
    """Return each cost's least value of all rounds; other load on the machine only adds time."""
    found = []
    for _ in range(rounds):
        with ValkeyServer() as server:
            found.append(asyncio.run(_measure(server.url)))
    chunk = {tokens: min(costs.chunk[tokens] for costs in found) for tokens in found[0].chunk}
    calls = {name: min(getattr(costs, name) for costs in found) for name in _CALLS}
    return ScriptCosts(chunk=chunk, **calls)


async def _measure(url: str) -> ScriptCosts:
    connection: Any = redis.asyncio.Redis.from_url(url, protocol=2)
    keys = Keys("q")
    stream = JobStream(connection, keys, "w")
    async with connection, AsyncClient(url, queue="q") as client, AsyncExitStack() as stack:
        await stream.open()
        meter = _Meter(connection)
        submit = await meter.per_call(lambda: client.submit(**_JOB), NUM_JOBS)
        deliveries: list[Delivery] = []

        async def claim(credits: int) -> None:
            deliveries.extend(await stream.claim(credits))

        claim_one = await meter.per_call(lambda: claim(1), NUM_SINGLE)
        claim_many = await meter.per_call(lambda: claim(GROUP), (NUM_JOBS - NUM_SINGLE) // GROUP)
        channels = [keys.chunks(delivery.job_id) for delivery in deliveries]
        await _listen(stack, url, [channels[n::NUM_SUBSCRIBERS] for n in range(NUM_SUBSCRIBERS)])
        append, opened, chunk = await _append_costs(meter, stream, deliveries)
        status = WorkerStatus(worker_id="w", model="a-model", running=NUM_JOBS)
        beat_all = await meter.per_call(lambda: stream.heartbeat(status), NUM_STEPS)
        idle = JobStream(connection, keys, "idle")
        beat_none = await meter.per_call(lambda: idle.heartbeat(status), NUM_STEPS)
        finish_one = await meter.per_call(
            lambda: stream.finish([_finished(deliveries.pop())]), NUM_SINGLE
        )
        finish_many = await meter.per_call(
            lambda: stream.finish([_finished(deliveries.pop()) for _ in range(GROUP)]),
            len(deliveries) // GROUP,
        )
    claimed, finished = (
        (claim_many - claim_one) / (GROUP - 1),
        (finish_many - finish_one) / (GROUP - 1),
    )
    return ScriptCosts(
        append=append,
        chunk=chunk,
        opened=opened,
        claim=max(0.0, claim_one - claimed),
        claimed=claimed,
        finish=max(0.0, finish_one - finished),
        finished=finished,
        heartbeat=beat_none,
        held=max(0.0, beat_all - beat_none) / NUM_JOBS,
        submit=submit,
    )


async def _append_costs(
    meter: "_Meter", stream: JobStream, deliveries: list[Delivery]
) -> tuple[float, float, dict[int, float]]:
    """Measure appends: cost per call, per first chunk of a job, per later chunk by its tokens."""
    ends = dict.fromkeys((delivery.job_id for delivery in deliveries), 0)

    async def append(cutting: Cutting, some: list[Delivery]) -> None:
        items = []
        for delivery in some:
            items.append(_append(delivery, ends[delivery.job_id], cutting))
            ends[delivery.job_id] += cutting.tokens
        if await stream.append(items):
            raise RuntimeError("the server refused a chunk of the calibration")

    first = await meter.per_call(
        lambda: append(TOKENS, deliveries), 1
    )  # from here on the ownership version is valid for all jobs
    one = await meter.per_call(lambda: append(TOKENS, deliveries[:1]), NUM_STEPS)
    many = {
        cutting.tokens: await meter.per_call(partial(append, cutting, deliveries), NUM_STEPS)
        for cutting in (TOKENS, EIGHTS, CHECKPOINTS)
    }
    each = (many[TOKENS.tokens] - one) / (len(deliveries) - 1)
    call = max(0.0, one - each)
    chunks = {tokens: (seconds - call) / len(deliveries) for tokens, seconds in many.items()}
    return call, (first - call) / len(deliveries), chunks


class _Meter:
    """Reads the main thread's processor time, as the server counts it."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def per_call(self, call: Callable[[], Awaitable[object]], times: int) -> float:
        before = await self._spent()
        for _ in range(times):
            await call()
        return (await self._spent() - before) / times

    async def _spent(self) -> float:
        cpu = await self._connection.info("cpu")
        return float(cpu["used_cpu_user_main_thread"]) + float(cpu["used_cpu_sys_main_thread"])


async def _listen(stack: AsyncExitStack, url: str, subscriptions: Sequence[Sequence[str]]) -> None:
    """Open a connection for each list of channels, and read all messages."""
    for channels in subscriptions:
        connection: Any = redis.asyncio.Redis.from_url(url, protocol=2)
        pubsub = connection.pubsub()
        await pubsub.subscribe(*channels)
        task = asyncio.create_task(_drink(pubsub))
        stack.push_async_callback(connection.aclose)
        stack.push_async_callback(end_task, task)


async def _drink(pubsub: Any) -> None:
    async for _ in pubsub.listen():
        pass


_JOB: dict[str, Any] = {"prompt": "calibration " * 20, "max_tokens": 128}


def _append(delivery: Delivery, index: int, cutting: Cutting) -> ChunkAppend:
    tokens = tuple(17_000 + index + n for n in range(cutting.tokens))
    chunk = Chunk(
        job_id=delivery.job_id, index=index, token_ids=tokens, text=" word" * cutting.tokens
    )
    return ChunkAppend(delivery.token, chunk, index, checkpoint=not cutting.is_published)


def _finished(delivery: Delivery) -> FinishedJob:
    usage = Usage(prompt_tokens=50, completion_tokens=180)
    choices = (
        ChoiceResult(
            text=" word" * 180,
            token_ids=tuple(range(17_000, 17_180)),
            finish_reason=FinishReason.LENGTH,
        ),
    )
    result = JobResult(
        job_id=delivery.job_id, status=JobStatus.SUCCEEDED, choices=choices, usage=usage
    )
    final = Chunk(
        job_id=delivery.job_id,
        index=10_000,
        finish_reason=FinishReason.LENGTH,
        status=JobStatus.SUCCEEDED,
        usage=usage,
    )
    return FinishedJob(delivery.token, result, final)
