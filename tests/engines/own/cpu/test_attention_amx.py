"""Attention in matrix registers is as exact as in vector ones; no row depends on its batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engines.own.attention.cases import (
    Case,
    Problem,
    attend,
    dense,
    filled_cache,
    make_problem,
    metadata_of,
    round_as_stored,
    with_threads,
)
from tokenmill_worker.engines.own.attention.base import AttentionShape
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.cpu.attention import CpuAttention
from tokenmill_worker.engines.own.cpu.kernels.linear import LinearKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
LENS = ((300, 700), (1, 300), (513, 513), (40, 290), (130, 131))
CASES = [
    Case("three queries a key", LENS, num_heads=9, num_kv_heads=3),
    Case("as many keys as queries", LENS, num_heads=2, num_kv_heads=2, head_dim=32),
    Case(
        "wide heads, one for eight", LENS, num_heads=16, num_kv_heads=2, head_dim=128, block_size=32
    ),
    Case(
        "window, softcap and sinks",
        LENS,
        head_dim=96,
        window=Window(203),
        softcap=8.0,
        has_sinks=True,
    ),
    Case(
        "a window within a panel",
        ((200, 600), (97, 640)),
        num_heads=6,
        num_kv_heads=2,
        window=Window(7),
    ),
    Case("chunks", LENS, window=Window(100, is_chunked=True)),
    Case("latent of 16 heads", ((40, 290), (1, 300)), 16, num_kv_heads=1, head_dim=576),
    Case(
        "more queries a key than a unit has rows",
        ((3, 300), (40, 50)),
        num_heads=400,
        num_kv_heads=1,
        head_dim=32,
    ),
]


@pytest.fixture(scope="module")
def backend() -> CpuAttention:
    reason = CpuAttention.why_not(
        torch.device("cpu"), torch.float32, AttentionShape(4, 2, 64, 1.0), 16
    )
    if reason is not None:
        pytest.skip(reason)
    if not LinearKernels().has_amx:
        pytest.skip("this CPU has no matrix registers (AMX)")
    return CpuAttention()


def stored(case: Case, dtype: torch.dtype) -> Problem:
    """Its keys and values are what a cache of this type holds."""
    problem = make_problem(case)
    round_as_stored(problem, dtype)
    return problem


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_amx_attention_is_as_exact_as_vector_attention(
    backend: CpuAttention, case: Case, dtype: torch.dtype
) -> None:
    """A product of parts that was left out would show: its errors are tens of roundings."""
    problem = stored(case, dtype)
    vectors = CpuAttention(uses_amx=False)
    ours, others = (attend(b, problem, filled_cache(b, problem, dtype)) for b in (backend, vectors))
    expected = dense(problem)
    torch.testing.assert_close(ours.double(), expected, rtol=2e-5, atol=2e-6)
    assert not torch.equal(ours, others), "these are not the matrix registers"
    errors = [
        float((result.double() - expected).square().mean().sqrt()) for result in (ours, others)
    ]
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(backend: CpuAttention, dtype: torch.dtype) -> None:
    problem = stored(CASES[0], dtype)
    cache = filled_cache(backend, problem, dtype)
    results = with_threads((1, 2, 5), backend, problem, cache)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_chunk_has_the_same_bits_beside_others_as_alone(
    backend: CpuAttention, dtype: torch.dtype
) -> None:
    problem = stored(CASES[0], dtype)
    cache = filled_cache(backend, problem, dtype)
    together, row = attend(backend, problem, cache), 0
    for i, (query_len, seq_len) in enumerate(LENS):
        metadata = metadata_of(problem, ((query_len, seq_len),), torch.tensor([i]))
        rows = slice(row, row + query_len)
        alone = backend.attend(problem.query[rows], cache, metadata, problem.case.shape)
        assert torch.equal(together[rows], alone)
        row += query_len


@pytest.mark.parametrize("dtype", DTYPES)
def test_decodes_over_a_common_prompt_have_the_bits_of_single_decodes(
    backend: CpuAttention, dtype: torch.dtype
) -> None:
    """Tiles that many sequences share are computed for all of them."""
    lens = tuple((1, 530 + index) for index in range(40))
    problem = stored(Case("decodes", lens, num_heads=9, num_kv_heads=3), dtype)
    problem.table[:, :32] = problem.table[0, :32]
    cache = filled_cache(backend, problem, dtype)
    expected = attend(CpuAttention(uses_amx=False), problem, cache)
    torch.testing.assert_close(attend(backend, problem, cache), expected, rtol=1e-4, atol=2e-6)


def test_a_nan_does_not_leave_its_row(backend: CpuAttention) -> None:
    problem = make_problem(Case("nan", ((200, 300),), num_heads=4, num_kv_heads=2))
    problem.query[77] = torch.nan
    problem.query[78, 1, 3] = torch.inf
    result = attend(backend, problem, filled_cache(backend, problem))
    assert result[77].isnan().all()
    assert result[78, 1].isnan().all()
    whole = result.isfinite().all(dim=-1)
    assert int((~whole).sum()) == 5
    torch.testing.assert_close(
        result[whole].double(), _without_bad(problem)[whole], rtol=2e-5, atol=2e-6
    )


def _without_bad(problem: Problem) -> Tensor:
    problem.query.nan_to_num_(nan=0.0, posinf=0.0)
    return dense(problem)


def test_amx_attention_is_exact_for_numbers_of_every_magnitude(backend: CpuAttention) -> None:
    problem = make_problem(Case("sizes", ((200, 700),), num_heads=4, num_kv_heads=2))
    sizes = torch.logspace(-30, 30, 700).view(700, 1, 1)
    problem.value.mul_(sizes[torch.randperm(700)])
    problem.key.mul_(torch.logspace(-6, 1, 64))
    result = attend(backend, problem, filled_cache(backend, problem))
    scale = problem.value.abs().max()
    torch.testing.assert_close(
        result.double() / scale, dense(problem) / scale, rtol=1e-4, atol=1e-6
    )
