"""Request validation refuses whatever could break a step, with a sentence that names it."""

import pytest

from tests.schemas.samples import PARAMS
from tokenmill_schemas.generation import SamplingParams
from tokenmill_schemas.size_limits import MAX_STOP_TOKEN_IDS
from tokenmill_worker.contract.requests import (
    GenerationRequest,
    MediaSpan,
    Prompt,
    RequestError,
    choice_seed,
)
from tokenmill_worker.engines.own.requests import RequestValidator

VALIDATOR = RequestValidator(vocab_size=100, max_model_len=16)


def admit(prompt=(1, 2, 3), **params):
    request = GenerationRequest(
        request_id="r", prompt=Prompt(tuple(prompt)), params=SamplingParams(**params)
    )
    return VALIDATOR.validate(request)


@pytest.mark.parametrize(
    ("prompt", "params", "code", "says"),
    [
        ((), {}, "invalid_request", "empty"),
        ((1, 100), {}, "invalid_request", "100 is outside"),
        ((-1, 5), {}, "invalid_request", "-1 is outside"),
        (range(16), {}, "context_length_exceeded", "16 tokens"),
        ((1,), {"max_tokens": 16}, "context_length_exceeded", "max_tokens=16"),
        ((1,), {"max_tokens": 0}, "invalid_request", "max_tokens must be from 1 to"),
        ((1,), {"temperature": -0.1}, "invalid_request", "temperature"),
        ((1,), {"temperature": float("nan")}, "invalid_request", "temperature"),
        ((1,), {"top_p": -0.1}, "invalid_request", "top_p"),
        ((1,), {"top_k": -2}, "invalid_request", "top_k"),
        ((1,), {"min_p": 1.5}, "invalid_request", "min_p"),
        ((1,), {"n": 0}, "invalid_request", "n must"),
        ((1,), {"repetition_penalty": 0.0}, "invalid_request", "repetition_penalty"),
        ((1,), {"repetition_penalty": 1e-300}, "invalid_request", "repetition_penalty must be"),
        ((1,), {"presence_penalty": float("inf")}, "invalid_request", "presence_penalty"),
        ((1,), {"stop_token_ids": (100,)}, "invalid_request", "stop_token_ids has id 100"),
        ((1,), {"logit_bias": {-3: 1.0}}, "invalid_request", "logit_bias holds -3"),
        ((1,), {"logit_bias": {3: float("nan")}}, "invalid_request", r"logit_bias\[3\] must be"),
        ((1,), {"bad_words_ids": ((1, 100),)}, "invalid_request", "bad_words_ids has id 100, outs"),
        ((1,), {"bad_words_ids": ((1,), ())}, "invalid_request", "at least one id"),
        ((1,), {"sequence_bias": (((-1,), 1.0),)}, "invalid_request", "sequence_bias holds -1"),
        ((1,), {"sequence_bias": (((1,), float("nan")),)}, "invalid_request", "not nan"),
        ((1,), {"no_repeat_ngram_size": 0}, "invalid_request", "from 1 to 256, not 0"),
        ((1,), {"suppress_tokens": (100,)}, "invalid_request", "suppress_tokens has id 100"),
        ((1,), {"begin_suppress_tokens": (-1,)}, "invalid_request", "suppress_tokens holds -1"),
        ((1,), {"forced_bos_token_id": 100}, "invalid_request", "forced_bos_token_id has id 100"),
        ((1,), {"forced_eos_token_id": (1, 100)}, "invalid_request", "token_id has id 100"),
        (
            (1,),
            {"forced_bos_token_id": 5, "suppress_tokens": (5,)},
            "invalid_request",
            "forced_bos_token_id 5 is in suppress_tokens",
        ),
        ((1,), {"top_logprobs": 1000}, "invalid_request", "top_logprobs"),
        ((1,), {"prompt_logprobs": -1}, "invalid_request", "prompt_logprobs must be from 0 to 100"),
        (
            (1,),
            {"logprobs_mode": "raw"},
            "invalid_request",
            "logprobs_mode must be raw_logprobs or processed_logprobs, not 'raw'",
        ),
    ],
)
def test_an_impossible_request_is_refused_with_its_reason(prompt, params, code, says):
    with pytest.raises(RequestError, match=says) as caught:
        admit(prompt, **params)
    assert caught.value.code == code


@pytest.mark.parametrize(("priority", "classes"), [(0, [0, 0, 0, 0, 2, 2]), (3, [3] * 6)])
def test_choices_beyond_the_fourth_run_as_bulk_work(priority, classes):
    request = GenerationRequest(
        request_id="r", prompt=Prompt((1, 2, 3)), params=SamplingParams(n=6), priority=priority
    )
    assert [sequence.priority for sequence in VALIDATOR.validate(request)] == classes


