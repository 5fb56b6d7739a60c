"""FlashAttention's fourth version on a CPU: a stand-in has the signature and the checks of
`flash_attn.cute.flash_attn_varlen_func` as flash-attn-4 4.0.0b36 has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.own.attention.cases import Case, attend, dense, filled_cache, make_problem
from tests.engines.own.cuda.attention.paged import paged
from tests.engines.own.cuda.attention.test_flash import DECODES, RAGGED
from tokenmill_worker.engines.own.attention import AttentionShape, why_not
from tokenmill_worker.engines.own.attention.registry import serving_backend
from tokenmill_worker.engines.own.config.cache import Window
from tokenmill_worker.engines.own.cuda.attention import flash
from tokenmill_worker.engines.own.cuda.attention.flash import FlashAttention, FlashLibrary

CUDA = torch.device("cuda")
CASES = [
    Case("ragged", RAGGED, num_heads=6, num_kv_heads=3),
    Case("decodes", DECODES),
    Case("multi-head", RAGGED, num_heads=2, num_kv_heads=2),
    Case("window", RAGGED, window=Window(30)),
    Case("window of one", RAGGED, window=Window(1)),
    Case("window of decodes", DECODES, window=Window(30), block_size=128),
    Case("sinks", RAGGED, has_sinks=True),
    Case("sinks of decodes", DECODES, has_sinks=True),
    Case("softcap", RAGGED, softcap=7.0),
    Case("softcap in a window", RAGGED, softcap=7.0, window=Window(30)),
    Case("scale", RAGGED, scale=0.31),
    Case("blocks of 256", RAGGED, block_size=256),
    Case("head size 48", RAGGED, head_dim=48),
]


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
    gather_bwd_token_chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Refuse what the library refuses, and what the backend has no use for."""
    assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
    assert cu_seqlens_q is not None
    assert seqused_k is not None
    assert page_table is not None
    assert softmax_scale is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    for unused in (qv, min_seqlen_k, seqused_q, gather_kv_indices, score_mod, mask_mod):
        assert unused is None
    batch = cu_seqlens_q.shape[0] - 1
    assert page_table.shape[0] == batch
    assert page_table.stride(-1) == 1
    assert seqused_k.shape == (batch,)
    assert k.shape == v.shape
    assert q.shape[2] == k.shape[3]
    assert q.shape[1] % k.shape[2] == 0
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[2] % 16 == 0, "Paged KV does not support irregular head dim"
    assert num_splits == 1, "SplitKV not supported on SM 9.0"
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert max_seqlen_k >= int(seqused_k.max())
    assert causal, "each right bound becomes 0"
    left = window_size[0]
    assert left is None or left >= 0, "every key would be hidden"
    if learnable_sink is not None:
        assert learnable_sink.shape == (q.shape[1],)
        assert learnable_sink.dtype in (torch.float16, torch.bfloat16, torch.float32)
    out, lse = paged(
        q,
        k,
        v,
        cu_seqlens_q,
        seqused_k,
        page_table,
        softmax_scale,
        (-1 if left is None else left, 0),
        softcap,
        learnable_sink,
    )
    return out, lse if return_lse else None


def module(name: str, *functions: Callable[..., Any]) -> ModuleType:
    made = ModuleType(name)
    for function in functions:
        setattr(made, function.__name__, function)
    return made


LIBRARY = FlashLibrary(4, module("flash_attn.cute", flash_attn_varlen_func))


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what makes this machine one with a GPU of a compute capability and version 4."""

    def have(capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (capability, 0))
        monkeypatch.setattr(flash, "installed_library", lambda capability: LIBRARY)

    return have


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_version_4_arguments_describe_dense_attention(case: Case) -> None:
    backend, problem = FlashAttention(LIBRARY), make_problem(case)
    result = attend(backend, problem, filled_cache(backend, problem))
    torch.testing.assert_close(result.double(), dense(problem), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "head_dim", "words"),
    [
        (9, 64, None),
        (9, 80, None),
        (9, 192, None),
        (9, 256, None),
        (9, 72, "multiples of 16, not 72"),
        (9, 320, "up to 256, not 320"),
        (10, 128, None),
        (10, 256, None),
        (10, 192, "head sizes up to 128, and 256, on GPUs of compute capability 10.x, not 192"),
        (11, 160, "not 160"),
        (8, 64, "flash-attn 4 has no block tables on GPUs of compute capability 8.x"),
        (12, 64, "flash-attn 4 has no block tables on GPUs of compute capability 12.x"),
    ],
)
def test_version_4_rejects_head_sizes_that_its_kernels_do_not_support(
    on: Callable[[int], None], capability: int, head_dim: int, words: str | None
) -> None:
    on(capability)
    shape = AttentionShape(4, 2, head_dim, 0.125)
    reason = why_not("flash", CUDA, torch.bfloat16, [shape], 0)
    assert reason is None if words is None else words in str(reason)


def test_version_4_has_blocks_of_16_and_auto_takes_triton(on: Callable[[int], None]) -> None:
    on(9)
    assert FlashAttention.default_block_size(CUDA) == 16
    shapes = [AttentionShape(4, 2, 64, 0.125)]
    assert serving_backend("flash", CUDA, torch.bfloat16, shapes, 0) == ("flash", [])
    assert serving_backend("auto", CUDA, torch.bfloat16, shapes, 0) == ("triton", [])


@pytest.mark.parametrize(
    ("capability", "installed", "taken"),
    [
        (9, (2, 3, 4), 3),
        (9, (2, 4), 4),
        (9, (2,), 2),
        (10, (2, 3, 4), 4),
        (11, (2,), 2),
        (8, (2, 4), 2),
        (8, (4,), 4),  # and refused: it has no block tables there
        (12, (2, 3, 4), 2),
    ],
)
def test_the_version_that_suits_the_gpu_is_taken(
    monkeypatch: pytest.MonkeyPatch, capability: int, installed: tuple[int, ...], taken: int
) -> None:
    """Version 4 lies in the package `flash_attn`, which may hold nothing else."""
    modules: dict[str, ModuleType | None] = {
        "flash_attn": module("flash_attn", *[flash_attn_varlen_func] * (2 in installed)),
        "flash_attn.cute": LIBRARY.module if 4 in installed else None,
        "flash_attn_interface": LIBRARY.module if 3 in installed else None,
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, content)
    assert flash.installed_library.__wrapped__(capability).version == taken


def test_without_any_flash_version_each_import_error_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"flash_attn_interface .+; .+ flash_attn\.cute .+; "):
        flash.installed_library.__wrapped__(9)
