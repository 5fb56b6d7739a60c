"""Turns batches and their lines into rows of SQL, and back."""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

from tokenmill.bulk.batch import Batch, BatchState, Totals
from tokenmill.bulk.formats.input_file import BadLine
from tokenmill.bulk.formats.output_line import UNREADABLE
from tokenmill.sql.storable import storable
from tokenmill_schemas.codec import DecodeError, decode_result
from tokenmill_schemas.openai_batch import BatchError
from tokenmill_schemas.result import JobError, JobResult, JobStatus
from tokenmill_schemas.validation import MAX_NAME_CHARS

log = logging.getLogger(__name__)

_PLAIN: Final = (
    "id", "queue", "tenant", "model", "endpoint", "input_file", "output_file", "error_file",
    "total", "created_ms", "expires_ms", "completion_window",
)  # fmt: skip
_REFUSED = "refused"  # a bad request, as the API would reject it
_INVALID = "invalid"  # no request at all
PURGED: Final = JobError(
    "result_purged", "The answer was removed from the database by its retention rules."
)


def columns_of(batch: Batch) -> dict[str, Any]:
    """Return the columns of a batch, with names cut to the length of their columns."""
    options = {
        "any_model": batch.any_model,
        "last_line": batch.last_line,
        "digest": batch.digest,
        **({"output_expires_s": batch.output_expires_s} if batch.output_expires_s else {}),
    }
    values = {
        **{name: getattr(batch, name) for name in _PLAIN},
        "model": batch.model[:MAX_NAME_CHARS],
        "completion_window": batch.completion_window.replace(" ", ""),
        "errors": msgspec.to_builtins(batch.errors) or None,
        "metadata": dict(batch.metadata) or None,
        "options": options,
    }
    return {name: storable(value) for name, value in values.items()}


def batch_of(row: dict[str, Any]) -> Batch:
    """Build a batch from its row. NULL stands for a default; the counts are those of the last
    progress.
    """
    options, used = row.pop("options") or {}, row.pop("usage") or {}
    over_line, seen_ms = used.pop("over_line", 0), used.pop("seen_ms", 0)
    completed, failed = row.pop("completed"), row.pop("failed")
    values = {name: value for name, value in row.items() if value is not None and name != "errors"}
    return Batch(
        **{**values, "state": BatchState(row["state"])},
        **options,
        over_line=over_line,
        seen_ms=seen_ms,
        totals=msgspec.convert(used | {"completed": completed, "failed": failed}, Totals),
        errors=tuple(msgspec.convert(row["errors"] or [], list[BatchError])),
    )


def item_of(batch_id: str, bad: BadLine) -> dict[str, Any]:
    values = {
        "batch_id": batch_id,
        "line": bad.line,
        "custom_id": bad.custom_id,
        "state": _REFUSED if bad.status else _INVALID,
        "error_code": bad.code,
        "error_message": bad.message,
        "error_param": bad.param[:MAX_NAME_CHARS] if bad.param else None,
    }
    return {name: storable(value) for name, value in values.items()}


def bad_line_of(row: Any) -> BadLine:
    status = 400 if row["state"] == _REFUSED else 0
    return BadLine(
        row["line"],
        row["custom_id"],
        row["error_code"],
        row["error_message"],
        row["error_param"],
        status,
    )


def result_of(row: Any) -> JobResult:
    """Return the recorded result of a job.

    A job whose result was purged or cannot be decoded takes its status from the columns; a
    succeeded one becomes a failure that names the reason.
    """
    missing = PURGED
    if row["result"] is not None:
        try:
            return decode_result(bytes(row["result"]))
        except DecodeError as trouble:
            log.warning(
                "The recorded result of job %s cannot be read; its line goes to the error file: %s",
                row["id"],
                trouble,
            )
            missing = JobError(UNREADABLE.code, UNREADABLE.message)
    state = JobStatus(row["state"])
    error = (
        JobError(row["error_code"], row["error_message"] or "") if row["error_code"] else missing
    )
    return JobResult(
        job_id=row["id"],
        status=JobStatus.FAILED if state is JobStatus.SUCCEEDED else state,
        error=error,
        metadata=row["metadata"] or {},
    )
