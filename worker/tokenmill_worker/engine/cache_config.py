"""Describes the KV cache as it is resolved for one model: its layer groups and their blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same KV shape that share block ids.

    `window` is in tokens; None: full attention.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The resolved shape of the KV cache, as the bookkeeping needs it.

    `num_blocks[g]` counts the blocks of group g, the reserved block 0 included.
    `num_host_blocks[g]` counts those of the host pool (0: no offload).
    """

    block_size: int
    groups: tuple[LayerGroup, ...]
    num_blocks: tuple[int, ...]
    num_host_blocks: tuple[int, ...]
    prefix_cache: bool = True
