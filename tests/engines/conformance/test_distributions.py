"""Tests of tokens that follow from a model's distribution, and of its log-probabilities."""

from __future__ import annotations

import pytest

from tests.engines.conformance.driver import PROMPT, EngineUnderTest, one, request
from tokenmill_schemas.generation import FinishReason
from tokenmill_worker.contract.messages import Ready
from tokenmill_worker.engines import KINDS


def need(ready: Ready, *names: str) -> None:
    """Skip where an engine reports that it lacks an ability or a parameter."""
    found = ready.capabilities
    lacking = [
        name for name in names if name in found.unavailable or getattr(found, name, None) is False
    ]
    if lacking:
        pytest.skip(f"this engine has no {' and no '.join(lacking)}")


def test_a_seed_gives_the_same_tokens_and_another_seed_others(model: EngineUnderTest) -> None:
    first, second, third = (
        one(model, temperature=1.0, seed=seed, max_tokens=16).token_ids for seed in (7, 7, 8)
    )
    assert first == second != third


def test_sampled_choices_of_one_request_differ(model: EngineUnderTest) -> None:
    choices = model.answer(request(n=4, temperature=1.0, seed=3, max_tokens=16))
    assert len({tuple(choice.token_ids) for choice in choices}) == 4


def test_a_biased_token_occurs_and_a_suppressed_one_does_not(
    model: EngineUnderTest, ready: Ready
) -> None:
    need(ready, "logit_bias", "suppress_tokens")
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


def test_prompt_log_probabilities_cover_all_but_the_first_token(
    model: EngineUnderTest, ready: Ready
) -> None:
    need(ready, "prompt_logprobs")
    answer = one(model, prompt_logprobs=2)
    assert len(answer.prompt_logprobs) == len(PROMPT) - 1
    assert all(entry.logprob < 0 and len(entry.top) == 2 for entry in answer.prompt_logprobs)


def test_given_tokens_are_scored_as_a_prompt_of_them_is(
    model: EngineUnderTest, ready: Ready
) -> None:
    need(ready, "scores", "prompt_logprobs")
    first, second = model.answer(request(n=2, given=((5, 6, 7), (8, 9)), logprobs=1))
    assert (first.token_ids, second.token_ids) == ([5, 6, 7], [8, 9])
    whole = one(model, prompt=(*PROMPT, 5, 6, 7), prompt_logprobs=0).prompt_logprobs[-3:]
    scores = [entry.logprob for entry in first.logprobs]
    assert scores == pytest.approx([entry.logprob for entry in whole], abs=1e-3)


PENALTIES = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "both": {"presence_penalty": 1.5, "frequency_penalty": 0.5},
}


@pytest.mark.parametrize("penalties", PENALTIES.values(), ids=PENALTIES)
def test_penalties_of_a_resumed_choice_count_its_tokens_once(
    model: EngineUnderTest, penalties: dict[str, float]
) -> None:
    whole = one(model, max_tokens=32, **penalties).token_ids
    assert len(set(whole)) < len(whole)  # some tokens occur before and behind a cut
    for cut in (1, 17, 31):
        rest = one(model, max_tokens=32, resumed=(tuple(whole[:cut]),), **penalties)
        assert (rest.token_ids, rest.finish_reason) == (whole[cut:], FinishReason.LENGTH)


def test_penalties_of_a_resumed_choice_count_its_tokens(
    model: EngineUnderTest, ready: Ready
) -> None:
    need(ready, "frequency_penalty", "repetition_penalty")
    penalties = {"frequency_penalty": 1.5, "repetition_penalty": 1.1, "max_tokens": 12}
    whole = one(model, **penalties).token_ids
    assert one(model, resumed=(tuple(whole[:6]),), **penalties).token_ids == whole[6:]


def test_a_tenants_salt_separates_its_prefixes(model: EngineUnderTest, kind: str) -> None:
    prompt = tuple(range(1_000, 1_400))
    assert one(model, prompt=prompt, cache_salt="a").num_cached_tokens == 0
    cached = one(model, prompt=prompt, cache_salt="a").num_cached_tokens
    assert cached >= 256 or kind not in KINDS  # another engine may have no prefix cache
    assert one(model, prompt=prompt, cache_salt="b").num_cached_tokens == 0
