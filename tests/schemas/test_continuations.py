"""Continuations that cannot be scored are refused, each with one sentence."""

from typing import Any

import pytest

from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.job import JobRequest
from tokenmill_schemas.validation import problems

DRAWING: dict[str, Any] = {
    "n": 2,
    "stop": ("x",),
    "max_tokens": 5,
    "temperature": 0.5,
    "prompt_logprobs": 1,
    "logit_bias": {1: 1.0},
    "response_format": ResponseFormat(regex="a"),
    "logprobs_mode": "processed_logprobs",
}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"continuations": ("a",) * 129}, "continuations may have 128 entries, not 129"),
        ({"continuations": ("a", "")}, "continuations[1] is empty; it needs at least one token"),
        ({"continuations": ((),)}, "continuations[0] is empty; it needs at least one token"),
        ({"continuations": ((1, -1),)}, "continuations[0] holds -1, which is no token id"),
        ({"continuations": ("a" * 300_000,)}, "continuations may have 262144 bytes, not 300006"),
        (
            {"continuations": ("a\ud800",)},
            "continuations[0] is not valid Unicode: a lone surrogate stands at character 1",
        ),
        (
            {"prompt": None, "prompt_ids": (1,), "continuations": ("a",)},
            "continuations[0] is a text, and the prompt is token ids: give token ids here too",
        ),
        *(
            (
                {"continuations": ("a",), "params": SamplingParams(**{name: value})},
                f"{name} cannot be given with continuations: they are scored, and nothing is drawn",
            )
            for name, value in DRAWING.items()
        ),
    ],
)
def test_each_problem_of_continuations_is_reported(fields: dict[str, Any], sentence: str) -> None:
    request = JobRequest(**({"job_id": "j", "prompt": "x"} | fields))
    assert any(sentence in problem for problem in problems(request)), problems(request)


def test_valid_continuations_have_no_problem() -> None:
    params = SamplingParams(top_logprobs=3, lora="poems", speculate=False)
    request = JobRequest(job_id="j", prompt="x", continuations=(" a", (5, 6)), params=params)
    assert problems(request) == []
