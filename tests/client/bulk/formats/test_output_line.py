"""Our lines, read by OpenAI's own published client types."""

import json
from typing import Any

import msgspec
import pytest
from openai.types import Batch as TheirBatch
from openai.types.shared import ErrorObject as TheirError

from tests.client.bulk.support import result
from tokenmill.bulk.batch import Batch, BatchState, Totals
from tokenmill.bulk.formats.input_file import BadLine
from tokenmill.bulk.formats.output_line import EXPIRED as EXPIRED_LINE
from tokenmill.bulk.formats.output_line import of_bad_line, of_result, unanswered
from tokenmill_schemas.codec import encode
from tokenmill_schemas.openai_batch import BatchError
from tokenmill_schemas.result import JobError, JobStatus

BATCH = "batch_abc"


def line_of(answer: Any) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(answer.data)
    assert set(line) == {"id", "custom_id", "response", "error"}
    assert (line["response"] is None) != (line["error"] is None)
    return line


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("invalid_request", 400, "invalid_request_error"),
        ("context_length_exceeded", 400, "invalid_request_error"),
        ("model_not_found", 404, "invalid_request_error"),
        ("engine_error", 500, "server_error"),
    ],
)
def test_a_line_of_a_failed_job_has_its_status(code: str, status: int, kind: str) -> None:
    line = line_of(
        of_result(BATCH, result(BATCH, 1, JobStatus.FAILED, error=JobError(code, "because")))
    )
    assert line["response"]["status_code"] == status
    error = TheirError.model_validate(line["response"]["body"]["error"], strict=True)
    assert (error.code, error.type, error.message) == (code, kind, "because")


@pytest.mark.parametrize(
    ("status", "code"),
    [(JobStatus.EXPIRED, "batch_expired"), (JobStatus.CANCELLED, "batch_cancelled")],
)
def test_an_expired_or_cancelled_line_has_an_error_and_no_response(
    status: JobStatus, code: str
) -> None:
    answer = of_result(BATCH, result(BATCH, 1, status))
    assert line_of(answer)["error"]["code"] == code
    assert (answer.is_error, answer.share.expired) == (True, int(status is JobStatus.EXPIRED))


def test_a_line_without_a_job_has_an_error_and_no_response() -> None:
    rejected = line_of(
        of_bad_line(BATCH, BadLine(2, "x", "unknown_parameter", "no foo", "foo", 400))
    )
    error = TheirError.model_validate(rejected["response"]["body"]["error"], strict=True)
    assert (error.param, error.code) == ("foo", "unknown_parameter")
    assert (
        line_of(of_bad_line(BATCH, BadLine(2, None, "invalid_json_line", "what?")))["custom_id"]
        is None
    )
    assert of_bad_line(BATCH, unanswered(3, "y", EXPIRED_LINE)).share == Totals(failed=1, expired=1)


@pytest.mark.parametrize("state", list(BatchState))
def test_a_batch_in_every_state_is_read_by_openai_s_batch_type(state: BatchState) -> None:
    batch = Batch(
        id=BATCH,
        queue="q",
        state=state,
        input_file="in.jsonl",
        total=3,
        last_line=3,
        created_ms=1_700_000_000_000,
        expires_ms=1_700_086_400_000,
        finished_ms=1_700_000_009_000 if state.is_final else 0,
        errors=(BatchError(code="invalid_json_line", message="what?", line=2),),
        totals=Totals(
            completed=1,
            failed=1,
            input_tokens=4,
            cached_tokens=1,
            output_tokens=2,
            reasoning_tokens=1,
        ),
        metadata={"k": "v"},
    )
    received = TheirBatch.model_validate_json(encode_json(batch), strict=True)
    assert received.status == state.value
    assert received.request_counts is not None
    assert (
        received.request_counts.total,
        received.request_counts.completed,
        received.request_counts.failed,
    ) == (3, 1, 1)
    assert received.usage is not None
    assert received.usage.total_tokens == 6
    assert received.usage.output_tokens_details.reasoning_tokens == 1
    ends = {
        "completed": received.completed_at,
        "failed": received.failed_at,
        "expired": received.expired_at,
    }
    ends["cancelled"] = received.cancelled_at
    assert {name for name, moment in ends.items() if moment} == (
        {state.value} if state.is_final else set()
    )


def encode_json(batch: Batch) -> bytes:
    import msgspec

    assert encode(batch)  # also what is stored can travel
    return msgspec.json.encode(batch.public())


def test_a_text_with_unicode_line_breaks_stays_on_one_line() -> None:
    """Python's `splitlines` and others take more than a newline for an end."""
    text = "a\u2028b\u2029c\x85d\x0be\x1cf ☁\u2027"
    choice = msgspec.structs.replace(result(BATCH, 1).choices[0], text=text, logprobs=None)
    data = of_result(BATCH, result(BATCH, 1, choices=(choice,))).data.decode()
    bad = of_bad_line(BATCH, BadLine(2, text, "x", text)).data.decode()
    assert [len(line.splitlines()) for line in (data, bad)] == [1, 1]
    assert json.loads(data)["response"]["body"]["choices"][0]["message"]["content"] == text
    assert json.loads(bad)["custom_id"] == text
