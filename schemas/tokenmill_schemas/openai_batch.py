"""OpenAI's formats: the lines of batch files, and the batch object.

Names and nulls are the same as OpenAI's, so that a program that reads their files reads these too.
Times are Unix seconds.
"""

from typing import Any, Literal

import msgspec

from tokenmill_schemas.openai import (
    ChatCompletion,
    Completion,
    ErrorBody,
    ReasoningDetails,
    ResponseObject,
)

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


# ── lines ──


class LineEnvelope(msgspec.Struct, frozen=True):
    """A line of an input file. Its members may have any type until they are checked."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: Any = None


class LineError(msgspec.Struct, frozen=True):
    """The reason why a line has no response."""

    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: ChatCompletion | Completion | ResponseObject | ErrorBody


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an output or error file."""

    id: str
    custom_id: str | None
    response: Response | None = None
    error: LineError | None = None


# ── the batch ──


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: CachedDetails = CachedDetails()
    output_tokens_details: ReasoningDetails = ReasoningDetails()


class BatchObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="batch"):
    """OpenAI's batch object. The files of a bulk file are named by their paths."""

    id: str
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None
