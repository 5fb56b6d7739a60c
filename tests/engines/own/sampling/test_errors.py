"""An error in one sequence's row affects that sequence only."""

import math
from typing import Any

import pytest
import torch

from tests.engines.own.sampling.helpers import (
    ToyModel,
    generate,
    make_sampler,
    make_sequence,
    plan_item,
)
from tokenmill_schemas.generation import ResponseFormat, SamplingParams
from tokenmill_schemas.params_validation import params_problems

VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)
KINDS = (
    GREEDY,
    SamplingParams(),
    SamplingParams(top_p=0.5),
    SamplingParams(logprobs=2, frequency_penalty=0.5),
)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("place", [0, 2])
def test_logits_that_are_not_finite_fail_only_their_sequence(
    broken: float, kind: int, place: int
) -> None:
    def run(logits: torch.Tensor) -> tuple[tuple[tuple[int, ...], ...], dict[int, str]]:
        items = [
            plan_item(make_sequence(KINDS[kind] if i == place else KINDS[1], seed=i))
            for i in range(3)
        ]
        tokens, _, errors = make_sampler(VOCAB).sample(logits, items).finish()
        assert [len(t) for t in tokens] == [0 if i in errors else 1 for i in range(3)]
        return tokens, errors

    torch.manual_seed(kind)
    logits = torch.randn(3, VOCAB)
    healthy, errors = run(logits)
    assert errors == {}
    spoilt = logits.clone()
    spoilt[place, 17] = broken
    tokens, errors = run(spoilt)
    assert list(errors) == [place]
    assert "not finite" in errors[place]
    assert tokens == tuple(() if i == place else t for i, t in enumerate(healthy))


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-300, 1e-40, 1.0, 100.0])
@pytest.mark.parametrize("penalty", [1e-6, 100.0])
@pytest.mark.parametrize("extra", [{}, {"top_p": 1e-300, "min_p": 1e-300}, {"logprobs": 3}])
def test_the_most_extreme_accepted_parameters_sample_without_error(
    temperature: float, penalty: float, extra: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, **extra)
    assert not params_problems(params)
    sequence = make_sequence(params, prompt=tuple(range(VOCAB)))
    torch.manual_seed(5)
    logits = 1e3 * torch.randn(1, VOCAB)
    tokens, _, errors = make_sampler(VOCAB).sample(logits, [plan_item(sequence)]).finish()
    assert errors == {}
    assert len(tokens[0]) == 1


def test_minus_infinity_masks_a_token_without_error() -> None:
    logits = torch.full((2, VOCAB), -math.inf)
    logits[0, 7] = 1.0
    tokens, _, errors = (
        make_sampler(VOCAB)
        .sample(logits, [plan_item(make_sequence(KINDS[1])) for _ in "ab"])
        .finish()
    )
    assert tokens[0] == (7,)
    assert list(errors) == [1]
    assert "no token is allowed" in errors[1]


def test_a_row_with_nan_behind_a_rejected_draft_is_ignored() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 4] = logits[1, 5] = 1.0
    logits[2] = math.nan
    for drafts, wanted in (((4, 6), (4, 5)), ((4, 5), ())):
        tokens, _, errors = (
            make_sampler(VOCAB).sample(logits, [plan_item(make_sequence(GREEDY), drafts)]).finish()
        )
        assert tokens == (wanted,)
        assert bool(errors) == (not wanted)


def test_ids_outside_the_vocabulary_have_no_effect() -> None:
    strange = SamplingParams(
        logit_bias={-3: 5.0, VOCAB + 9: 5.0},
        stop_token_ids=(VOCAB, -1),
        min_tokens=3,
        top_k=10**9,
        ignore_eos=True,
    )
    plain = SamplingParams(ignore_eos=True)
    outputs = [
        generate(make_sampler(VOCAB), ToyModel(VOCAB), [make_sequence(p, seed=3)], 6)[0]
        for p in (strange, plain)
    ]
    assert outputs[0] == outputs[1]


def test_logits_beyond_the_vocabulary_are_never_sampled() -> None:
    logits = torch.zeros(1, VOCAB + 14)
    logits[0, VOCAB + 2] = 50.0
    tokens, _, errors = (
        make_sampler(VOCAB).sample(logits, [plan_item(make_sequence(SamplingParams()))]).finish()
    )
    assert not errors
    assert tokens[0][0] < VOCAB


def test_half_precision_logits_give_the_highest_token() -> None:
    logits = torch.randn(2, VOCAB).bfloat16()
    tokens, _, _ = (
        make_sampler(VOCAB)
        .sample(logits, [plan_item(make_sequence(GREEDY)) for _ in "ab"])
        .finish()
    )
    assert [t[0] for t in tokens] == logits.float().argmax(dim=1).tolist()


def test_a_number_of_rows_that_does_not_match_the_items_raises() -> None:
    with pytest.raises(ValueError, match="3 rows of logits for items that own 2"):
        make_sampler(VOCAB).sample(torch.zeros(3, VOCAB), [plan_item(make_sequence(GREEDY), (5,))])


def test_a_grammar_without_a_compiler_fails_its_sequence() -> None:
    structured = SamplingParams(response_format=ResponseFormat(regex="a"))
    items = [plan_item(make_sequence(structured)), plan_item(make_sequence(GREEDY))]
    tokens, _, errors = make_sampler(VOCAB).sample(torch.zeros(2, VOCAB), items).finish()
    assert "no grammar compiler" in errors[0]
    assert [len(t) for t in tokens] == [0, 1]
