"""Tests of what an engine does with requests, for each kind of engine."""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import pytest

from tests.engines.conformance.conftest import LENGTH, PLACES
from tests.engines.conformance.driver import EngineUnderTest, ReportedChoice
from tokenmill_schemas.generation import FinishReason, ResponseFormat, SamplingParams
from tokenmill_worker.contract.messages import CancelRequest, Ready
from tokenmill_worker.contract.requests import GenerationRequest, Prompt, Thoughts

PROMPT = tuple(range(100, 140))
_numbers = itertools.count()
_REQUEST = set(GenerationRequest.__struct_fields__)


def request(prompt: tuple[int, ...] = PROMPT, **fields: Any) -> GenerationRequest:
    """A greedy request of eight tokens; fields are those of the request or of its parameters."""
    own = {name: fields.pop(name) for name in list(fields) if name in _REQUEST}
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, **fields}
    return GenerationRequest(
        request_id=f"r{next(_numbers)}",
        prompt=Prompt(prompt),
        params=SamplingParams(**params),
        **own,
    )


def one(engine: EngineUnderTest, **fields: Any) -> ReportedChoice:
    (answer,) = engine.answer(request(**fields))
    return answer


def test_an_answer_has_max_tokens_and_one_end(engine: EngineUnderTest) -> None:
    answer = one(engine)
    assert (len(answer.token_ids), answer.finish_reason) == (8, FinishReason.LENGTH)
    assert answer.token_ids == one(engine).token_ids


