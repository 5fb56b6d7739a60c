"""Floors of top-k, top-p and min-p equal those of a plain sort."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill_worker.engines.own.sampling import truncation
from tokenmill_worker.engines.own.sampling.noise import row_keys
from tokenmill_worker.engines.own.sampling.truncation import TruncationLimits


def make_limits(
    top_k: list[int], top_p: list[float], min_p: list[float], vocab: int
) -> TruncationLimits:
    limited = [k for k in top_k if k < vocab]
    return TruncationLimits(
        top_k=torch.tensor(top_k)[:, None],
        top_p=torch.tensor(top_p, dtype=torch.float64)[:, None],
        log_min_p=torch.tensor([math.log(p) if p else -math.inf for p in min_p])[:, None],
        max_top_k=max(limited, default=0),
        bounded=len(limited) == len(top_k),
    )


def plain_floor(row: list[float], top_k: int, top_p: float, min_p: float) -> float:
    values = sorted(
        (v for v in row if v >= (math.log(min_p) if min_p else -math.inf)), reverse=True
    )
    values = [v for v in values if v >= values[min(top_k, len(values)) - 1]]
    if top_p >= 1.0:
        return values[-1]
    total, mass = math.fsum(math.exp(v) for v in values), 0.0
    for value in values:
        mass += math.exp(value)
        if mass >= top_p * total:
            return value
    return values[-1]


parameters = st.tuples(
    st.one_of(st.integers(1, 60), st.integers(200, 900), st.just(700)),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(parameters, min_size=1, max_size=6),
    st.sampled_from([0.0, 0.1, 1.0, 3.0, 12.0]),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_the_floor_equals_that_of_a_plain_sort(
    rows: list[tuple[int, float, float]], spread: float, coarse: bool, seed: int
) -> None:
    vocab = 700
    values = np.random.default_rng(seed).normal(size=(len(rows), vocab)) * spread
    if coarse:
        values = np.round(values * 4) / 4  # many equal logits, as with bfloat16
    scaled = torch.from_numpy((values - values.max(axis=1, keepdims=True)).astype(np.float32))
    limits = make_limits(
        [min(k, vocab) for k, _, _ in rows], [p for _, p, _ in rows], [m for *_, m in rows], vocab
    )
    floors = truncation.find_floor(
        scaled.sort(dim=-1, descending=True).values, scaled, limits
    ).squeeze(1)
    for row, (top_k, top_p, min_p) in enumerate(rows):
        line = scaled[row]
        floor = plain_floor(line.tolist(), min(top_k, vocab), top_p, min_p)
        found = floors[row]
        kept, wanted = int((line >= found).sum()), int((line >= floor).sum())
        assert kept == pytest.approx(wanted, abs=1), "beyond what rounding at the border explains"


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9])
def test_equal_logits_are_kept_or_cut_together(top_p: float) -> None:
    scaled = torch.zeros(1, 400)
    scaled[0, 100:] = -2.0
    limits = make_limits([400], [top_p], [0.0], 400)
    values = scaled.sort(dim=-1, descending=True).values
    found = truncation.find_floor(values, scaled, limits).item()
    assert found == (0.0 if top_p < 0.7 else -2.0)


def test_rows_sort_in_chunks_with_the_same_result() -> None:
    rows, vocab = 9, 64
    scaled = torch.randn(rows, vocab)
    limits = make_limits([vocab] * rows, [0.8] * rows, [0.0] * rows, vocab)
    keys = torch.from_numpy(row_keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64)))
    vocabulary = torch.arange(vocab, dtype=torch.int32)
    whole = truncation.draw_sorted(scaled, limits, keys, vocabulary)
    for max_elements in (1, 4 * vocab, 1 << 20):
        parts = truncation.draw_sorted_in_chunks(scaled, limits, keys, vocabulary, max_elements)
        assert parts.tolist() == whole.tolist()
