"""The exception that ends a job as failed before it reaches the engine."""

from __future__ import annotations

from tokenmill_schemas.result import JobError

INVALID_REQUEST = "invalid_request"
TOO_LONG = "context_length_exceeded"
NOT_FOUND = "model_not_found"


class Refused(Exception):
    """Raised where a request cannot be served; `error` is the job's end."""

    def __init__(self, message: str, code: str = INVALID_REQUEST) -> None:
        super().__init__(message)
        self.error = JobError(code, message)