def test_nan_is_refused_in_every_parameter():
    for name in SamplingParams.__struct_fields__:
        if isinstance(getattr(PARAMS, name), float):
            with pytest.raises(RequestError, match=name):
                admit(**{name: float("nan")})


def test_several_problems_are_listed_together():
    with pytest.raises(RequestError) as caught:
        admit(temperature=-1.0, top_p=2.0)
    assert "temperature" in str(caught.value)
    assert "top_p" in str(caught.value)


def test_no_max_tokens_means_the_rest_of_the_models_length():
    (sequence,) = admit((1, 2, 3))
    assert sequence.max_tokens == 13


def test_each_choice_has_its_own_seed_and_the_first_the_request_s():
    sequences = admit((1,), n=3, seed=7)
    assert [s.choice for s in sequences] == [0, 1, 2]
    assert sequences[0].seed == 7 == admit((1,), seed=7)[0].seed
    assert len({s.seed for s in sequences}) == 3
    assert choice_seed(7, 1) == sequences[1].seed


def test_seeds_use_all_64_bits_and_negative_seeds_wrap():
    seeds = [admit((1,), seed=1 << bit)[0].seed for bit in range(64)]
    assert seeds == [1 << bit for bit in range(64)]
    assert admit((1,), seed=-1)[0].seed == admit((1,), seed=2**64 - 1)[0].seed == 2**64 - 1


def test_resumed_tokens_follow_the_prompt_and_ended_choices_do_not_run_again():
    request = GenerationRequest(
        request_id="r",
        prompt=Prompt((1, 2)),
        params=SamplingParams(n=2, max_tokens=4),
        resumed=((5,), (6, 7)),
        done=(0,),
    )
    (sequence,) = RequestValidator(100, 16).validate(request)
    assert sequence.choice == 1
    assert sequence.token_ids == [1, 2, 6, 7]
    assert sequence.num_output_tokens == 2


def test_a_resumed_answer_at_its_limit_is_refused():
    request = GenerationRequest(
        request_id="r", prompt=Prompt((1,)), params=SamplingParams(max_tokens=2), resumed=((5, 6),)
    )
    with pytest.raises(RequestError, match="limit is 2"):
        RequestValidator(100, 16).validate(request)


def admit_given(*given, resumed=(), n=None):
    request = GenerationRequest(
        request_id="r", prompt=Prompt((1, 2, 3)), params=SamplingParams(n=n or len(given)),
        given=given, resumed=resumed,
    )  # fmt: skip
    return VALIDATOR.validate(request)


def test_given_answers_are_scored_after_the_tokens_already_reported():
    first, second = admit_given((4, 5), (6, 7, 8), resumed=((), (6,)))
    assert (first.token_ids, first.next_scored, first.scored_end) == ([1, 2, 3, 4, 5], 3, 5)
    assert (second.next_scored, second.scored_end, second.num_resumed_tokens) == (4, 6, 1)
    assert second.max_tokens == second.num_output_tokens == 3


@pytest.mark.parametrize(
    ("given", "more", "code", "says"),
    [
        (((),), {}, "invalid_request", "given must hold the tokens of each of 1 choices"),
        (((4,),), {"n": 2}, "invalid_request", "given must hold the tokens of each of 2 choices"),
        (((4, 100),), {}, "invalid_request", "given token id 100 is outside"),
        (((4,) * 13,), {}, "context_length_exceeded", "13 given ones make 16"),
        (((4, 5),), {"resumed": ((5,),)}, "invalid_request", "resumes with other tokens"),
    ],
)
def test_impossible_given_answers_are_refused(given, more, code, says):
    with pytest.raises(RequestError, match=says) as caught:
        admit_given(*given, **more)
    assert caught.value.code == code


def test_a_prompt_with_a_picture_is_refused():
    picture = Prompt((1, 2, 3), (MediaSpan(1, 1, "image", b"digest"),))
    with pytest.raises(RequestError, match=r"has a medium \(image\); this engine reads text"):
        VALIDATOR.validate(GenerationRequest(request_id="r", prompt=picture))


def test_an_answer_is_accepted_whose_room_is_below_min_tokens() -> None:
    """The worker lowers max_tokens to the room; the answer then ends by its length."""
    (sequence,) = admit(max_tokens=13, min_tokens=50)
    assert sequence.max_tokens == 13


def test_stop_ids_are_accepted_beyond_the_number_that_a_producer_may_name() -> None:
    """The worker adds the tokenizer's end of turn, and stop strings that are special tokens."""
    validator = RequestValidator(vocab_size=5_000, max_model_len=16)
    stops = tuple(range(MAX_STOP_TOKEN_IDS + 3))
    request = GenerationRequest(
        request_id="r", prompt=Prompt((1,)), params=SamplingParams(stop_token_ids=stops)
    )
    (sequence,) = validator.validate(request)
    assert sequence.params.stop_token_ids == stops
