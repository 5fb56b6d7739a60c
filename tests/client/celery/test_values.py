"""Values of a task: the fields of a job for its arguments, and JSON values for a job's result."""

from typing import Any

import pytest

from tokenmill.celery.values import fields_of, value_of
from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus


def test_a_choice_with_logprobs_has_their_sum() -> None:
    scored = ChoiceResult(
        text="a b",
        token_ids=(1, 2),
        finish_reason=FinishReason.LENGTH,
        logprobs=(TokenLogprob(-0.5), TokenLogprob(-1.25)),
    )
    plain = ChoiceResult(index=1, text="c", finish_reason=FinishReason.STOP)
    result = JobResult(job_id="j", status=JobStatus.SUCCEEDED, choices=(scored, plain))
    first, second = value_of(result, "result")["choices"]
    assert first["total_logprob"] == -1.75
    assert "total_logprob" not in second


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a", {"prompt": "a"}),
        ({"text": "a", "job_id": "j"}, {"prompt": "a"}),
        ([{"text": "a"}, "b"], {"prompt": "a\n\nb"}),
        ([{"role": "user", "content": "a"}], {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_each_form_of_task_argument_becomes_a_request_or_is_refused(
    given: Any, expected: dict[str, Any]
) -> None:
    assert fields_of((given,), {}) == expected
    if "prompt" in expected:
        assert fields_of((given,), {"template": "{text}{x}"}) == {
            "prompt": expected["prompt"] + "{x}"
        }
        messages = [{"role": "user", "content": expected["prompt"]}]
        assert fields_of((given,), {}, chat=True) == {"messages": messages}
