"""Log-probabilities are the model's own: exact, raw, in order, and only where asked for."""

import math

import numpy as np
import pytest
import torch

from tests.engine.sampling.helpers import make_sampler, make_sequence, plan_item
from tokenmill_schemas.generation import SamplingParams, TokenLogprob

VOCAB = 200
LOGITS = torch.from_numpy(np.random.default_rng(1).normal(size=(4, VOCAB)).astype(np.float32) * 6)


def reference(row: int) -> list[float]:
    values = LOGITS[row].double().tolist()
    peak = max(values)
    normaliser = peak + math.log(math.fsum(math.exp(v - peak) for v in values))
    return [v - normaliser for v in values]


def sample(*params: SamplingParams) -> tuple[list[int], list[tuple[TokenLogprob, ...] | None]]:
    items = [plan_item(make_sequence(p, seed=i)) for i, p in enumerate(params)]
    tokens, logprobs, errors = make_sampler(VOCAB).sample(LOGITS[: len(params)], items).finish()
    assert not errors
    return [t[0] for t in tokens], list(logprobs)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(logprobs=True),
        SamplingParams(temperature=0.0, logprobs=True),
        SamplingParams(temperature=0.2, top_p=0.5, top_k=9, logprobs=True),
        SamplingParams(logit_bias={7: 30.0}, repetition_penalty=2.0, logprobs=True),
    ],
)
def test_the_drawn_tokens_raw_log_probability(params: SamplingParams) -> None:
    tokens, logprobs = sample(params)
    assert logprobs[0] is not None
    assert logprobs[0][0].logprob == pytest.approx(reference(0)[tokens[0]], abs=2e-6)
    assert logprobs[0][0].top == ()


def test_each_row_gets_what_it_asked_for() -> None:
    tokens, logprobs = sample(
        SamplingParams(logprobs=2),
        SamplingParams(),
        SamplingParams(top_logprobs=5),
        SamplingParams(logprobs=0),
    )
    assert logprobs[1] is None
    for row, count in ((0, 2), (2, 5), (3, 0)):
        entry = logprobs[row]
        assert entry is not None
        truth = reference(row)
        best = sorted(range(VOCAB), key=lambda token_id: -truth[token_id])[:count]
        assert [token_id for token_id, _ in entry[0].top] == best
        assert [value for _, value in entry[0].top] == pytest.approx(
            [truth[t] for t in best], abs=2e-6
        )
        assert entry[0].logprob == pytest.approx(truth[tokens[row]], abs=2e-6)


def test_more_top_logprobs_than_the_vocabulary_has() -> None:
    items = [plan_item(make_sequence(SamplingParams(top_logprobs=20)))]
    _, logprobs, _ = make_sampler(6).sample(torch.randn(1, 6), items).finish()
    assert logprobs[0] is not None
    assert len(logprobs[0][0].top) == 6


def test_accepted_drafts_have_theirs() -> None:
    sampler = make_sampler(VOCAB)
    best = LOGITS.argmax(dim=1).tolist()
    sequence = make_sequence(SamplingParams(temperature=0.0, logprobs=1))
    item = plan_item(sequence, (best[0], best[1], best[2] + 1))
    tokens, logprobs, _ = sampler.sample(LOGITS, [item]).finish()
    assert tokens == ((best[0], best[1], best[2]),)
    assert logprobs[0] is not None
    assert [entry.top[0][0] for entry in logprobs[0]] == best[:3]
    assert [entry.logprob for entry in logprobs[0]] == pytest.approx(
        [max(reference(r)) for r in range(3)], abs=2e-6
    )
