"""Turns a finished job into rows of `jobs`, `usage` and `webhooks`, and into milder forms of a row
that the database refused.

The module uses the tables' columns and no connection. The prompt is left out unless the settings
ask for it: results are read by more people than prompts are meant for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from tokenmill.openai.response_object import status_of
from tokenmill.sql.storable import storable
from tokenmill.sql.webhooks import message_of
from tokenmill_schemas.codec import encode
from tokenmill_schemas.job import JobRequest, Priority
from tokenmill_schemas.result import JobResult, Usage
from tokenmill_worker.jobs import FinishedJob

_MAX_NAME: Final = 255  # size of the tables' name columns
_CONTENT: Final = ("text", "reasoning", "token_ids", "logprobs", "prompt", "params", "metadata",
                   "error_message", "envelope")  # fmt: skip

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The rows of one job, and the result that they are made of. `webhook` is the webhook message,
    None if the job asks for none.
    """

    result: JobResult
    job: Values
    usage: Values
    webhook: Values | None = None

    @property
    def job_id(self) -> str:
        return str(self.job["id"])

    @classmethod
    def of(cls, finished: FinishedJob, *, queue: str, with_prompt: bool = False) -> JobRecord:
        result, request = finished.result, finished.request
        choice = result.choices[0] if result.choices else None
        job: Values = {
            **_identity(result, queue),
            "id": result.job_id,
            "priority": (request.priority if request else Priority.STANDARD).value,
            "finish_reason": result.finish_reason.value if result.finish_reason else None,
            "text": choice.text if choice else None,
            "reasoning": (choice.reasoning or None) if choice else None,
            "token_ids": list(choice.token_ids) if choice else None,
            "logprobs": [[entry.logprob, entry.top] for entry in choice.logprobs]
            if choice and choice.logprobs is not None
            else None,  # without the bytes of tokens, which the encoded result has
            "error_code": result.error.code[:64] if result.error else None,
            "error_message": result.error.message if result.error else None,
            "attempts": result.attempt,
            "worker_id": result.worker_id[:_MAX_NAME],
            "created_ms": result.created_ms,
            "started_ms": result.started_ms,
            "prompt_kind": prompt_kind(request) if request else None,
            "prompt": _prompt(request) if request and with_prompt else None,
            "params": msgspec.to_builtins(request.params, str_keys=True) if request else None,
            "metadata": dict(result.metadata) or None,
            "batch_id": request.batch_id if request else None,
            "envelope": (request.envelope or None) if request else None,
            "previous_id": (request.previous_id or None) if request else None,
            "result": encode(result),
        }
        numbers = {name: getattr(result.usage, name) for name in Usage.__struct_fields__}
        usage: Values = {
            "job_id": result.job_id,
            **_identity(result, queue),
            "day": _day(result.finished_ms),
            **numbers,
        }
        return cls(result, job, usage, _webhook(result, request, queue) if request else None)

    def sanitised(self) -> JobRecord:
        """Return the row without what some databases cannot store: NUL characters, lone surrogates,
        numbers beyond 64 bits.
        """
        job = {
            name: value if isinstance(value, bytes) else storable(value)
            for name, value in self.job.items()
        }
        return dataclasses.replace(self, job=_fitted(job), usage=_fitted(storable(self.usage)))

    def minimal(self) -> JobRecord:
        """Return the row with identity, state and the encoded result only, which any database can
        store.
        """
        row = self.sanitised()
        return dataclasses.replace(row, job=row.job | dict.fromkeys(_CONTENT))


def prompt_kind(request: JobRequest) -> str:
    if request.messages is not None:
        return "messages"
    return "ids" if request.prompt_ids is not None else "text"


def _identity(result: JobResult, queue: str) -> Values:
    return {
        "queue": queue[:_MAX_NAME],
        "model": result.model[:_MAX_NAME],
        "tenant": result.tenant[:_MAX_NAME],
        "state": result.status.value,
        "finished_ms": result.finished_ms,
    }


def _webhook(result: JobResult, request: JobRequest, queue: str) -> Values | None:
    """Return the row of the webhook message. A response of the gateway has OpenAI's event."""
    if not request.webhook:
        return None
    event = f"job.{result.status.value}"
    if request.envelope:
        reason = result.choices[0].finish_reason if result.choices else None
        event = f"response.{status_of(result.status, reason)}"
    identity = _identity(result, queue)
    return message_of(
        result.job_id,
        event,
        queue=identity["queue"],
        tenant=identity["tenant"],
        url=request.webhook,
        ended_ms=result.finished_ms,
    )


def _prompt(request: JobRequest) -> object:
    if request.messages is not None:
        return msgspec.to_builtins(request.messages)
    return list(request.prompt_ids) if request.prompt_ids is not None else request.prompt


def _day(finished_ms: int) -> str:
    try:
        return datetime.fromtimestamp(finished_ms / 1000, UTC).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return "0000-00-00"  # a broken clock must not keep a result from being recorded


_INT32 = frozenset({"attempts", "preemptions"})


def _fitted(row: Values) -> Values:
    """Cap the values of 32-bit columns at 2^31 - 1."""
    return {name: min(value, 2**31 - 1) if name in _INT32 else value for name, value in row.items()}
