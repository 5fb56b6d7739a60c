"""A job of two choices, written by hand as a worker would: each choice's end carries text.

Tokens cannot show that a reader emits this text once: it belongs to no token.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.support.waiting import until
from tokenmill_schemas import Chunk, FinishReason, JobResult, JobStatus
from tokenmill_schemas.codec import encode
from tokenmill_schemas.keys import Keys
from tokenmill_schemas.result import ChoiceResult

TEXTS = ["a!", "b?"]


async def read_two_choices(
    server: Any, keys: Keys, job: str, read: Callable[[str], Awaitable[Any]], *, from_result: bool
) -> Any:
    """Return what `read(job)` returns.

    With `from_result` the log lacks choice 1's end, which is then in the job's result; otherwise
    the last chunk follows on the channel.
    """
    chunks, stop = [], FinishReason.STOP
    for c, text in enumerate(TEXTS):
        chunks.append(Chunk(job_id=job, index=0, token_ids=(c,), text=text[0], choice=c, n=2))
        chunks.append(Chunk(job_id=job, index=1, text=text[1], choice=c, n=2, finish_reason=stop))
    for number, chunk in enumerate(chunks[:3] if from_result else chunks, start=1):
        server.xadd(keys.log(job), {"chunk": encode(chunk)}, f"{number}-0")
    server.hset(keys.job(job), "state", "running")
    choices = tuple(
        ChoiceResult(index=c, text=text, token_ids=(c,), text_ends=(1,))
        for c, text in enumerate(TEXTS)
    )
    result = JobResult(job_id=job, status=JobStatus.SUCCEEDED, choices=choices)
    recorded = {"state": "succeeded", "settled": "1", "result": encode(result)}
    if from_result:
        server.hset(keys.job(job), mapping=recorded)
        return await read(job)
    reading = asyncio.ensure_future(read(job))

    async def is_subscribed() -> bool:
        return reading.done() or bool(server.pubsub_numsub(keys.chunks(job))[0][1])

    await until(is_subscribed)
    last = Chunk(job_id=job, index=1, n=2, status=JobStatus.SUCCEEDED)
    server.publish(keys.chunks(job), encode(last))
    await asyncio.sleep(0.2)  # read before the result is there
    server.hset(keys.job(job), mapping=recorded)
    server.publish(keys.chunks(job), encode(last))  # a program that then waits for the result
    return await reading
