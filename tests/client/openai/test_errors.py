"""Each exception of the clients, and each error of a job, has a status and OpenAI's type."""

import msgspec
import pytest
from openai.types.shared import ErrorObject as TheirError

from tests.client.bulk.support import result
from tests.client.test_travelling_errors import SAMPLES
from tokenmill import errors
from tokenmill.files.object_store import FilesUnavailable
from tokenmill.openai.errors import ApiError, of_exception, of_job
from tokenmill.openai.form_values import FormError
from tokenmill_schemas.result import JobError, JobStatus

REQUEST = "invalid_request_error"
BUSY = "rate_limit_error"
AWAY = "service_unavailable_error"
EXPECTED = {
    errors.ConfigurationError: (503, AWAY, "wrong_configuration"),
    errors.InvalidRequest: (400, REQUEST, "invalid_value"),
    errors.QueueFull: (429, BUSY, "queue_full"),
    errors.RateLimited: (429, BUSY, "rate_limit_exceeded"),
    errors.IdempotencyConflict: (422, REQUEST, "idempotency_conflict"),
    errors.JobNotFound: (404, REQUEST, "not_found"),
    errors.ResultTimeout: (504, "server_error", "timeout"),
    errors.QueueUnserved: (503, AWAY, "queue_unserved"),
    errors.JobFailed: (500, "server_error", "engine_error"),
    errors.QueueUnavailable: (503, AWAY, "queue_unavailable"),
    FilesUnavailable: (503, AWAY, "queue_unavailable"),
    FormError: (400, REQUEST, "invalid_type"),
}


def read(error: ApiError) -> TheirError:
    return TheirError.model_validate(msgspec.to_builtins(error.body)["error"], strict=True)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_exception_has_a_status_a_type_and_a_code(error: errors.TokenmillError) -> None:
    status, kind, code = EXPECTED.get(type(error), (500, "server_error", "internal_error"))
    answered = of_exception(error)
    received = read(answered)
    assert (answered.status, received.type, received.code) == (status, kind, code)
    if not isinstance(error, errors.JobFailed):
        assert received.message == str(error)


@pytest.mark.parametrize(
    ("sentence", "param"),
    [("temperature must be at least 0", "temperature"), ("messages[0] is empty", "messages"),
     ("the job is too large", None)],
)  # fmt: skip
def test_a_refusal_names_the_parameter_with_which_its_sentence_begins(
    sentence: str, param: str | None
) -> None:
    assert of_exception(errors.InvalidRequest([sentence])).param == param
    assert of_exception(FormError("no such key", "tools[0].x")).param == "tools[0].x"


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("invalid_request", 400, REQUEST),
        ("context_length_exceeded", 400, REQUEST),
        ("model_not_found", 404, REQUEST),
        ("engine_error", 500, "server_error"),
    ],
)
def test_a_failed_job_is_answered_as_the_api_would(code: str, status: int, kind: str) -> None:
    failed = result("batch_1", 1, JobStatus.FAILED, error=JobError(code, "because"))
    answered = of_job(failed)
    received = read(answered)
    assert (answered.status, received.code, received.type) == (status, code, kind)
    assert received.message == "because"
    assert of_exception(errors.JobFailed(failed)) == answered


def test_a_job_that_ended_without_an_error_names_its_state() -> None:
    answered = of_job(result("batch_1", 1, JobStatus.DEAD))
    assert answered == ApiError(500, "dead", "the job ended as dead")
