"""Turns the body of a request into a job: its queue, class, deadline and idempotency key."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request

from tokenmill.async_client import AsyncClient
from tokenmill.errors import TokenmillError
from tokenmill.openai.form_values import shown
from tokenmill.operations.submit import JobHandle
from tokenmill_gateway.events import encode
from tokenmill_gateway.keys import ApiKey
from tokenmill_gateway.queues import Queues
from tokenmill_gateway.refusals import HttpRefusal, refused_by_client
from tokenmill_schemas.job import Priority

TIERS: Final[Mapping[str, Priority | None]] = {
    "auto": None,  # the key's own
    "default": Priority.STANDARD,
    "flex": Priority.BULK,
    "priority": Priority.INTERACTIVE,
    "fast": Priority.INTERACTIVE,
}
_NAMES: Final = {
    Priority.INTERACTIVE: "priority", Priority.STANDARD: "default", Priority.BULK: "flex",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Submitted:
    """A job that has been submitted. `leaves_with_client`: it is cancelled when its client goes.
    `headers`: of its answer.
    """

    client: AsyncClient
    job: JobHandle
    model: str
    tier: str
    leaves_with_client: bool
    headers: dict[str, str]


def priority_of(tier: object, key: ApiKey) -> Priority:
    """Return the class that a service tier means. Raises HttpRefusal."""
    if tier is None:
        return key.priority
    if not isinstance(tier, str) or tier not in TIERS:
        words = f"service_tier must be one of {', '.join(TIERS)}, not {shown(tier)}"
        raise HttpRefusal.of(400, "invalid_value", words, "service_tier")
    return TIERS[tier] or key.priority


def tier_of(priority: Priority) -> str:
    return _NAMES[priority]


async def submit(
    request: Request,
    queues: Queues,
    key: ApiKey,
    fields: dict[str, Any],
    *,
    priority: Priority,
    is_background: bool = False,
    **more: Any,
) -> Submitted:
    """Submit the job with the fields that a body means, and with more. Raises HttpRefusal."""
    found = await submit_all(
        request, queues, key, [fields], priority=priority, is_background=is_background, **more
    )
    return found[0]


async def submit_all(
    request: Request,
    queues: Queues,
    key: ApiKey,
    jobs: Sequence[dict[str, Any]],
    *,
    priority: Priority,
    is_background: bool = False,
    **more: Any,
) -> list[Submitted]:
    """Submit jobs of one model, all or none. Raises HttpRefusal.

    Those behind the first have idempotency keys made from the request's; each repeats what all of
    them ask, so that another request with the same key conflicts.
    """
    model: str = jobs[0]["model"]
    client = await queues.of_model(model, key)
    given = request.headers.get("idempotency-key")
    if given is not None and len(jobs) > 1:
        asked = encode([job["prompt"] for job in jobs])
        more["metadata"] = {"prompts": hashlib.blake2b(asked, digest_size=16).hexdigest()}
    common = {**more, "priority": priority, "tenant": key.tenant}
    keys = [
        given if not number or given is None else f"{given}#{number}" for number in range(len(jobs))
    ]
    try:
        handles = await client.submit_many(
            {**job, **common, "idempotency_key": one} for job, one in zip(jobs, keys, strict=True)
        )
    except TokenmillError as error:
        refusal = refused_by_client(error)
        refusal.more.update(await queues.rates.headers(client.queue, key.tenant))
        raise refusal from error
    limits = await queues.rates.headers(client.queue, key.tenant)
    return [
        Submitted(
            client,
            handle,
            model,
            tier_of(priority),
            leaves_with_client=not is_background and given is None,
            headers={"x-request-id": str(handles[0]), **limits},
        )
        for handle in handles
    ]
