"""Tests of the reference backend alone: length groups, pieces of long chunks, padding rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.engines.own.attention.cases import (
    Case,
    attend,
    dense,
    filled_cache,
    make_problem,
    metadata_of,
)
from tokenmill_worker.engines.own.attention import reference
from tokenmill_worker.engines.own.attention.reference import ReferenceAttention
from tokenmill_worker.engines.own.config.cache import Window


@pytest.mark.parametrize("window", [None, Window(30)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_long_chunk_is_attended_in_pieces(window: Window | None, has_sinks: bool) -> None:
    problem = make_problem(
        Case("pieces", ((90, 100), (1, 40), (33, 33)), window=window, has_sinks=has_sinks)
    )
    backend = ReferenceAttention(max_scores=4 * 100 * 7)
    result = attend(backend, problem, filled_cache(backend, problem))
    torch.testing.assert_close(result.double(), dense(problem), rtol=2e-5, atol=2e-5)


def test_many_decodes_are_gathered_in_bounded_groups() -> None:
    problem = make_problem(Case("bounded", tuple((1, 30 + i) for i in range(9))))
    backend = ReferenceAttention(max_gathered_tokens=100)
    shares = reference._plan(metadata_of(problem, problem.case.lens), 100)
    assert len(shares) > 2
    assert all(share.num_seqs * share.length <= 100 for share in shares)
    result = attend(backend, problem, filled_cache(backend, problem))
    torch.testing.assert_close(result.double(), dense(problem), rtol=2e-5, atol=2e-5)


def test_padding_rows_come_back_as_zeros_and_lengths_may_be_on_the_device_only() -> None:
    problem = make_problem(Case("padded", ((3, 20), (1, 9))))
    backend = ReferenceAttention()
    cache = filled_cache(backend, problem)
    metadata = dataclasses.replace(
        metadata_of(problem, problem.case.lens), query_lens_host=(), seq_lens_host=()
    )
    query = torch.cat([problem.query, torch.ones(2, 4, 64)])
    result = backend.attend(query, cache, metadata, problem.case.shape)
    torch.testing.assert_close(result[:4].double(), dense(problem), rtol=2e-5, atol=2e-5)
    assert (result[4:] == 0).all()


def test_a_float32_model_attends_over_a_bfloat16_cache() -> None:
    problem = make_problem(Case("narrow", ((5, 20), (1, 33))))
    backend = ReferenceAttention()
    result = attend(backend, problem, filled_cache(backend, problem, torch.bfloat16))
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), dense(problem), rtol=3e-2, atol=3e-2)
