"""Builds lines of the output and error files: from a job's result, or for a line without a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from tokenmill.bulk.batch import Totals
from tokenmill.bulk.formats.input_file import BadLine, line_of
from tokenmill.openai.answers import answer_of
from tokenmill.openai.errors import ApiError, of_job
from tokenmill_schemas.openai_batch import LineError, OutputLine, Response
from tokenmill_schemas.result import JobResult, JobStatus

_encoder: Final = msgspec.json.Encoder()
_LINE_ENDS: Final = [
    (mark.encode(), f"\\u{ord(mark):04x}".encode()) for mark in ("\u2028", "\u2029", "\x85")
]
EXPIRED: Final = LineError(
    "batch_expired", "This request could not be executed before the completion window expired."
)
CANCELLED: Final = LineError("batch_cancelled", "This request was cancelled with its batch.")
LOST: Final = LineError(
    "result_unavailable",
    "Redis has deleted this request's result, and there is no database that has it.",
)
UNREADABLE: Final = LineError(
    "result_unreadable", "This request's result is damaged, or a newer version wrote it."
)
_WITHOUT_RESPONSE: Final = {JobStatus.EXPIRED: EXPIRED, JobStatus.CANCELLED: CANCELLED}


@dataclass(frozen=True, slots=True)
class EncodedLine:
    """A line for one of the two files, without its newline. `share` is what it adds to the batch's
    totals.
    """

    line: int
    data: bytes
    share: Totals

    @property
    def is_error(self) -> bool:
        return not self.share.completed


def _encode(line: OutputLine) -> bytes:
    """Encode a line. Marks that some readers take for the end of a line (U+2028, U+2029, and U+0085
    as Python's `splitlines`) are escaped.
    """
    data = _encoder.encode(line)
    for mark, escape in _LINE_ENDS:
        data = data.replace(mark, escape)
    return data


def request_name(batch_id: str, line: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line}"


def line_number(name: str) -> int:
    """Return the number of the input line that an output line answers. Raises ValueError."""
    return int(name.rpartition("_")[2])


def of_result(batch_id: str, result: JobResult) -> EncodedLine:
    line = line_of(batch_id, result.job_id)
    name, custom_id = request_name(batch_id, line), result.metadata.get("custom_id")
    refusal = _WITHOUT_RESPONSE.get(result.status)
    if refusal is not None:
        out = OutputLine(id=name, custom_id=custom_id, error=refusal)
        return EncodedLine(line, _encode(out), _share(result))
    if result.status is JobStatus.SUCCEEDED:
        answer = answer_of(result, result.metadata.get("endpoint"))
        response = Response(status_code=200, request_id=result.job_id, body=answer)
    else:
        error = of_job(result)
        response = Response(status_code=error.status, request_id=result.job_id, body=error.body)
    return EncodedLine(
        line, _encode(OutputLine(id=name, custom_id=custom_id, response=response)), _share(result)
    )


def of_bad_line(batch_id: str, bad: BadLine) -> EncodedLine:
    name = request_name(batch_id, bad.line)
    if not bad.status:
        line = OutputLine(id=name, custom_id=bad.custom_id, error=LineError(bad.code, bad.message))
    else:
        body = ApiError(bad.status, bad.code, bad.message, bad.param).body
        response = Response(status_code=bad.status, request_id=name, body=body)
        line = OutputLine(id=name, custom_id=bad.custom_id, response=response)
    return EncodedLine(
        bad.line, _encode(line), Totals(failed=1, expired=int(bad.code == EXPIRED.code))
    )


def unanswered(line: int, custom_id: str | None, why: LineError) -> BadLine:
    return BadLine(line, custom_id, why.code, why.message)


def _share(result: JobResult) -> Totals:
    is_good, used = result.status is JobStatus.SUCCEEDED, result.usage
    return Totals(
        completed=int(is_good),
        failed=int(not is_good),
        expired=int(result.status is JobStatus.EXPIRED),
        input_tokens=used.prompt_tokens,
        cached_tokens=used.cached_tokens,
        output_tokens=used.completion_tokens,
        reasoning_tokens=used.reasoning_tokens,
    )
