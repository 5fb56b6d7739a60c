"""Log-probabilities are exact, in order, of the distribution that was asked for, and only where
asked for.
"""

import math

import msgspec
import numpy as np
import pytest
import torch

from tests.engines.own.sampling.helpers import make_sampler, make_sequence, plan_item
from tokenmill_schemas.generation import SamplingParams, TokenLogprob
from tokenmill_worker.engines.own.sampling.draws import SamplingArrays

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
def test_the_raw_log_probability_is_that_of_the_model_s_distribution(
    params: SamplingParams,
) -> None:
    tokens, logprobs = sample(params)
    assert logprobs[0] is not None
    assert logprobs[0][0].logprob == pytest.approx(reference(0)[tokens[0]], abs=2e-6)
    assert logprobs[0][0].top == ()


def test_each_row_gets_its_own_number_of_top_log_probabilities() -> None:
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


def test_top_log_probabilities_are_cut_to_the_vocabulary() -> None:
    items = [plan_item(make_sequence(SamplingParams(top_logprobs=20)))]
    _, logprobs, _ = make_sampler(6).sample(torch.randn(1, 6), items).finish()
    assert logprobs[0] is not None
    assert len(logprobs[0][0].top) == 6


def test_accepted_drafts_have_log_probabilities() -> None:
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


def processed_reference(row: int, params: SamplingParams, history: tuple[int, ...]) -> list[float]:
    """Compute the distribution that a token is drawn from, in float64 and one rule at a time."""
    numbers = params.numbers
    values = LOGITS[row].double().tolist()
    for token_id in set(history):
        penalty = numbers.repetition_penalty
        values[token_id] = (
            values[token_id] * penalty if values[token_id] < 0 else values[token_id] / penalty
        )
    for token_id, bias in params.logit_bias.items():
        values[token_id] += bias
    values = [v / (numbers.temperature or 1.0) for v in values]
    kept = set(range(VOCAB))
    if numbers.temperature:
        order = sorted(kept, key=lambda i: -values[i])
        kept = {
            i for i in order if values[i] - values[order[0]] >= math.log(numbers.min_p or 1e-300)
        }
        kept &= set(order[: numbers.top_k or VOCAB])
        mass = [math.exp(values[i] - values[order[0]]) for i in order if i in kept]
        due, reached = numbers.top_p * math.fsum(mass), 0.0
        for count, part in enumerate(mass, 1):
            reached += part
            if reached >= due:
                kept &= set(order[:count])
                break
    peak = max(values)
    normaliser = peak + math.log(math.fsum(math.exp(values[i] - peak) for i in kept))
    return [v - normaliser if i in kept else -math.inf for i, v in enumerate(values)]


PROCESSED = (
    SamplingParams(temperature=0.5, logprobs=4),
    SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.2, logprobs=4),
    SamplingParams(temperature=0.8, top_p=0.9, logprobs=4),
    SamplingParams(temperature=1.7, top_k=7, logprobs=4),
    SamplingParams(temperature=1.3, min_p=0.1, logprobs=4),
    SamplingParams(temperature=2.0, min_p=0.01, top_k=30, top_p=0.8, logprobs=4),
    SamplingParams(temperature=0.7, top_k=1, logprobs=4),
    SamplingParams(temperature=0.7, repetition_penalty=1.5, logit_bias={9: 2.5}, logprobs=4),
    SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias={9: 2.5}, logprobs=4),
)


