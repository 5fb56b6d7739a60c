"""Opens the stream of a job that has been submitted, with the status of its first chunk."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from tokenmill.errors import TokenmillError
from tokenmill_gateway.refusals import refused_by_client, refused_by_job
from tokenmill_gateway.server import Server
from tokenmill_gateway.sse import Chunks, EventStream
from tokenmill_gateway.submission import Submitted
from tokenmill_schemas.result import JobResult, JobStatus


async def streamed(
    server: Server, request: Request, one: Submitted, shown_id: str, begin: Any, write: Any
) -> EventStream:
    """Return the stream of a job, once it has begun or waits too long to.

    Raises HttpRefusal for a job that ends before its first token.
    """
    chunks = Chunks(one.client, one.job)
    try:
        first = await chunks.first()
    except TokenmillError as error:
        raise refused_by_client(error, shown_id) from error
    if first is not None and first.status in (JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.DEAD):
        await chunks.close()
        raise refused_by_job(
            JobResult(job_id=one.job, status=first.status, error=first.error), shown_id
        )

    async def on_gone() -> None:
        server.metrics.hung_up.inc()
        if one.leaves_with_client:
            await one.client.cancel(one.job)

    return EventStream(request, server.streams, chunks, begin, write, on_gone, one.headers)
