"""Allocates the KV cache: one buffer of blocks, which every layer group sees in its own shape.

One block with all its layers is contiguous, so that moving it is one copy. `kv.manager` keeps track
of which group and sequence hold which block.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention import AttentionBackend
from tokenmill_worker.engines.own.config import EngineConfig
from tokenmill_worker.engines.own.config.cache import LayerGroup, numbers_in_block
from tokenmill_worker.engines.own.device import Device

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
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
    """`blocks` is `[num_blocks, numbers_in_block]`.

    `groups[g]` views the same memory as group g's kernel blocks:
    `[num_blocks · kernel_blocks, num_layers, 2, *block_shape]`. So does `drafts[g]` for group g of
    a draft model.
    """

    blocks: Tensor
    groups: tuple[Tensor, ...]
    drafts: tuple[Tensor, ...] = ()

    @classmethod
    def allocate(
        cls,
        groups: Seq[LayerGroup],
        num_blocks: int,
        block_size: int,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: Device,
    ) -> KVCachePool:
        numbers = numbers_in_block(groups, block_size)
        memory = device.allocate(num_blocks * numbers * dtype.itemsize).view(dtype)
        views: list[Tensor] = []
        drafts: list[Tensor] = []
        for group in groups:
            count = num_blocks * group.kernel_blocks
            rows = memory.view(count, -1)
            start = 0
            for part in (group, *group.drafts):
                shape = backend.block_shape(block_size, part.num_kv_heads, part.head_dim)
                stop = start + block_size * part.own_size
                view = rows[:, start:stop].view(count, len(part.layers), 2, *shape)
                (views if part is group else drafts).append(view)
                start = stop
        return cls(memory.view(num_blocks, numbers), tuple(views), tuple(drafts))

    def layer(self, group: int, index: int) -> Tensor:
        """Return a view of the group's index-th layer: `[num_kernel_blocks, 2, *block_shape]`."""
        return self.groups[group][:, index]

    def draft_layer(self, group: int, index: int) -> Tensor:
        """Return the same of a draft model's layer."""
        return self.drafts[group][:, index]

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel() * self.blocks.element_size()