@pytest.mark.parametrize("options", [{}, {"kernel": None}], ids=["kernel", "torch"])
@pytest.mark.parametrize("params", PROCESSED)
def test_processed_log_probabilities_are_those_of_the_sampled_distribution(
    params: SamplingParams, options: dict[str, object]
) -> None:
    wanted = msgspec.structs.replace(params, logprobs_mode="processed_logprobs")
    items = [plan_item(make_sequence(wanted, prompt=(2, 3, 9), seed=seed)) for seed in range(4)]
    tokens, logprobs, _ = make_sampler(VOCAB, **options).sample(LOGITS, items).finish()
    for row in range(4):
        entry = logprobs[row]
        assert entry is not None
        truth = processed_reference(row, params, (2, 3, 9))
        assert entry[0].logprob == pytest.approx(truth[tokens[row][0]], abs=1e-5)
        best = sorted(range(VOCAB), key=lambda token_id: -truth[token_id])[:4]
        best = [token_id for token_id in best if truth[token_id] > -math.inf]
        assert [token_id for token_id, _ in entry[0].top] == best
        assert [value for _, value in entry[0].top] == pytest.approx(
            [truth[t] for t in best], abs=1e-5
        )


@pytest.mark.parametrize("options", [{}, {"kernel": None}], ids=["kernel", "torch"])
def test_raw_and_processed_modes_in_one_batch_change_no_token(options: dict[str, object]) -> None:
    base = SamplingParams(temperature=0.5, top_p=0.9, logprobs=2)
    processed = msgspec.structs.replace(base, logprobs_mode="processed_logprobs")
    raw = msgspec.structs.replace(base, logprobs_mode="raw_logprobs")
    silent = msgspec.structs.replace(base, logprobs=False)
    results = []
    for order in ((processed, raw, silent, processed), (raw, processed, raw, silent)):
        items = [plan_item(make_sequence(p, seed=i)) for i, p in enumerate(order)]
        tokens, logprobs, _ = make_sampler(VOCAB, **options).sample(LOGITS, items).finish()
        results.append(tokens)
        for row, params in enumerate(order):
            entry = logprobs[row]
            assert (entry is None) == (params is silent)
            if entry is not None:
                truth = reference(row) if params is raw else processed_reference(row, base, ())
                assert entry[0].logprob == pytest.approx(truth[tokens[row][0]], abs=1e-5)
    assert results[0] == results[1]


def test_accepted_drafts_have_processed_log_probabilities_of_their_own_positions() -> None:
    params = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, logprobs=1, logprobs_mode="processed_logprobs"
    )
    sequence = make_sequence(params, prompt=(2, 3, 4))
    drafts: list[int] = []
    for row in range(2):
        truth = processed_reference(row, params, (2, 3, 4, *drafts))
        drafts.append(truth.index(max(truth)))
    item = plan_item(sequence, tuple(drafts))
    tokens, logprobs, _ = make_sampler(VOCAB).sample(LOGITS[:3], [item]).finish()
    assert tokens[0][:2] == tuple(drafts)
    assert logprobs[0] is not None
    for row, entry in enumerate(logprobs[0]):
        truth = processed_reference(row, params, (2, 3, 4, *drafts[:row]))
        assert entry.logprob == pytest.approx(truth[tokens[0][row]], abs=1e-5)


class EdgeKernel:
    """Draws token 5 in each row, like a kernel that sums a nucleus in another order."""

    takes_any_dtype = False

    def draw(
        self, logits: torch.Tensor, arrays: SamplingArrays, keys: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((len(logits),), 5), logits.amax(dim=1)


def test_a_token_drawn_at_the_edge_of_the_nucleus_has_a_finite_log_probability() -> None:
    params = SamplingParams(top_p=0.5, logprobs=True, logprobs_mode="processed_logprobs")
    sampler = make_sampler(8, kernel=EdgeKernel())
    logits = torch.tensor([[4.0, 3.9, 0.0, 0.0, 0.0, 3.8, 0.0, 0.0]])
    _, logprobs, _ = sampler.sample(logits, [plan_item(make_sequence(params))]).finish()
    assert logprobs[0] is not None
    mass = [math.exp(value) for value in (4.0, 3.9, 3.8)]
    assert logprobs[0][0].logprob == pytest.approx(math.log(mass[2] / sum(mass)), abs=1e-5)
