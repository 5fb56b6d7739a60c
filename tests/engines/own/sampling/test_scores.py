"""Scored rows are found among the rows of a step, and normalised exactly."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.engines.own.sampling.helpers import make_sequence
from tokenmill_schemas.generation import SamplingParams
from tokenmill_worker.engines.own.plan import ScheduledSequence
from tokenmill_worker.engines.own.sampling import ScoredRows

VOCAB, PADDED = 50, 64
LOGITS = torch.from_numpy(np.random.default_rng(1).normal(size=(70, PADDED)).astype(np.float32) * 6)


def item(
    prompt: tuple[int, ...], start: int, end: int, *, samples: bool, top: int | None = None
) -> ScheduledSequence:
    sequence = make_sequence(SamplingParams(prompt_logprobs=top), prompt)
    if top is None:
        return ScheduledSequence(sequence, start, end - start, samples)
    sequence.scored_end = len(prompt)
    num_scored = min(end + 1, len(prompt)) - start - 1
    return ScheduledSequence(
        sequence, start, end - start, samples, scored_from=start + 1, num_scored=num_scored
    )


def test_a_step_without_given_tokens_has_no_scored_rows() -> None:
    assert ScoredRows.of([item((2, 3, 4), 0, 3, samples=True)]) is None


def test_scored_and_sampled_rows_are_in_the_order_of_the_items() -> None:
    items = [
        item((2, 3, 4), 0, 3, samples=True),  # row 0
        item((5, 6, 7, 8), 0, 2, samples=False, top=2),  # rows 1 and 2: tokens 6 and 7
        item((9, 10, 11), 0, 3, samples=True, top=0),  # rows 3 and 4: tokens 10 and 11; row 5
        item((1,), 0, 1, samples=True, top=5),  # row 6
    ]
    rows = ScoredRows.of(items)
    assert rows is not None
    logits, scores = rows.take(LOGITS[:7], VOCAB)
    assert torch.equal(logits, LOGITS[[0, 5, 6]])
    found, errors = scores.finish()
    assert not errors
    truth = LOGITS[:, :VOCAB].double().log_softmax(dim=-1)
    for index, row, token, num_top in ((1, 1, 6, 2), (1, 2, 7, 2), (2, 3, 10, 0), (2, 4, 11, 0)):
        entry = found[index][row - (1 if index == 1 else 3)]
        assert entry.logprob == pytest.approx(float(truth[row, token]), abs=2e-6)
        best = truth[row].topk(num_top)
        assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=2e-6)


def test_many_scored_rows_are_exact_with_top_tokens_cut_to_the_vocabulary() -> None:
    prompt = tuple(index % VOCAB for index in range(71))
    rows = ScoredRows.of([item(prompt, 0, 70, samples=False, top=100)])
    assert rows is not None
    logits, scores = rows.take(LOGITS, VOCAB)
    assert len(logits) == 0
    (found,) = scores.finish()[0].values()
    truth = LOGITS[:, :VOCAB].double().log_softmax(dim=-1)
    assert [entry.logprob for entry in found] == pytest.approx(
        [float(truth[row, prompt[row + 1]]) for row in range(70)], abs=2e-6
    )
    assert {len(entry.top) for entry in found} == {VOCAB}


def test_nan_logits_of_a_scored_row_fail_only_their_item() -> None:
    items = [item((5, 6, 7, 8), 0, 2, samples=False, top=0) for _ in range(2)]
    rows = ScoredRows.of(items)
    assert rows is not None
    logits = LOGITS[:4].clone()
    logits[3, 9] = torch.nan
    found, errors = rows.take(logits, VOCAB)[1].finish()
    assert list(errors) == [1]
    assert "not finite" in errors[1]
    assert len(found[0]) == 2
