"""What our scripts cost the queue server's thread, measured on the real server: the server counts it itself."""

import asyncio
from typing import Any

import redis.asyncio

from api_client import AsyncClient
from ops.benchmarks.simulation.queue_layer import ScriptCosts
from schemas.chunk import Chunk
from schemas.generation import FinishReason
from schemas.keys import Keys
from schemas.result import JobResult, JobStatus, Usage
from worker.consume.job_stream import JobStream
from worker.embedded import EmbeddedValkey
from worker.jobs import Append, Delivery, Finished

NUM_JOBS = 256
NUM_STEPS = 40


def calibrate() -> ScriptCosts:
    with EmbeddedValkey() as server:
        return asyncio.run(_measure(server.url))


async def _measure(url: str) -> ScriptCosts:
    connection = redis.asyncio.Redis.from_url(url, protocol=2)
    async with connection, AsyncClient(url, queue="q") as client:
        stream = JobStream(connection, Keys("q"), "w")
        await stream.open()
        await _spent(connection)
        await client.submit_many({"prompt": "calibration " * 20, "max_tokens": 128} for _ in range(NUM_JOBS))
        deliveries = await stream.claim(NUM_JOBS)
        per_job = await _spent(connection) / NUM_JOBS
        for step in range(NUM_STEPS):
            await stream.append([_chunk(delivery, step) for delivery in deliveries])
        many = await _spent(connection) / NUM_STEPS
        for step in range(NUM_STEPS):
            await stream.append([_chunk(deliveries[0], NUM_STEPS + step)])
        one = await _spent(connection) / NUM_STEPS
        await stream.finish([_finished(delivery) for delivery in deliveries])
        per_job += await _spent(connection) / NUM_JOBS
    per_chunk = (many - one) / (len(deliveries) - 1)
    return ScriptCosts(append_call=max(0.0, one - per_chunk), append_chunk=per_chunk, job=per_job)


async def _spent(connection: "redis.asyncio.Redis") -> float:
    """Seconds of the server's thread in scripts since this was last asked."""
    stats: Any = await connection.info("commandstats")
    await connection.config_resetstat()
    return sum(float(stats.get(f"cmdstat_{name}", {}).get("usec", 0)) for name in ("eval", "evalsha")) / 1e6


def _chunk(delivery: Delivery, index: int) -> Append:
    return Append(delivery.token, Chunk(job_id=delivery.job_id, index=index, token_ids=(17_000 + index,), text=" word"))


def _finished(delivery: Delivery) -> Finished:
    usage = Usage(prompt_tokens=50, completion_tokens=NUM_STEPS)
    result = JobResult(job_id=delivery.job_id, status=JobStatus.SUCCEEDED, usage=usage)
    final = Chunk(
        job_id=delivery.job_id,
        index=2 * NUM_STEPS,
        finish_reason=FinishReason.LENGTH,
        status=JobStatus.SUCCEEDED,
        usage=usage,
    )
    return Finished(delivery.token, result, final)
