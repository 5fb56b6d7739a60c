"""Answers an error as OpenAI's API does: with an HTTP status, a type and a code.

The code of a job's error and the class of a client's exception each have a row below; the type
follows from the status. OpenAI's clients repeat 408, 409, 429 and every status from 500 on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tokenmill.errors import (
    ConfigurationError,
    IdempotencyConflict,
    InvalidRequest,
    JobFailed,
    JobNotFound,
    QueueFull,
    QueueUnavailable,
    QueueUnserved,
    RateLimited,
    ResultTimeout,
    TokenmillError,
)
from tokenmill.openai.form_values import FormError
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.openai import ErrorBody, ErrorObject
from tokenmill_schemas.result import JobResult

_OF_JOBS: Final = {"invalid_request": 400, "context_length_exceeded": 400, "model_not_found": 404}
_OF_EXCEPTIONS: Final[dict[type[TokenmillError], tuple[int, str]]] = {
    InvalidRequest: (400, "invalid_value"),
    JobNotFound: (404, "not_found"),
    IdempotencyConflict: (422, "idempotency_conflict"),
    RateLimited: (429, "rate_limit_exceeded"),
    QueueFull: (429, "queue_full"),
    QueueUnavailable: (503, "queue_unavailable"),
    QueueUnserved: (503, "queue_unserved"),
    ConfigurationError: (503, "wrong_configuration"),
    ResultTimeout: (504, "timeout"),
}
_INTERNAL: Final = (500, "internal_error")
_TYPES: Final = {429: "rate_limit_error", 503: "service_unavailable_error"}


@dataclass(frozen=True, slots=True)
class ApiError:
    status: int
    code: str
    message: str
    param: str | None = None

    @property
    def body(self) -> ErrorBody:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return ErrorBody(
            ErrorObject(
                message=self.message,
                type=_TYPES.get(self.status, kind),
                param=self.param,
                code=self.code,
            )
        )


def of_job(result: JobResult) -> ApiError:
    """Return the error of a job that ended without an answer."""
    state = result.status.value
    code, message = state, f"the job ended as {state}"
    if result.error:
        code, message = result.error.code, result.error.message
    return ApiError(_OF_JOBS.get(code, 500), code, message)


def of_exception(error: TokenmillError) -> ApiError:
    """Return the error of a call that a client refused, or that failed."""
    if isinstance(error, JobFailed):
        return of_job(error.result)
    rows = (row for kind, row in _OF_EXCEPTIONS.items() if isinstance(error, kind))
    status, code = next(rows, _INTERNAL)
    if isinstance(error, FormError):
        return ApiError(status, error.code, str(error), error.param)
    param = _param(error) if isinstance(error, InvalidRequest) else None
    return ApiError(status, code, str(error), param)


def _param(error: InvalidRequest) -> str | None:
    """Return the parameter that a problem is about: the word with which its sentence begins."""
    word = re.split(r"[ .\[]", error.problems[0], maxsplit=1)[0]
    known = (*SamplingParams.__struct_fields__, *JobRequest.__struct_fields__)
    return word if word in known else None
