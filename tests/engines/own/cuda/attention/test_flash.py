"""The FlashAttention backends on a CPU: what they hand to the library, checked and answered by a
fake of it.

Each fake takes the real function's keyword names, refuses what the real one refuses, and computes
the true result in float64 from the block table and lengths that it was given.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.own.attention.cases import Case, attend, dense, filled_cache, make_problem
from tests.engines.own.cuda.attention.paged import paged
from tokenmill_worker.engines.own.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
)
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.cuda.attention.flash import (
    FlashAttention,
    FlashLibrary,
    flash_refusal,
)
from tokenmill_worker.engines.own.cuda.attention.token_major import without_garbage

RAGGED = ((1, 600), (33, 33), (1, 1), (19, 251), (40, 300))
DECODES = ((1, 600), (1, 1), (1, 256), (1, 257))
CASES = [
    Case("ragged", RAGGED, num_heads=6, num_kv_heads=3, block_size=256),
    Case("decodes", DECODES, block_size=256),
    Case("multi-head", RAGGED, num_heads=2, num_kv_heads=2, block_size=256),
    Case("window", RAGGED, window=Window(30), block_size=256),
    Case("window of decodes", DECODES, window=Window(30), block_size=256),
    Case("sinks", RAGGED, has_sinks=True, block_size=256),
    Case("sinks of decodes", DECODES, has_sinks=True, block_size=256),
]
SOFTCAP = Case("softcap", RAGGED, softcap=7.0, block_size=256)


def fake_varlen_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: Tensor,
    return_attn_probs: bool,
) -> Any:
    assert causal
    assert return_attn_probs
    assert k.shape[1] % 256 == 0
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(cu_seqlens_k.diff().max())
    out, lse = paged(
        q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, softmax_scale, window_size, softcap
    )
    return out, lse, None


def fake_with_kvcache_2(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    return_softmax_lse: bool,
) -> Any:
    assert causal
    assert return_softmax_lse
    assert k_cache.shape[1] % 256 == 0
    assert q.shape[:2] == (cache_seqlens.shape[0], 1)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    rows = q[:, 0].contiguous()
    out, lse = paged(
        rows,
        k_cache,
        v_cache,
        starts,
        cache_seqlens,
        block_table,
        softmax_scale,
        window_size,
        softcap,
    )
    return out[:, None], lse.t()[:, :, None]


def fake_with_kvcache_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    return_softmax_lse: bool,
) -> Any:
    assert causal
    assert return_softmax_lse
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    return paged(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cache_seqlens,
        page_table,
        softmax_scale,
        window_size,
        softcap,
    )


def unused(*_: Any, **__: Any) -> Any:
    raise AssertionError("the wrong entry point was called")


def library(version: int, varlen: Any, with_kvcache: Any) -> FlashLibrary:
    functions = {"flash_attn_varlen_func": varlen, "flash_attn_with_kvcache": with_kvcache}
    return FlashLibrary(version, SimpleNamespace(**functions))


FLASH_2 = FlashAttention(library(2, fake_varlen_2, fake_with_kvcache_2))
FLASH_3 = FlashAttention(library(3, unused, fake_with_kvcache_3))
TARGETS = [
    *((backend, case) for backend in (FLASH_2, FLASH_3) for case in CASES),
    (FLASH_2, SOFTCAP),
    (FLASH_3, SOFTCAP),
    (FLASH_3, Case("blocks of 16", RAGGED)),
]


@pytest.mark.parametrize(("backend", "case"), TARGETS, ids=lambda value: getattr(value, "name", ""))
def test_flash_arguments_describe_dense_attention(backend: AttentionBackend, case: Case) -> None:
    problem = make_problem(case)
    result = attend(backend, problem, filled_cache(backend, problem))
    torch.testing.assert_close(result.double(), dense(problem), rtol=1e-5, atol=1e-5)


def test_version_2_decodes_with_the_function_that_splits_contexts() -> None:
    backend = FlashAttention(library(2, unused, fake_with_kvcache_2))
    problem = make_problem(Case("decodes", DECODES, block_size=256))
    assert attend(backend, problem, filled_cache(backend, problem)).isfinite().all()


@pytest.mark.parametrize(
    ("version", "block_size", "head_dim", "dtype", "word"),
    [
        (2, 16, 64, torch.bfloat16, "multiples of 256, not 16"),
        (2, 512, 64, torch.bfloat16, None),
        (3, 16, 64, torch.bfloat16, None),
        (3, 16, 320, torch.bfloat16, "320"),
        (3, 16, 64, torch.float32, "float32"),
    ],
)
def test_unsupported_block_sizes_head_sizes_and_dtypes_are_rejected(
    version: int, block_size: int, head_dim: int, dtype: torch.dtype, word: str | None
) -> None:
    shape = AttentionShape(4, 2, head_dim, 0.125)
    reason = flash_refusal(version, torch.device("cuda"), dtype, shape, block_size)
    assert reason is None if word is None else word in str(reason)


def test_in_a_graph_the_device_finds_the_padded_rows() -> None:
    """Lengths are on the device only: what FlashAttention left in rows behind the last sequence's
    becomes zeros.
    """
    lens = torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    metadata = AttentionMetadata(lens, lens[1:], lens[None], lens.long(), 8, 64, 16, None)
    out = without_garbage(
        torch.full((8, 2, 4), torch.nan).index_fill_(0, torch.arange(5), 7.0), metadata
    )
    assert out[:5].eq(7.0).all()
    assert out[5:].eq(0.0).all()
    decode = dataclasses.replace(metadata, max_query_len=1)  # padded with sequences of their own
    assert without_garbage(torch.full((8, 2, 4), torch.nan), decode).isnan().all()
