"""Waits for the whole answer of a job, as long as its client does."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from tokenmill.errors import ResultTimeout, TokenmillError
from tokenmill_gateway.refusals import HttpRefusal, refused_by_client, refused_by_job
from tokenmill_gateway.sse import gone
from tokenmill_gateway.submission import Submitted
from tokenmill_schemas.result import JobResult, JobStatus


class ClientGone(Exception):
    """The client has closed its connection: nobody reads an answer."""


async def result_of(request: Request, one: Submitted, shown_id: str, limit_s: float) -> JobResult:
    """Return the result of a job that has an answer.

    Raises HttpRefusal, and ClientGone after it has cancelled the job.
    """
    waiting = asyncio.ensure_future(one.client.result(one.job, timeout=limit_s))
    leaving = asyncio.ensure_future(gone(request.receive))
    try:
        await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            if one.leaves_with_client:
                await one.client.cancel(one.job)
            raise ClientGone
        result = waiting.result()
    except ResultTimeout:
        words = f"the answer took longer than {limit_s:g} s; it goes on as {shown_id}"
        raise HttpRefusal.of(504, "timeout", words) from None
    except TokenmillError as error:
        raise refused_by_client(error, shown_id) from error
    finally:
        for task in (waiting, leaving):
            task.cancel()
        await asyncio.gather(waiting, leaving, return_exceptions=True)
    if result.status in (JobStatus.SUCCEEDED, JobStatus.CANCELLED):
        return result
    raise refused_by_job(result, shown_id)
