"""The tensors of the KV cache: one pool per layer group, `[num_blocks, num_layers, 2, *block_shape]`.

A block with all its layers is contiguous, so that moving a block is one copy. The pool knows neither
which blocks are in use nor by whom: that is the bookkeeping's business.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from worker.engine import huge_pages
from worker.engine.attention import AttentionBackend
from worker.engine.config import EngineConfig, LayerGroup

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def kv_dtype(config: EngineConfig, weights: torch.dtype) -> torch.dtype:
    """As configured; "auto" is that of the weights, but half precision beside rounded float32 weights: it adds little
    to what rounding them loses (`ops/bench quality`), and attention reads half as much."""
    if config.kv_dtype != "auto":
        return _DTYPES[config.kv_dtype]
    return torch.float16 if config.quantization is not None and weights == torch.float32 else weights


@dataclass(frozen=True, slots=True)
class KVCachePool:
    """Device tensors, by group. On CPU untouched blocks take no memory (in units of a huge page)."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        groups: Seq[LayerGroup],
        num_blocks: Seq[int],
        block_size: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        pinned: bool = False,
    ) -> KVCachePool:
        shapes = (
            (count, len(group.layers), 2, *backend.block_shape(block_size, group.num_kv_heads, group.head_dim))
            for group, count in zip(groups, num_blocks, strict=True)
        )
        if device.type == "cpu" and not pinned:
            return cls(
                tuple(huge_pages.zeros(prod(shape) * dtype.itemsize).view(dtype).view(shape) for shape in shapes)
            )
        return cls(tuple(torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned) for shape in shapes))

    def touch(self) -> None:
        """Make the system find the memory of an empty pool now, and not in the steps that first write to it."""
        for tensor in self.tensors:
            tensor.zero_()

    def layer(self, group: int, index: int) -> Tensor:
        """The view of the group's index-th layer: `[num_blocks, 2, *block_shape]`."""
        return self.tensors[group][:, index]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
