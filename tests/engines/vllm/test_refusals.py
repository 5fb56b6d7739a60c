"""Hostile requests, and those beyond vLLM's own bounds, sent to one loaded vLLM past the worker's
checks: each ends alone with one sentence, and the engine goes on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.conformance.conftest import LENGTH, start_of_kind
from tests.engines.conformance.driver import PROMPT, EngineUnderTest, one, request
from tests.support.vllm import VLLM, needs_vllm, with_vllm
from tokenmill_schemas.generation import FinishReason, ResponseFormat
from tokenmill_worker.engines.process.host import CHILD_MODULE

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(1_200), needs_vllm]

BEYOND = 10**8  # no vocabulary has it
REFUSED: dict[str, dict[str, Any]] = {
    "a prompt id beyond the vocabulary": {"prompt": (*PROMPT, BEYOND)},
    "a negative prompt id": {"prompt": (-1, *PROMPT)},
    "a resumed id beyond the vocabulary": {"resumed": ((BEYOND,),)},
    "a given id beyond the vocabulary": {"given": ((BEYOND,),)},
    "a prompt of a million ids": {"prompt": (5,) * 10**6},
    "a million stop ids beyond the vocabulary": {"stop_token_ids": (BEYOND,) * 10**6},
    "129 stop ids beside min_tokens": {"stop_token_ids": tuple(range(129)), "min_tokens": 2},
    "a bias beyond the vocabulary": {"logit_bias": {BEYOND: 1.0}},
    "more biased and suppressed ids than vLLM has room for": {
        "logit_bias": dict.fromkeys(range(600), 1.0),
        "suppress_tokens": tuple(range(600, 1_200)),
    },
    **{
        f"{name} that is no number": {name: math.nan}
        for name in (
            "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty",
            "repetition_penalty",
        )
    },
    "a bias that is no number": {"logit_bias": {5: math.nan}},
    "a temperature that is infinite": {"temperature": math.inf},
    "a temperature beyond vLLM's": {"temperature": 2.5},
    "a presence penalty beyond 2": {"presence_penalty": 2.5},
    "101 log-probabilities": {"logprobs": 101},
    "101 log-probabilities of the prompt": {"prompt_logprobs": 101},
    "processed log-probabilities": {"logprobs": True, "logprobs_mode": "processed_logprobs"},
    "129 choices": {"n": 129},
    "an unknown adapter": {"lora": "nobody"},
    "a prompt as long as the context": {"prompt": (5,) * LENGTH},
    "an expression that cannot be read": {"response_format": ResponseFormat(regex="[0-9")},
    "an expression of 2³¹ letters": {"response_format": ResponseFormat(regex="a{2147483648}")},
    "a grammar without a root": {"response_format": ResponseFormat(grammar='x ::= "a"')},
    "a schema that cannot be true": {"response_format": ResponseFormat(json_schema={"enum": []})},
    "a resumed answer that its form excludes": {
        "response_format": ResponseFormat(regex="[0-9]{6}"), "resumed": ((5,),),
    },
}  # fmt: skip

GREAT: dict[str, dict[str, Any]] = {
    "a million stop ids": {"stop_token_ids": tuple(range(1_000)) * 1_000},
    "an expression of a million letters": {"response_format": ResponseFormat(regex="a{1000000}")},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineUnderTest]:
    environment = with_vllm(os.environ)  # noqa: TID251
    engine = EngineUnderTest([str(VLLM), "-m", CHILD_MODULE], start_of_kind("vllm"), environment)
    try:
        engine.ready()
        yield engine
    finally:
        engine.kill()


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_a_request_that_vllm_cannot_do_ends_alone_with_one_sentence(
    engine: EngineUnderTest, fields: dict[str, Any]
) -> None:
    good = request()
    (refused, *_), (beside,) = engine.answer_all([request(**fields), good])
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.error_code in ("invalid_request", "context_length_exceeded")
    assert refused.error
    assert "\n" not in refused.error
    assert len(refused.error) < 1_000
    assert len(beside.token_ids) == 8
    assert engine.process.poll() is None


@pytest.mark.parametrize("fields", GREAT.values(), ids=GREAT)
def test_a_great_request_that_vllm_can_do_is_answered_beside_another(
    engine: EngineUnderTest, fields: dict[str, Any]
) -> None:
    (great,), (beside,) = engine.answer_all([request(**fields), request()])
    assert great.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert (bool(great.token_ids), great.error) == (True, None)
    assert len(beside.token_ids) == 8


def test_128_choices_with_100_log_probabilities_each_end(engine: EngineUnderTest) -> None:
    choices = engine.answer(request(n=128, logprobs=100, max_tokens=2), 600)
    assert [len(choice.token_ids) for choice in choices] == [2] * 128
    assert {len(found.top) for choice in choices for found in choice.logprobs} == {100}
    assert len(one(engine).token_ids) == 8
