"""What a webhook receives: a job's end as JSON, in the form of Standard Webhooks (type, timestamp, data).

Token ids and log-probabilities stay out; whoever wants them asks for the result. Fields are only ever added.
"""

import msgspec

from schemas.generation import FinishReason
from schemas.result import JobError, JobStatus, Usage


class WebhookChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the job."""

    index: int
    text: str
    finish_reason: FinishReason | None


class WebhookJob(msgspec.Struct, frozen=True, kw_only=True):
    """`choices` is None where the text was too long for a notice, or has been purged: fetch the result instead."""

    job_id: str
    status: JobStatus
    queue: str
    model: str
    tenant: str
    choices: tuple[WebhookChoice, ...] | None
    usage: Usage | None
    error: JobError | None
    attempt: int
    created_ms: int
    started_ms: int
    finished_ms: int
    metadata: dict[str, str]


class WebhookEvent(msgspec.Struct, frozen=True, kw_only=True):
    """`type` is "job." and the state; `timestamp` the time of the job's end, ISO 8601, UTC."""

    type: str
    timestamp: str
    data: WebhookJob
