"""Submits jobs: one script call stores all jobs of a group or none of them."""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.errors import (
    IdempotencyConflict,
    InvalidRequest,
    QueueFull,
    RateLimited,
)
from tokenmill.operations.io_requests import Operation, QueueContext, RunScript
from tokenmill.operations.job_request import JobHandle, estimated_tokens, fingerprint
from tokenmill.transport.scripts import SUBMIT, Argument, in_parts
from tokenmill_schemas.codec import encode
from tokenmill_schemas.job import JobRequest

SUBMIT_JOBS = 256
SUBMIT_BYTES = 1024 * 1024


def submit(context: QueueContext, requests: Sequence[JobRequest]) -> Operation[list[JobHandle]]:
    """Submit all requests in as few calls as their size allows. Each call stores all of its jobs or
    none.
    """
    handles: list[JobHandle] = []
    for part in in_parts(map(_submit_arguments, requests), SUBMIT_BYTES, SUBMIT_JOBS):
        arguments: list[Argument] = [context.queue_limit, round(context.idempotency_ttl_s * 1000)]
        for item in part:
            arguments += item
        reply = yield RunScript(SUBMIT, tuple(arguments))
        handles += _read_submitted(context, reply, handles)
    return handles


def _submit_arguments(request: JobRequest) -> tuple[Argument, ...]:
    return (
        request.job_id,
        request.priority.value,
        request.tenant,
        fingerprint(request),
        request.idempotency_key or "",
        encode(request),
        request.created_ms,
        request.deadline_ms or 0,
        request.not_before_ms or 0,
        estimated_tokens(request),
    )


def _read_submitted(
    context: QueueContext, reply: list[bytes], accepted: Sequence[JobHandle]
) -> list[JobHandle]:
    """Return the handles of a reply. `accepted`: those of the calls before it."""
    word, *rest = (value.decode() for value in reply)
    if word == "large":
        raise InvalidRequest([f"the request has {rest[0]} bytes; the queue's limit is {rest[1]}"])
    if word == "full":
        raise QueueFull(context.keys.queue, int(rest[0]), int(rest[1]), accepted, rest[2])
    if word == "rate":
        raise RateLimited(rest[0], int(rest[1]) / 1000, accepted)
    if word == "name":
        raise InvalidRequest(["job_id must be a text of 1 to 255 bytes without control characters"])
    if word == "conflict":
        raise IdempotencyConflict(rest[0])
    is_unserved = len(rest) % 2 == 1  # "unserved" follows the jobs
    return [
        JobHandle(job_id, is_new=how == "new", is_unserved=is_unserved)
        for job_id, how in zip(rest[::2], rest[1::2], strict=False)
    ]
