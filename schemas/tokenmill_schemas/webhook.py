"""The body of a webhook: the end of a job as JSON, in the form of Standard Webhooks (type,
timestamp, data); that of a response or a batch in OpenAI's form.

Token ids and log-probabilities are left out; a receiver that needs them fetches the result. Fields
are only ever added.
"""

import re
from typing import Final

import msgspec

from tokenmill_schemas.generation import FinishReason
from tokenmill_schemas.result import GeneratedCall, JobError, JobStatus, Usage

_AUTHORITY: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(:\d*)?")


def redacted_url(url: str) -> str:
    """Return a URL that may be shown to people: scheme, host and path.

    The user, the password, the values of the query and the fragment are left out. Accepts any text.
    """
    rest, mark, query = url.partition("#")[0].partition("?")
    scheme, separator, rest = rest.partition("://") if "://" in rest else ("", "", rest)
    authority, slash, path = rest.partition("/")
    authority = authority.rpartition("@")[2]
    # an unquoted slash in the password
    if not _AUTHORITY.fullmatch(authority) or (":" in authority and "@" in path):
        authority, slash, path = "***", "", ""
    values = "&".join(
        f"{part.partition('=')[0]}=***" if "=" in part else "***" for part in query.split("&")
    )
    return scheme + separator + authority + slash + path + (mark + values if mark else "")


class WebhookChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of the job's answer. Thoughts and calls are there where the answer has them."""

    index: int
    text: str
    finish_reason: FinishReason | None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[GeneratedCall, ...] | msgspec.UnsetType = msgspec.UNSET


class WebhookJob(msgspec.Struct, frozen=True, kw_only=True):
    """The job of a webhook. `choices` is None if the text was too long for a webhook or has been
    purged; fetch the result instead.
    """

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
    """One event. `type` is "job." and the state; `timestamp` is the time of the job's end in ISO
    8601, UTC.
    """

    type: str
    timestamp: str
    data: WebhookJob


class ApiEventData(msgspec.Struct, frozen=True):
    id: str  # of the response or the batch, as the API shows it


class ApiEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="event"):
    """The end of a background response or a batch of the gateway, as OpenAI's API reports it:
    `type` is `response.completed`, `batch.expired`, …
    """

    id: str
    created_at: int
    type: str
    data: ApiEventData
