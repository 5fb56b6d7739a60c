"""Draws follow the distribution of the parameters, which numpy and a sort work out apart."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.engines.own.sampling.helpers import EOS, make_sampler, make_sequence, plan_item
from tokenmill_schemas.generation import SamplingParams

VOCAB = 40
DRAWS = 6_000
LOGITS = np.random.default_rng(5).normal(size=VOCAB) * 2.0


def expected(logits: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.float64]:
    """Walk the tokens from the most likely down and stop where the parameters say so."""
    logits, numbers = logits.copy(), params.numbers
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if params.min_tokens:
        logits[[EOS, *params.stop_token_ids]] = -np.inf
    weights = np.exp((logits - logits.max()) / numbers.temperature)
    order = sorted(range(len(weights)), key=lambda token_id: -weights[token_id])
    kept = [t for t in order if weights[t] >= numbers.min_p * weights[order[0]]]
    if numbers.top_k > 0:
        kept = kept[: numbers.top_k]
    total, nucleus, mass = sum(weights[t] for t in kept), [], 0.0
    for token_id in kept:
        nucleus.append(token_id)
        mass += weights[token_id] / total
        if mass >= numbers.top_p:
            break
    result = np.zeros(len(weights))
    result[nucleus] = weights[nucleus] / weights[nucleus].sum()
    return result


def draw(
    logits: npt.NDArray[np.float64], params: SamplingParams, position: int = 0
) -> npt.NDArray[np.int64]:
    sampler = make_sampler(len(logits))
    output = tuple(range(2, 2 + position))
    items = [plan_item(make_sequence(params, output=output, seed=seed)) for seed in range(DRAWS)]
    rows = torch.from_numpy(logits.astype(np.float32)).repeat(DRAWS, 1)
    return sampler.sample(rows, items).token_ids.numpy()


def assert_follows(drawn: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> None:
    from scipy import stats  # takes a second, in each test process

    observed = np.bincount(drawn, minlength=len(probabilities))
    assert not observed[probabilities == 0].any(), "a token outside the truncated set was drawn"
    common = probabilities * len(drawn) >= 5
    counts = np.append(observed[common], observed[~common].sum())
    wanted = np.append(probabilities[common], probabilities[~common].sum()) * len(drawn)
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    if len(counts) > 1:
        assert stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue > 1e-4


CASES = {
    "model": SamplingParams(),
    "hot": SamplingParams(temperature=2.5),
    "cold": SamplingParams(temperature=0.3),
    "top_k": SamplingParams(top_k=7),
    "top_k of the whole vocabulary": SamplingParams(top_k=10_000),
    "top_p": SamplingParams(top_p=0.8),
    "top_p of zero": SamplingParams(top_p=0.0),
    "top_p small": SamplingParams(top_p=0.05),
    "top_p nearly all": SamplingParams(top_p=0.999),
    "min_p": SamplingParams(min_p=0.1),
    "min_p of one": SamplingParams(min_p=1.0),
    "bias": SamplingParams(logit_bias={3: 4.0, 8: -50.0}),
    "min_tokens": SamplingParams(min_tokens=4, stop_token_ids=(9, 12)),
    "top_k then top_p": SamplingParams(top_k=12, top_p=0.7),
    "min_p then top_p": SamplingParams(min_p=0.05, top_p=0.9),
    "all": SamplingParams(
        temperature=1.7,
        top_k=15,
        top_p=0.9,
        min_p=0.02,
        logit_bias={5: 2.0},
        min_tokens=2,
        stop_token_ids=(3,),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution_of_the_parameters(name: str) -> None:
    params = CASES[name]
    assert_follows(draw(LOGITS, params), expected(LOGITS, params))


def test_draws_at_a_later_position_are_independent_and_follow_the_distribution() -> None:
    from scipy import stats  # takes a second, in each test process

    params = SamplingParams(top_p=0.9)
    first, later = draw(LOGITS, params), draw(LOGITS, params, position=5)
    assert_follows(later, expected(LOGITS, params))
    table = np.zeros((4, 4))
    np.add.at(table, (first % 4, later % 4), 1)
    assert stats.chi2_contingency(table[table.any(1)][:, table.any(0)]).pvalue > 1e-4


def test_a_nucleus_with_more_tokens_than_candidates_is_exact() -> None:
    vocab = 3_000
    flat = np.random.default_rng(2).normal(size=vocab) * 0.3
    params = SamplingParams(top_p=0.6)
    probabilities = expected(flat, params)
    assert (probabilities > 0).sum() > 1_000  # far beyond the candidates of the first look
    drawn = draw(flat, params)
    groups = np.arange(vocab) % 20  # single tokens are too rare for a test of counts
    assert not (probabilities[drawn] == 0).any()
    assert_follows(groups[drawn], np.array([probabilities[groups == g].sum() for g in range(20)]))


def test_end_tokens_are_banned_until_min_tokens_is_reached() -> None:
    params = SamplingParams(min_tokens=3, logit_bias={EOS: 8.0})
    assert not (draw(LOGITS, params, position=2) == EOS).any()
    assert (draw(LOGITS, params, position=3) == EOS).mean() > 0.5


def test_greedy_top_k_of_one_and_tiny_temperatures_take_the_first_maximum() -> None:
    logits = LOGITS.copy()
    logits[[4, 30]] = 20.0
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(temperature=1e-9),
    ):
        assert set(draw(logits, params).tolist()) == {4}
