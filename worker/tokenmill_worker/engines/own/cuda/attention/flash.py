"""Paged attention by flash-attn, where it is installed, in the version that suits the GPU best.

Version 3 is for Hopper alone. Version 4 (`flash-attn-4`, a wheel of Python that compiles its
kernels when they are first needed) reads block tables on Hopper and on data centers' Blackwell.
Version 2 runs everywhere, with block sizes that are multiples of 256 tokens; the others take any.
The package is imported when the backend is first requested.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention.base import AttentionMetadata, AttentionShape
from tokenmill_worker.engines.own.cuda.attention.token_major import (
    FA2_BLOCK_MULTIPLE,
    TokenMajorBackend,
    cumulative,
    refusal,
    window_of,
    with_sinks,
    without_garbage,
)

_MODULES = {2: "flash_attn", 3: "flash_attn_interface", 4: "flash_attn.cute"}
# The best version first, by the major compute capability; others take version 2.
_VERSIONS = {9: (3, 4, 2), 10: (4, 2), 11: (4, 2)}


@dataclass(frozen=True, slots=True)
class FlashLibrary:
    """An installed version and its module, whose public functions are called."""

    version: int
    module: Any


@lru_cache
def installed_library(capability: int) -> FlashLibrary:
    """Import flash-attn for GPUs of this major compute capability; raises ImportError where no
    version is installed.
    """
    failures = []
    for version in _VERSIONS.get(capability, (2, 4)):
        try:
            module = import_module(_MODULES[version])
            module.flash_attn_varlen_func  # noqa: B018 - `flash_attn` holds version 4 alone, too
        except (ImportError, AttributeError) as error:
            failures.append(str(error))
        else:
            return FlashLibrary(version, module)
    raise ImportError("; ".join(dict.fromkeys(failures)))


def capability_of(device: torch.device | None = None) -> int:
    """Return the device's major compute capability, 0 without a GPU."""
    return torch.cuda.get_device_capability(device)[0] if torch.cuda.is_available() else 0


class FlashAttention(TokenMajorBackend):
    """Attention by flash-attn; tests pass a `library` in place of the installed one."""

    name = "flash"

    def __init__(self, library: FlashLibrary | None = None) -> None:
        self._library = library or installed_library(capability_of())

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
    ) -> str | None:
        if device.type != "cuda":
            return f"flash-attn does not run on {device.type}"
        capability = capability_of(device)
        try:
            version = installed_library(capability).version
        except ImportError as error:
            return f"flash-attn is not installed ({error})"
        return (_refusal_of_4(capability, shape) if version == 4 else None) or flash_refusal(
            version, device, dtype, shape, block_size
        )

    @classmethod
    def default_block_size(cls, device: torch.device) -> int:
        try:
            version = installed_library(capability_of(device)).version
        except ImportError:  # not installed: `why_not` says so
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
        if self._library.version == 4:
            return without_garbage(self._attend_4(query, cache, metadata, shape, sinks), metadata)
        if self._library.version == 3:
            out, lse = self._attend_3(query, cache, metadata, options)
        elif metadata.max_query_len == 1 and query.shape[0] == metadata.num_seqs:
            out, lse = self._decode_2(query, cache, metadata, options)
        else:
            out, lse = self._attend_2(query, cache, metadata, options)
        out = out if sinks is None else with_sinks(out, lse, sinks)
        return without_garbage(out, metadata)

    def _attend_4(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend by version 4, which applies sinks itself and does not split contexts.

        To it None is no window; −1 is one that ends before the query.
        """
        window = (None, None) if metadata.window is None else (metadata.window.size - 1, 0)
        out: Tensor = self._library.module.flash_attn_varlen_func(
            query,
            cache[:, 0],
            cache[:, 1],
            cu_seqlens_q=metadata.query_start,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            seqused_k=metadata.seq_lens,
            page_table=metadata.block_table,
            softmax_scale=shape.scale,
            causal=True,
            window_size=window,
            learnable_sink=sinks,
            softcap=shape.softcap or 0.0,
        )[0]
        return out

    def _attend_3(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._library.module.flash_attn_with_kvcache(
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
        out, lse, *_ = self._library.module.flash_attn_with_kvcache(
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
        out, lse, *_ = self._library.module.flash_attn_varlen_func(
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


def _refusal_of_4(capability: int, shape: AttentionShape) -> str | None:
    """Return why version 4 cannot read this layer's blocks on such a GPU, or None if it can."""
    if capability not in _VERSIONS:
        return f"flash-attn 4 has no block tables on GPUs of compute capability {capability}.x"
    if shape.head_dim % 16:
        return (
            "flash-attn 4 reads blocks of head sizes that are multiples of 16, "
            f"not {shape.head_dim}"
        )
    if capability != 9 and 128 < shape.head_dim != 256:
        return (
            f"flash-attn 4 takes head sizes up to 128, and 256, on GPUs of compute capability "
            f"{capability}.x, not {shape.head_dim}"
        )
    return None
