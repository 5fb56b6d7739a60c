"""Values of a task: choices that were scored have the sum of their log-probabilities."""

from tokenmill.celery.values import value_of
from tokenmill_schemas.generation import FinishReason, TokenLogprob
from tokenmill_schemas.result import ChoiceResult, JobResult, JobStatus


def test_a_choice_has_the_sum_of_its_log_probabilities_where_it_has_any() -> None:
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
