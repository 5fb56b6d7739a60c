"""Answers a refusal as OpenAI's API does: a status, one sentence, and whether to try again."""

from __future__ import annotations

import logging
import math
from typing import Final

from starlette.responses import Response

from tokenmill.errors import IdempotencyConflict, QueueFull, RateLimited, TokenmillError
from tokenmill.files.object_store import FilesUnavailable
from tokenmill.openai.errors import ApiError, of_exception, of_job
from tokenmill_gateway.events import encode
from tokenmill_schemas.result import JobResult, JobStatus

log = logging.getLogger(__name__)
_LONGEST_WAIT_S: Final = 120.0  # OpenAI's clients do not try again after a longer one
_FULL_WAIT_S: Final = 1.0
_SENTENCES: Final = {
    503: "the queue or its database does not answer now",
    504: "the answer took too long",
}
_USELESS: Final = frozenset({422, 500, 504})  # a repetition cannot help, or makes a second job


class HttpRefusal(Exception):
    """A request is refused. `wait_s`: when to try again. `has_job`: another try would make another
    job.
    """

    def __init__(
        self, error: ApiError, wait_s: float | None = None, *, has_job: bool = False
    ) -> None:
        super().__init__(error.message)
        self.error = error
        self.wait_s = wait_s
        self.has_job = has_job
        self.more: dict[str, str] = {}  # headers

    @classmethod
    def of(cls, status: int, code: str, message: str, param: str | None = None) -> HttpRefusal:
        return cls(ApiError(status, code, message, param))

    @property
    def headers(self) -> dict[str, str]:
        found = dict(self.more)
        if self.wait_s is not None:
            wait_s = min(self.wait_s, _LONGEST_WAIT_S)
            found["retry-after"] = str(math.ceil(wait_s))
            found["retry-after-ms"] = str(math.ceil(wait_s * 1000))
        if self.has_job or self.error.status in _USELESS:
            found["x-should-retry"] = "false"
        if self.error.status == 401:
            found["www-authenticate"] = "Bearer"
        return found

    def response(self) -> Response:
        return json_response(self.error.body, self.error.status, self.headers)


def refused_by_client(error: TokenmillError, shown_id: str = "") -> HttpRefusal:
    """Return the refusal that an error of the queue's client means. `shown_id` names the answer, if
    its job has been submitted.
    """
    wait_s = None
    if isinstance(error, RateLimited):
        wait_s = error.retry_after
    elif isinstance(error, QueueFull):
        wait_s = _FULL_WAIT_S
    if isinstance(error, FilesUnavailable):
        log.warning("A request is answered with 503: %s", error)
        words = "the store of files does not answer now, or takes no more"
        return HttpRefusal.of(503, "files_unavailable", words)
    found = of_exception(error)
    if isinstance(error, IdempotencyConflict):
        words = "the idempotency key was used with another request"
        return HttpRefusal.of(422, "idempotency_conflict", words)
    if found.status >= 500:  # the words may name hosts and files
        log.warning("A request is answered with %d: %s", found.status, error)
        words = _SENTENCES.get(found.status, "the gateway failed; its log says why")
        words += f"; {shown_id} goes on" if shown_id else ""
        found = ApiError(found.status, found.code, words)
    return HttpRefusal(found, wait_s, has_job=bool(shown_id))


def refused_by_job(result: JobResult, shown_id: str) -> HttpRefusal:
    """Return the refusal of a job that ended without an answer."""
    if result.status is JobStatus.EXPIRED:
        words = f"the deadline of {shown_id} passed before its answer was whole"
        return HttpRefusal.of(504, "deadline_exceeded", words)
    return HttpRefusal(of_job(result))


def unsupported(name: str) -> HttpRefusal:
    return HttpRefusal.of(400, "unsupported_parameter", f"{name!r} is not supported here", name)


def json_response(
    value: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode(value), status, headers, media_type="application/json")