def test_an_answer_without_max_tokens_fills_the_context(engine: EngineUnderTest) -> None:
    prompt = (100, 101) * (LENGTH // 2 - 3) + (102,)
    answer = one(engine, prompt=prompt, max_tokens=None)
    assert (len(answer.token_ids), answer.finish_reason) == (5, FinishReason.LENGTH)


def test_greedy_choices_are_equal_and_done_ones_do_not_run(engine: EngineUnderTest) -> None:
    wanted = request(n=3, done=(1,))
    first, third = engine.answer(wanted)
    assert first.token_ids == third.token_ids
    assert (wanted.request_id, 1) not in engine.answers


def test_a_resumed_choice_goes_on_behind_its_tokens(engine: EngineUnderTest) -> None:
    whole = one(engine).token_ids
    for cut in (1, 4, 7):
        assert one(engine, resumed=(tuple(whole[:cut]),)).token_ids == whole[cut:]


def test_a_seed_gives_the_same_tokens_and_another_seed_others(model: EngineUnderTest) -> None:
    first, second, third = (
        one(model, temperature=1.0, seed=seed, max_tokens=16).token_ids for seed in (7, 7, 8)
    )
    assert first == second != third


def test_sampled_choices_of_one_request_differ(model: EngineUnderTest) -> None:
    choices = model.answer(request(n=4, temperature=1.0, seed=3, max_tokens=16))
    assert len({tuple(choice.token_ids) for choice in choices}) == 4


def test_a_stop_token_ends_an_answer_and_is_reported(engine: EngineUnderTest) -> None:
    whole = one(engine).token_ids
    answer = one(engine, stop_token_ids=(whole[3],))
    end = whole.index(whole[3]) + 1
    assert (answer.token_ids, answer.finish_reason) == (whole[:end], FinishReason.STOP)


def test_min_tokens_keep_a_stop_token_from_ending_an_answer(engine: EngineUnderTest) -> None:
    stop = one(engine).token_ids[0]
    answer = one(engine, stop_token_ids=(stop,), min_tokens=6)
    assert len(answer.token_ids) >= 6


def test_a_biased_token_occurs_and_a_suppressed_one_does_not(
    model: EngineUnderTest, ready: Ready
) -> None:
    assert one(model, logit_bias={77: 100.0}).token_ids == [77] * 8
    first = one(model).token_ids[0]
    assert first not in one(model, suppress_tokens=(first,)).token_ids


def test_log_probabilities_name_each_token_and_the_most_likely(model: EngineUnderTest) -> None:
    answer = one(model, logprobs=3)
    assert len(answer.logprobs) == 8
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry.top[0][0] == token
        assert entry.top[0][1] == pytest.approx(entry.logprob)
        assert len(entry.top) == 3
        assert [value for _, value in entry.top] == sorted((v for _, v in entry.top), reverse=True)


def test_prompt_log_probabilities_cover_all_but_the_first_token(model: EngineUnderTest) -> None:
    answer = one(model, prompt_logprobs=2)
    assert len(answer.prompt_logprobs) == len(PROMPT) - 1
    assert all(entry.logprob < 0 and len(entry.top) == 2 for entry in answer.prompt_logprobs)


def test_given_tokens_are_scored_as_a_prompt_of_them_is(model: EngineUnderTest) -> None:
    first, second = model.answer(request(n=2, given=((5, 6, 7), (8, 9)), logprobs=1))
    assert (first.token_ids, second.token_ids) == ([5, 6, 7], [8, 9])
    whole = one(model, prompt=(*PROMPT, 5, 6, 7), prompt_logprobs=0).prompt_logprobs[-3:]
    scores = [entry.logprob for entry in first.logprobs]
    assert scores == pytest.approx([entry.logprob for entry in whole], abs=1e-3)


def test_penalties_of_a_resumed_choice_count_its_tokens(model: EngineUnderTest) -> None:
    penalties = {"frequency_penalty": 1.5, "repetition_penalty": 1.1, "max_tokens": 12}
    whole = one(model, **penalties).token_ids
    assert one(model, resumed=(tuple(whole[:6]),), **penalties).token_ids == whole[6:]


def test_a_tenants_salt_separates_its_prefixes(model: EngineUnderTest) -> None:
    prompt = tuple(range(1_000, 1_400))
    assert one(model, prompt=prompt, cache_salt="a").num_cached_tokens == 0
    assert one(model, prompt=prompt, cache_salt="a").num_cached_tokens >= 256
    assert one(model, prompt=prompt, cache_salt="b").num_cached_tokens == 0


REFUSED = {
    "an empty prompt": {"prompt": ()},
    "a prompt id beyond the vocabulary": {"prompt": (10**8,)},
    "a negative prompt id": {"prompt": (-1,)},
    "a prompt as long as the context": {"prompt": (5,) * LENGTH},
    "more tokens than the context has": {"max_tokens": LENGTH},
    "no tokens": {"max_tokens": 0},
    "no choices": {"n": 0},
    "too many choices": {"n": 1_000},
    "a temperature that is no number": {"temperature": math.nan},
    "a negative temperature": {"temperature": -1.0},
    "a top_p above 1": {"top_p": 1.5},
    "a stop id beyond the vocabulary": {"stop_token_ids": (10**8,)},
    "a bias that is no number": {"logit_bias": {5: math.nan}},
    "an unknown adapter": {"lora": "nobody"},
    "a resumed answer that is complete": {"resumed": ((5,) * 8,)},
    "given tokens of another number of choices": {"n": 2, "given": ((5,),)},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_a_bad_request_ends_alone_with_a_sentence(
    engine: EngineUnderTest, fields: dict[str, Any]
) -> None:
    good = request()
    refused, *rest = engine.answer_all([request(**fields), good])
    assert refused[0].finish_reason is FinishReason.ERROR
    assert refused[0].error
    assert refused[0].error_code in ("invalid_request", "context_length_exceeded")
    assert len(rest[0][0].token_ids) == 8


def test_a_cancelled_request_ends_and_others_go_on(engine: EngineUnderTest) -> None:
    long, other = request(max_tokens=400), request(max_tokens=60)
    engine.submit(long, other)
    key = (long.request_id, 0)
    engine.until(lambda: len(engine.of(key).token_ids) >= 5)
    engine.send(CancelRequest(long.request_id, FinishReason.CANCELLED))
    engine.until(lambda: engine.answers[key].finish_reason is not None)
    assert engine.answers[key].finish_reason is FinishReason.CANCELLED
    engine.until(lambda: engine.answers[other.request_id, 0].finish_reason is not None)
    assert len(engine.answers[other.request_id, 0].token_ids) == 60


def test_one_choice_is_cancelled_alone(engine: EngineUnderTest) -> None:
    wanted = request(n=2, max_tokens=100)
    engine.submit(wanted)
    keys = [(wanted.request_id, choice) for choice in (0, 1)]
    engine.until(lambda: all(engine.of(key).token_ids for key in keys))
    engine.send(CancelRequest(wanted.request_id, FinishReason.STOP, 1))
    engine.until(lambda: all(engine.answers[key].finish_reason for key in keys))
    assert engine.answers[keys[1]].finish_reason is FinishReason.STOP
    assert len(engine.answers[keys[0]].token_ids) == 100


def test_a_cancel_of_what_is_not_there_changes_nothing(engine: EngineUnderTest) -> None:
    ended = request()
    engine.answer(ended)
    for name in (ended.request_id, "nobody"):
        engine.send(CancelRequest(name, FinishReason.CANCELLED))
    assert len(one(engine).token_ids) == 8
    assert engine.answers[ended.request_id, 0].finish_reason is FinishReason.LENGTH


def test_a_request_whose_deadline_passes_ends_as_expired(engine: EngineUnderTest) -> None:
    answer = one(engine, max_tokens=None, deadline=time.monotonic() + 0.1)
    assert answer.finish_reason is FinishReason.EXPIRED


def test_a_deadline_holds_while_commands_arrive(engine: EngineUnderTest) -> None:
    long = request(max_tokens=900, deadline=time.monotonic() + 0.3)
    engine.submit(long)
    key = (long.request_id, 0)
    for _ in range(200):
        engine.send(CancelRequest("nobody", FinishReason.CANCELLED))
        engine.report()
        if engine.of(key).finish_reason:
            break
        time.sleep(0.02)
    assert engine.of(key).finish_reason is FinishReason.EXPIRED


def test_an_interactive_request_starts_beside_a_full_batch_of_bulk(
    engine: EngineUnderTest,
) -> None:
    bulk = [request(prompt=(i, *PROMPT), max_tokens=150, priority=2) for i in range(2 * PLACES)]
    alone = [engine.answer(item)[0].token_ids for item in bulk[:1]]
    engine.submit(*bulk)
    running = [(item.request_id, 0) for item in bulk[:PLACES]]
    engine.until(lambda: all(engine.of(key).token_ids for key in running))
    urgent, before = request(priority=0), len(engine.frames)
    engine.submit(urgent)
    engine.until(lambda: bool(engine.of((urgent.request_id, 0)).token_ids))
    steps = [frame for frame in engine.frames[before:] if frame.events]
    assert len(steps) <= 8  # a step that runs, one that takes its place, its prefill
    keys = [(item.request_id, 0) for item in bulk]
    engine.until(lambda: all(engine.of(key).finish_reason for key in keys), 600)
    assert [len(engine.answers[key].token_ids) for key in keys] == [150] * len(bulk)
    assert engine.answers[keys[0]].token_ids == alone[0]


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


def test_nothing_is_lost_when_reports_are_not_read_for_a_while(engine: EngineUnderTest) -> None:
    wanted = [request(prompt=(i, *PROMPT), max_tokens=100, logprobs=20) for i in range(PLACES)]
    engine.submit(*wanted)
    time.sleep(3)
    keys = [(item.request_id, 0) for item in wanted]
    engine.until(lambda: all(engine.of(key).finish_reason for key in keys), 300)
    assert [len(engine.answers[key].logprobs) for key in keys] == [100] * PLACES


def test_an_idle_engine_reports_its_figures(engine: EngineUnderTest) -> None:
    one(engine)
    before = len(engine.frames)
    engine.until(lambda: len(engine.frames) >= before + 3, 30)
    last = engine.frames[-1]
    assert last.stats is not None
    assert (last.capacity.running, last.capacity.waiting) == (0, 0)
    assert last.capacity.free_sequences == PLACES
    assert last.stats.generated_tokens > 0
