"""Tests of what else a service builds on: places by priority, grammars, thoughts, statistics."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.engines.conformance.conftest import PLACES
from tests.engines.conformance.driver import PROMPT, EngineUnderTest, one, request
from tokenmill_schemas.generation import FinishReason, ResponseFormat
from tokenmill_worker.contract.messages import Ready
from tokenmill_worker.contract.requests import GenerationRequest, Thoughts


def test_an_interactive_request_starts_beside_a_full_batch_of_bulk(
    engine: EngineUnderTest,
) -> None:
    def bulk() -> list[GenerationRequest]:
        prompts = [(number, *PROMPT) for number in range(2 * PLACES)]
        return [request(prompt=prompt, max_tokens=100, priority=2) for prompt in prompts]

    calm = [answer.token_ids for (answer,) in engine.answer_all(bulk(), 600)]
    beside = bulk()
    engine.submit(*beside)
    keys = [(item.request_id, 0) for item in beside]
    engine.until(lambda: all(engine.of(key).token_ids for key in keys[:PLACES]))
    urgent = request(priority=0)
    sent_s = time.monotonic()
    engine.submit(urgent)
    engine.until(lambda: bool(engine.of((urgent.request_id, 0)).token_ids))
    steps = [frame for frame in engine.frames if frame.events and frame.ended_s > sent_s]
    assert len(steps) <= 5
    engine.until(lambda: all(engine.of(key).finish_reason for key in keys), 600)
    assert [engine.answers[key].token_ids for key in keys] == calm


FORMS = {
    "a regular expression": ResponseFormat(regex="[0-9]{6}"),
    "a JSON schema": ResponseFormat(
        json_schema={
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
            "required": ["a"],
            "additionalProperties": False,
        }
    ),
    "a grammar": ResponseFormat(grammar='root ::= "yes" | "no"'),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_form_binds_an_answer_also_over_a_cut(
    engine: EngineUnderTest, ready: Ready, form: ResponseFormat
) -> None:
    if not ready.capabilities.structured:
        (answer,) = engine.answer(request(response_format=form))
        assert answer.error is not None
        assert "response_format is not available" in answer.error
        return
    fields: dict[str, Any] = {"response_format": form, "max_tokens": 60, "ignore_eos": False}
    whole = one(engine, **fields)
    assert whole.finish_reason is FinishReason.STOP
    for cut in range(1, len(whole.token_ids)):
        rest = one(engine, resumed=(tuple(whole.token_ids[:cut]),), **fields)
        assert rest.token_ids == whole.token_ids[cut:]


def test_a_form_that_cannot_be_read_is_refused_with_its_reason(engine: EngineUnderTest) -> None:
    (answer,) = engine.answer(request(response_format=ResponseFormat(regex="[0-9")))
    assert answer.error_code == "invalid_request"
    assert answer.error is not None
    assert "response_format" in answer.error


def test_a_budget_ends_the_thoughts(engine: EngineUnderTest, ready: Ready) -> None:
    if not ready.capabilities.thinking_budget:
        pytest.skip("this engine has no budget of thoughts")
    thoughts = Thoughts(end=(50, 51), closing=(49, 50, 51), is_open=True, budget=4)
    answer = one(engine, thoughts=thoughts, max_tokens=20)
    assert answer.token_ids[4:7] == [49, 50, 51]


def test_an_idle_engine_reports_its_statistics(engine: EngineUnderTest) -> None:
    one(engine)
    before = len(engine.frames)
    engine.until(lambda: len(engine.frames) >= before + 3, 30)
    stats = engine.frames[-1].stats
    assert stats is not None
    assert stats.generated_tokens > 0
