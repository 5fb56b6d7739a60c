"""Sequence biases, bans, repeated n-grams and forced tokens give the logits of Transformers' own
processors, with drafts, a token in flight and after a resume too.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

from tests.engines.own.sampling.helpers import (
    CPU,
    EOS,
    ToyModel,
    generate,
    generate_a_step_late,
    make_sampler,
    make_sequence,
    plan_item,
)
from tokenmill_schemas.generation import SamplingParams, sequence_problems
from tokenmill_worker.engines.own.sampling import Sampler
from tokenmill_worker.engines.own.sequence import Sequence

VOCAB = 12
MAX_TOKENS = 8
IDS = st.integers(0, VOCAB - 1)
WORDS = st.lists(st.lists(IDS, min_size=1, max_size=3), min_size=1, max_size=6)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "sequence_bias": st.lists(
            st.tuples(st.lists(IDS, min_size=1, max_size=3), st.floats(-9, 9)).map(list),
            min_size=1,
            max_size=6,
        ),
        "bad_words_ids": WORDS,
        "no_repeat_ngram_size": st.integers(1, 4),
        "suppress_tokens": st.lists(IDS, max_size=3),
        "begin_suppress_tokens": st.lists(IDS, max_size=3),
        "forced_bos_token_id": IDS,
        "forced_eos_token_id": st.one_of(IDS, st.lists(IDS, min_size=1, max_size=3)),
        "repetition_penalty": st.floats(0.5, 2.0),
    },
)


def params_of(arguments: dict[str, Any], **others: Any) -> SamplingParams:
    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return SamplingParams(**{name: tuples(v) for name, v in arguments.items()}, **others)


def transformers_scores(
    arguments: dict[str, Any], scores: Tensor, token_ids: list[int], num_prompt: int
) -> Tensor:
    """Return what `generate` would draw from: the scores after its own processors."""
    config = GenerationConfig(**arguments, max_length=num_prompt + MAX_TOKENS, eos_token_id=EOS)
    config._eos_token_tensor = torch.tensor([EOS])
    model: Any = GenerationMixin()
    model.config = type("Config", (), {"is_encoder_decoder": False})()
    processors = model._get_logits_processor(config, num_prompt)
    edited: Tensor = processors(torch.tensor([token_ids]), scores[None].clone())[0]
    return edited


def edited_logits(sequence: Sequence, scores: Tensor) -> Tensor:
    """Return the distribution that the sampler draws from, as log-probabilities."""
    item = plan_item(sequence)
    sampled = make_sampler(VOCAB).sample(scores[None].clone(), [item])
    _, logprobs, errors = sampled.finish()
    if errors:
        return torch.full((VOCAB,), -math.inf)
    assert logprobs[0] is not None
    found = torch.full((VOCAB,), -math.inf)
    for token_id, logprob in logprobs[0][0].top:
        found[token_id] = logprob
    return found


@settings(max_examples=300, deadline=None)
@given(
    arguments=ARGUMENTS,
    prompt=st.lists(IDS, min_size=1, max_size=12),
    output=st.lists(IDS, max_size=MAX_TOKENS - 1),
    seed=st.integers(0, 2**20),
)
def test_logits_are_those_of_transformers_processors(
    arguments: dict[str, Any], prompt: list[int], output: list[int], seed: int
) -> None:
    if len(prompt) > 1:  # Transformers forces a first token only after a prompt of one token
        arguments = {name: v for name, v in arguments.items() if name != "forced_bos_token_id"}
    params = params_of(
        arguments, temperature=1.0, logprobs=VOCAB, logprobs_mode="processed_logprobs"
    )
    assume(not list(sequence_problems(params)))  # a forced token that is suppressed
    scores = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    wanted = transformers_scores(arguments, scores, [*prompt, *output], len(prompt))
    sequence = make_sequence(params, tuple(prompt), tuple(output))
    sequence.max_tokens = MAX_TOKENS
    got = edited_logits(sequence, scores)
    lowest = {"nan": -math.inf, "neginf": -math.inf}
    torch.testing.assert_close(got, torch.log_softmax(wanted, -1).nan_to_num(**lowest))


RULES: dict[str, dict[str, Any]] = {
    "n-grams": {"no_repeat_ngram_size": 2},
    "words": {"bad_words_ids": [[5, 4], [2, 3, 1], [7]]},
    "biases": {"sequence_bias": [[[5, 4], 6.0], [[6], -4.0], [[4, 4, 4], -9.0]]},
    "all": {
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[5, 4], [7]],
        "sequence_bias": [[[4, 5], 5.0], [[6], 2.0]],
        "suppress_tokens": [2, 3],
        "begin_suppress_tokens": [4, 5],
        "forced_bos_token_id": 9,
        "forced_eos_token_id": 11,
    },
}
NUM_TOKENS = 24


def ruled(name: str, output: tuple[int, ...] = (), **others: Any) -> Sequence:
    params = params_of(RULES[name], ignore_eos=True, temperature=0.7, **others)
    sequence = make_sequence(params, output=output, seed=3)
    sequence.max_tokens = NUM_TOKENS
    return sequence


def plain_answer(name: str, **others: Any) -> list[int]:
    return generate(make_sampler(VOCAB), toy(), [ruled(name, **others)], NUM_TOKENS)[0]


def toy() -> ToyModel:
    return ToyModel(VOCAB, memory=1)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("options", [{"kernel": None}, {}], ids=["torch", "kernel"])
def test_an_answer_is_drawn_by_the_rules_with_each_backend(
    name: str, options: dict[str, Any]
) -> None:
    answer = generate(make_sampler(VOCAB, **options), toy(), [ruled(name)], NUM_TOKENS)[0]
    tokens = [2, 3, 4, *answer]
    assert answer == plain_answer(name)
    for size in {RULES[name].get("no_repeat_ngram_size", 0)} - {0}:
        grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
        assert len(grams[:-1]) == len(set(grams[:-1]))  # the last one has the forced end
    for word in RULES[name].get("bad_words_ids", ()):
        assert word not in [tokens[i : i + len(word)] for i in range(2, len(tokens))]
    if name == "all":
        assert (answer[0], answer[-1]) == (9, 11)
        assert answer[1] not in (4, 5)
        assert {2, 3}.isdisjoint(answer)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_right_or_wrong_drafts_change_no_answer_under_token_rules(
    name: str, quality: float
) -> None:
    truth, draw = plain_answer(name), random.Random(5)

    def propose(sequence: Sequence) -> tuple[int, ...]:
        coming = truth[sequence.num_output_tokens :][: draw.randint(0, 5)]
        return tuple(t if draw.random() < quality else draw.randrange(VOCAB) for t in coming)

    got = generate(make_sampler(VOCAB), toy(), [ruled(name)], NUM_TOKENS, propose)[0]
    assert got[:NUM_TOKENS] == truth


@pytest.mark.parametrize("name", RULES)
def test_token_rules_count_a_token_in_flight(name: str) -> None:
    sampler = make_sampler(VOCAB)
    assert generate_a_step_late(sampler, toy(), ruled(name), NUM_TOKENS) == plain_answer(name)


@pytest.mark.parametrize("name", RULES)
def test_an_answer_with_token_rules_resumed_anywhere_continues_the_same(name: str) -> None:
    truth = plain_answer(name)
    for known in range(1, NUM_TOKENS):
        resumed = ruled(name, output=tuple(truth[:known]))
        rest = generate(make_sampler(VOCAB), toy(), [resumed], NUM_TOKENS - known)[0]
        assert rest == truth


def test_forced_tokens_are_at_the_first_and_the_last_position() -> None:
    """Whatever else is asked for, and after a prompt of any length."""
    params = SamplingParams(
        temperature=0.0, min_tokens=4, logit_bias={5: 100.0}, forced_bos_token_id=7,
        forced_eos_token_id=EOS, repetition_penalty=1.5, presence_penalty=2.0,
    )  # fmt: skip
    sequence = make_sequence(params)
    sequence.max_tokens = 4
    assert generate(make_sampler(VOCAB), toy(), [sequence], 4)[0] == [7, 5, 5, EOS]


def test_a_word_of_one_token_that_ends_the_answer_is_not_banned() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 5.0
    for params, token in (
        ({"bad_words_ids": ((EOS,),)}, EOS),
        ({"bad_words_ids": ((EOS,),), "ignore_eos": True}, 0),
        ({"suppress_tokens": (EOS,)}, 0),
    ):
        sequence = make_sequence(SamplingParams(temperature=0.0, **params))
        assert draw(make_sampler(VOCAB), logits, sequence) == token


def draw(sampler: Sampler, logits: Tensor, sequence: Sequence) -> int:
    tokens, _, errors = sampler.sample(logits.clone(), [plan_item(sequence)]).finish()
    assert not errors
    return tokens[0][0]


def test_a_sequence_whose_tokens_are_all_banned_fails_alone() -> None:
    ruled = make_sequence(SamplingParams(no_repeat_ngram_size=1), tuple(range(VOCAB)))
    items = [plan_item(make_sequence(SamplingParams())), plan_item(ruled)]
    tokens, _, errors = make_sampler(VOCAB).sample(torch.zeros(2, VOCAB), items).finish()
    assert len(tokens[0]) == 1
    assert list(errors) == [1]
    assert "no token is allowed" in errors[1]


def test_release_drops_the_rules_and_the_step_in_flight() -> None:
    sampler, sequence = make_sampler(VOCAB), ruled("all")
    generate(sampler, toy(), [sequence], 3)
    sampler.release(sequence)
    assert sampler._table.rules == {}
    assert sampler._in_flight._launched == {}


def test_a_request_without_rules_builds_no_rules() -> None:
    sampler = Sampler(VOCAB, CPU, frozenset({EOS}))
    layout = sampler.lay_out([plan_item(make_sequence(SamplingParams(temperature=0.0)))])
    assert layout.takes_argmax
    assert not layout.batch.reading
    assert sampler._table.rules == {}
