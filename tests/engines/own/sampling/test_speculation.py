"""Verification: with drafts, right or wrong, the tokens are those that come without, one for
one.
"""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.own.sampling.helpers import (
    ToyModel,
    generate,
    make_sampler,
    make_sequence,
    plan_item,
)
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.sampling import PromptLookup
from tokenmill_worker.engines.own.sequence import Sequence

VOCAB = 24
KINDS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.6, ignore_eos=True),
    "truncated": SamplingParams(temperature=0.8, top_p=0.8, top_k=10, min_p=0.01, ignore_eos=True),
    "penalised": SamplingParams(
        temperature=0.5,
        frequency_penalty=0.2,
        presence_penalty=0.3,
        repetition_penalty=1.1,
        ignore_eos=True,
    ),
    "greedy penalised": SamplingParams(temperature=0.0, frequency_penalty=0.1, ignore_eos=True),
    "ruled": SamplingParams(
        no_repeat_ngram_size=2,
        bad_words_ids=((7, 8),),
        sequence_bias=(((5, 6), 4.0),),
        begin_suppress_tokens=(4,),
        forced_bos_token_id=5,
        ignore_eos=True,
    ),
    "held back": SamplingParams(
        temperature=0.7, min_tokens=9, stop_token_ids=(3,), logit_bias={3: 2.0}
    ),
}


def without_drafts(name: str, seed: int, num_tokens: int) -> list[int]:
    sequence = make_sequence(KINDS[name], seed=seed)
    return generate(make_sampler(VOCAB), ToyModel(VOCAB, memory=1), [sequence], num_tokens)[0]


class OracleProposer:
    """Proposes the tokens to come, each replaced by a wrong one with probability 1 − quality."""

    def __init__(self, truth: list[int], rng: random.Random, quality: float) -> None:
        self.truth, self.rng, self.quality = truth, rng, quality
        self.lengths: list[int] = []

    def __call__(self, sequence: Sequence) -> tuple[int, ...]:
        self.lengths.append(sequence.num_output_tokens)
        coming = self.truth[sequence.num_output_tokens :][: self.rng.randint(0, 5)]
        return tuple(
            t if self.rng.random() < self.quality else self.rng.randrange(VOCAB) for t in coming
        )


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_drafts_of_any_quality_change_no_token(name: str, seed: int, quality: float) -> None:
    truth = without_drafts(name, seed, 30)
    proposer = OracleProposer(truth, random.Random(seed), quality)
    sequence = make_sequence(KINDS[name], seed=seed)
    got = generate(
        make_sampler(VOCAB), ToyModel(VOCAB, memory=1), [sequence], len(truth), proposer
    )[0]
    assert got == truth


@pytest.mark.parametrize("name", KINDS)
def test_right_drafts_save_steps(name: str) -> None:
    truth = without_drafts(name, 5, 30)
    proposer = OracleProposer(truth, random.Random(0), 1.0)
    got = generate(
        make_sampler(VOCAB),
        ToyModel(VOCAB, memory=1),
        [make_sequence(KINDS[name], seed=5)],
        len(truth),
        proposer,
    )
    assert got == [truth]
    assert len(proposer.lengths) < 0.6 * len(truth)


def test_prompt_lookup_in_a_batch_changes_no_token() -> None:
    """A repetitive model, so that the lookup finds something; sequences with and without drafts
    together.
    """
    sampler, model, proposer = (
        make_sampler(VOCAB),
        ToyModel(VOCAB, memory=1),
        PromptLookup(4, min_match=2),
    )
    steps = itertools.count()

    def counted(sequence: Sequence) -> tuple[int, ...]:
        next(steps)
        return proposer(sequence)

    sequences = [make_sequence(params, seed=i) for i, params in enumerate(KINDS.values())]
    outputs = generate(sampler, model, sequences, 60, counted)
    for i, (name, output) in enumerate(zip(KINDS, outputs, strict=True)):
        assert output == without_drafts(name, i, 60)
    greedy = make_sequence(KINDS["greedy"])
    before = next(steps)
    generate(sampler, model, [greedy], 100, counted)
    # greedy text of a model with one token of memory goes round in circles
    assert next(steps) - before < 50


def test_rows_after_a_rejected_draft_are_ignored() -> None:
    model = ToyModel(VOCAB)
    right = generate(make_sampler(VOCAB), model, [make_sequence(KINDS["greedy"])], 3)[0]
    item = plan_item(make_sequence(KINDS["greedy"]), (right[0], (right[1] + 1) % VOCAB, right[2]))
    tokens, _, _ = make_sampler(VOCAB).sample(model.logits([item]), [item]).finish()
    assert tokens == ((right[0], right[1]),)
