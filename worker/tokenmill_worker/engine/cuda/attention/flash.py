"""Paged attention by flash-attn, where it is installed: version 3 on Hopper, version 2 elsewhere.

Version 2 takes block sizes that are multiples of 256 tokens; version 3 takes any. The wheel is
imported when the backend is first requested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
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


@dataclass(frozen=True, slots=True)
class FlashLibrary:
    """Two entry points of flash-attn; with version 3, `with_kvcache` serves every call."""

    version: int
    varlen: Callable[..., Any]
    with_kvcache: Callable[..., Any]


@lru_cache
def installed_library(is_hopper: bool) -> FlashLibrary:
    """Import flash-attn and return its entry points; raises ImportError where it is not
    installed.
    """
    if is_hopper:
        try:
            found = import_module("flash_attn_interface")
            return FlashLibrary(3, found.flash_attn_varlen_func, found.flash_attn_with_kvcache)
        except (ImportError, AttributeError):
            pass  # version 2 runs on Hopper too
    found = import_module("flash_attn")
    return FlashLibrary(2, found.flash_attn_varlen_func, found.flash_attn_with_kvcache)


def is_hopper(device: torch.device | None = None) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == 9


class FlashAttention(TokenMajorBackend):
    """Attention by flash-attn; tests pass a `library` in place of the installed one."""

    name = "flash"

    def __init__(self, library: FlashLibrary | None = None) -> None:
        self._library = library or installed_library(is_hopper())

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
    ) -> str | None:
        if device.type != "cuda":
            return f"flash-attn does not run on {device.type}"
        try:
            library = installed_library(is_hopper(device))
        except (ImportError, AttributeError) as error:
            return f"flash-attn is not installed ({error})"
        return flash_refusal(library.version, device, dtype, shape, block_size)

    @classmethod
    def default_block_size(cls, device: torch.device) -> int:
        try:
            version = installed_library(is_hopper(device)).version
        except (ImportError, AttributeError):  # not installed: `why_not` says so
            version = None
        return FA2_BLOCK_MULTIPLE if version == 2 else super().default_block_size(device)

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        options = {
            "softmax_scale": shape.scale,
            "causal": True,
            "window_size": window_of(metadata),
            "softcap": shape.softcap or 0.0,
        }
        query = query.contiguous()
        if self._library.version == 3:
            out, lse = self._attend_3(query, cache, metadata, options)
        elif metadata.max_query_len == 1 and query.shape[0] == metadata.num_seqs:
            out, lse = self._decode_2(query, cache, metadata, options)
        else:
            out, lse = self._attend_2(query, cache, metadata, options)
        out = out if sinks is None else with_sinks(out, lse, sinks)
        return without_garbage(out, metadata)

    def _attend_3(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._library.with_kvcache(
            query,
            cache[:, 0],
            cache[:, 1],
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start,
            max_seqlen_q=metadata.max_query_len,
            return_softmax_lse=True,
            **options,
        )
        return out, lse

    def _decode_2(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Attend with one query per sequence; version 2 splits long contexts only in this call."""
        out, lse, *_ = self._library.with_kvcache(
            query[:, None],
            cache[:, 0],
            cache[:, 1],
            cache_seqlens=metadata.seq_lens,
            block_table=metadata.block_table,
            return_softmax_lse=True,
            **options,
        )
        return out[:, 0], lse[:, :, 0].t()

    def _attend_2(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._library.varlen(
            query,
            cache[:, 0],
            cache[:, 1],
            cu_seqlens_q=metadata.query_start,
            cu_seqlens_k=cumulative(metadata.seq_lens),
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            block_table=metadata.block_table,
            return_attn_probs=True,
            **options,
        )
        return out, lse


def flash_refusal(
    version: int, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
) -> str | None:
    multiple = FA2_BLOCK_MULTIPLE if version == 2 else 1
    return refusal(f"flash-attn {version}", device, dtype, shape, block_size, multiple)
