"""Launches the kernels: computes grids and strides, and allocates the results.

A launch depends on shapes alone, so CUDA graphs may contain it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from tokenmill_worker.engines.own.attention import KVScales
from tokenmill_worker.engines.own.cuda.fused.kernels import (
    gate_kernel,
    norm_kernel,
    quantize_kernel,
    rotate_and_write_kernel,
)
from tokenmill_worker.engines.own.cuda.overlap import overlap_of

LEAST_SCALE = 1e-12  # of a row in 8 bits: the scale of a row of zeros must not be 0
_GATE_TILE = 1024
_FEW_TOKENS = 32  # up to here, one token per program keeps more of the device busy


@dataclass(frozen=True, slots=True)
class Heads:
    """Layout of a packed row of queries, keys and values, and its rotated dimensions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of queries and keys, applied to each head."""

    query_weight: Tensor
    key_weight: Tensor
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class CacheTarget:
    """A layer's cache view and scales, and the slots of a step's tokens; strides are in elements,
    within a block.
    """

    cache: Tensor
    slots: Tensor
    block_size: int
    token_stride: int
    head_stride: int
    scales: KVScales | None = None


def add_and_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the normed rows `[num_rows, width]` and the norm's input: `x`, or its sum with
    `residual`.
    """
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    sums = x if residual is None else torch.empty_like(out)
    if num_rows:
        pad = triton.next_power_of_2(width)
        norm_kernel[(num_rows,)](
            x, residual, weight, out, sums, eps, x.stride(0),
            WIDTH=width, PAD=pad, OFFSET=offset, ADDS=residual is not None,
            num_warps=min(16, max(1, pad // 512)), **overlap_of(x.device),
        )  # fmt: skip
    return out, sums


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows `[num_rows, width]` in E4M3 and their scales, float32 `[num_rows, 1]`."""
    num_rows, width = rows.shape
    narrow = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=rows.device)
    if num_rows:
        pad = triton.next_power_of_2(width)
        quantize_kernel[(num_rows,)](
            rows, narrow, scales, rows.stride(0),
            WIDTH=width, PAD=pad, LARGEST=torch.finfo(narrow.dtype).max, LEAST_SCALE=LEAST_SCALE,
            num_warps=min(16, max(1, pad // 512)), **overlap_of(rows.device),
        )  # fmt: skip
    return narrow, scales


def gate(packed: Tensor, is_gelu: bool) -> Tensor:
    """Apply the gated activation: `[num_rows, 2 · inner]` to `[num_rows, inner]`."""
    num_rows, inner = packed.shape[0], packed.shape[1] // 2
    out = torch.empty((num_rows, inner), dtype=packed.dtype, device=packed.device)
    if num_rows:
        tile = min(_GATE_TILE, triton.next_power_of_2(inner))
        gate_kernel[(num_rows, triton.cdiv(inner, tile))](
            packed, out, INNER=inner, TILE=tile, IS_GELU=is_gelu, **overlap_of(packed.device)
        )
    return out


def rotate_and_write(
    packed: Tensor,
    heads: Heads,
    tables: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    target: CacheTarget,
) -> Tensor:
    """Write rotated keys and values to the cache; return the rotated queries `[num_tokens,
    num_heads, head_dim]`, multiplied by their key head's scale where there are scales.

    `tables` are cosines and sines, `[num_tokens, rotary_dim]`.
    """
    num_tokens, cache, scales = packed.shape[0], target.cache, target.scales
    out = torch.empty(
        (num_tokens, heads.num_heads, heads.head_dim), dtype=packed.dtype, device=packed.device
    )
    if not num_tokens:
        return out
    cos, sin = (table.contiguous() for table in tables)
    half = heads.rotary_dim // 2
    tokens = 1 if num_tokens <= _FEW_TOKENS else 8
    grid = (triton.cdiv(num_tokens, tokens), heads.num_heads + heads.num_kv_heads)
    rotate_and_write_kernel[grid](
        packed, out, cache, cos, sin, target.slots,
        None if scales is None else scales.key, None if scales is None else scales.value,
        packed if norms is None else norms.query_weight,
        packed if norms is None else norms.key_weight,
        0.0 if norms is None else norms.eps, num_tokens,
        cache.stride(0), cache.stride(1), target.token_stride, target.head_stride,
        BLOCK_SIZE=target.block_size, NUM_HEADS=heads.num_heads, NUM_KV_HEADS=heads.num_kv_heads,
        HEAD_DIM=heads.head_dim, HEAD_PAD=triton.next_power_of_2(heads.head_dim), HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        REST_PAD=triton.next_power_of_2(max(1, heads.head_dim - 2 * half)),
        HAS_NORM=norms is not None, OFFSET=0.0 if norms is None else norms.offset,
        HAS_SCALES=scales is not None, TOKENS=tokens,
        num_warps=1 if tokens == 1 else 4, **overlap_of(packed.device),
    )  # fmt: skip
    return out
