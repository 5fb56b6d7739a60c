"""Allocates the KV cache: per layer group one `[num_blocks, num_layers, 2, *block_shape]`.

One block with all its layers is contiguous, so that moving it is one copy. `kv.manager` keeps track
of which sequence holds which block.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tokenmill_worker.engine.attention import AttentionBackend
from tokenmill_worker.engine.cache_config import LayerGroup
from tokenmill_worker.engine.config import EngineConfig
from tokenmill_worker.engine.device import Device

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def kv_dtype(config: EngineConfig, weights: torch.dtype) -> torch.dtype:
    """Return the configured type of the cache; "auto" means the type of the weights.

    With quantized float32 weights "auto" means float16: its error is small beside that of the
    quantization (`ops/bench quality`), and attention reads half as much.
    """
    if config.kv_dtype != "auto":
        return _DTYPES[config.kv_dtype]
    return (
        torch.float16 if config.quantization is not None and weights == torch.float32 else weights
    )


@dataclass(frozen=True, slots=True)
class KVCachePool:
    """Tensors by layer group."""

    tensors: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        groups: Seq[LayerGroup],
        num_blocks: Seq[int],
        block_size: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: Device,
    ) -> KVCachePool:
        shapes = (
            (
                count,
                len(group.layers),
                2,
                *backend.block_shape(block_size, group.num_kv_heads, group.head_dim),
            )
            for group, count in zip(groups, num_blocks, strict=True)
        )
        return cls(
            tuple(
                device.allocate(prod(shape) * dtype.itemsize).view(dtype).view(shape)
                for shape in shapes
            )
        )

    def touch(self) -> None:
        """Write to every block of an empty pool, so that no later step waits for page faults."""
        for tensor in self.tensors:
            tensor.zero_()

    def layer(self, group: int, index: int) -> Tensor:
        """Return a view of the group's index-th layer: `[num_blocks, 2, *block_shape]`."""
        return self.tensors[group][:, index]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)
