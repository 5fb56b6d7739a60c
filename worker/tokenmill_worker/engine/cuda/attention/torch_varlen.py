"""Paged attention by torch's own FlashAttention (`torch.nn.attention.varlen`), if it takes block
tables.

The function's signature shows whether this torch does. Contexts are never split (`num_splits=1`):
the split form with blocks has given wrong results, and without it a row's result does not depend on
its batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenmill_worker.engine.attention.base import AttentionMetadata, AttentionShape
from tokenmill_worker.engine.cuda.attention.token_major import (
    FA2_BLOCK_MULTIPLE,
    TokenMajorBackend,
    cumulative,
    refusal,
    window_of,
    with_sinks,
    without_garbage,
)

NEEDED = (
    "block_table",
    "seqused_k",
    "enable_gqa",
    "num_splits",
    "window_size",
    "scale",
    "return_aux",
)


def find_varlen() -> Callable[..., Any]:
    """Return torch's variable-length attention; raises ImportError where it cannot read blocks."""
    from torch.nn.attention import varlen

    missing = missing_parameters(varlen.varlen_attn)
    if missing:
        raise ImportError(f"varlen_attn of torch {torch.__version__} takes no {', '.join(missing)}")
    found: Callable[..., Any] = varlen.varlen_attn
    return found


def missing_parameters(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters
    return [name for name in NEEDED if name not in parameters]


def block_multiple() -> int:
    """Return what block sizes must be a multiple of.

    FlashAttention 3, where a program has activated it in torch, takes blocks of any size.
    """
    current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    return FA2_BLOCK_MULTIPLE if current in (None, "FA2") else 1


class TorchVarlenAttention(TokenMajorBackend):
    """Attention by torch's FlashAttention; tests pass a `varlen` in place of torch's function."""

    name = "torch_varlen"

    def __init__(self, varlen: Callable[..., Any] | None = None) -> None:
        self._varlen = varlen or find_varlen()

    @classmethod
    def default_block_size(cls, device: torch.device) -> int:
        return max(super().default_block_size(device), block_multiple())

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
    ) -> str | None:
        try:
            if device.type == "cuda":  # on other devices another torch would not help
                find_varlen()
        except ImportError as error:
            return str(error)
        if shape.softcap:
            return "torch's variable-length attention has no logit soft-cap"
        return refusal("torch's FlashAttention", device, dtype, shape, block_size, block_multiple())

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        from torch.nn.attention.varlen import AuxRequest

        result = self._varlen(
            query.contiguous(),
            cache[:, 0],
            cache[:, 1],
            metadata.query_start,
            cumulative(metadata.seq_lens),
            metadata.max_query_len,
            metadata.max_seq_len,
            return_aux=None if sinks is None else AuxRequest(lse=True),
            scale=shape.scale,
            window_size=window_of(metadata),
            enable_gqa=shape.num_heads != shape.num_kv_heads,
            seqused_k=metadata.seq_lens,
            block_table=metadata.block_table,
            num_splits=1,
        )
        out: Tensor = result if sinks is None else with_sinks(result[0], result[1], sinks)
        return without_garbage(out, metadata)
