"""Describes the KV cache as it is resolved for one model: its layer groups and their blocks.

All groups take blocks from one pool, so a block has the same bytes whichever group holds it. A
group whose layers need fewer bytes per token keeps more tokens in a block. The attention kernels
read *kernel blocks* of `block_size` tokens, which are the parts of a block:

    5 sliding layers   │ 16 tokens of 5 layers                                     │
    1 full layer       │ 16 tokens │ 16 tokens │ 16 tokens │ 16 tokens │ 16 tokens │

The layers of a draft model lie beside those of one group: a kernel block holds the same tokens of
both models, so one block table serves both.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from math import lcm

_ALIGNMENT = 64  # numbers: kernels load up to 64 bytes at once
_MOST_KERNEL_BLOCKS = 4  # of the largest group in one block
_ACCEPTED_WASTE = 1 / 8  # of a block


@dataclass(frozen=True, slots=True)
class Window:
    """Limits a query to the last `size` tokens of its sequence, its own included.

    A chunked window (Llama 4) limits it to its own chunk: chunks have `size` tokens, counted from
    the sequence's start.
    """

    size: int
    is_chunked: bool = False


def first_visible(position: int, window: Window | None) -> int:
    """Return the first position that the query at `position` sees; None: it sees all up to it."""
    if window is None or position < window.size:
        return 0
    return position - (position % window.size if window.is_chunked else window.size - 1)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers with the same KV shape that share block ids.

    Without a `window`, attention is full. `kernel_blocks` is the number of kernel blocks in one
    block of the pool. `drafts` are the groups of a draft model that lie beside these layers.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: Window | None = None
    kernel_blocks: int = 1
    drafts: tuple[LayerGroup, ...] = ()

    @property
    def own_size(self) -> int:
        """The numbers cached per token: keys and values of the group's own layers."""
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim

    @property
    def token_size(self) -> int:
        """The numbers cached per token, a draft model's included."""
        return self.own_size + sum(group.own_size for group in self.drafts)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The resolved shape of the KV cache, as the bookkeeping needs it.

    `block_size` is that of a kernel block, in tokens. `num_blocks` counts the blocks of the pool,
    the reserved block 0 included, `num_host_blocks` those of the host pool (0: no offload).
    """

    block_size: int
    groups: tuple[LayerGroup, ...]
    num_blocks: int
    num_host_blocks: int = 0
    prefix_cache: bool = True

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def block_sizes(self) -> list[int]:
        """Tokens in one block, by group."""
        return [self.block_size * group.kernel_blocks for group in self.groups]


def with_common_blocks(groups: Seq[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Return the groups with as many kernel blocks in a block as make their bytes nearly equal.

    The largest group gets the fewest, up to 4, with which no other one leaves more than an eighth
    of a block empty; if there is no such number, that which wastes the least.
    """
    sizes = [group.token_size for group in groups]
    found: list[tuple[float, list[int]]] = []
    for count in range(1, _MOST_KERNEL_BLOCKS + 1):
        counts = [max(1, round(count * max(sizes) / size)) for size in sizes]
        filled = [number * size for number, size in zip(counts, sizes, strict=True)]
        found.append((1 - min(filled) / max(filled), counts))
        if found[-1][0] <= _ACCEPTED_WASTE:
            break
    _, counts = min(found[-1:] if found[-1][0] <= _ACCEPTED_WASTE else found)
    return tuple(
        replace(group, kernel_blocks=count) for group, count in zip(groups, counts, strict=True)
    )


def with_drafts(
    groups: Seq[LayerGroup], drafts: tuple[LayerGroup, ...]
) -> tuple[LayerGroup, ...] | None:
    """Return the groups with a draft model's groups beside the first one of full attention; None if
    every group has a window, whose blocks are freed while a draft model may still read them.
    """
    host = next((index for index, group in enumerate(groups) if group.window is None), None)
    if host is None:
        return None
    return with_common_blocks(
        [
            replace(group, drafts=drafts) if index == host else group
            for index, group in enumerate(groups)
        ]
    )


def numbers_in_block(groups: Seq[LayerGroup], block_size: int) -> int:
    """Return the numbers that one block holds, whichever group takes it.

    A block of several groups is rounded up, so that its kernel blocks have equal, aligned sizes.
    """
    largest = max(group.kernel_blocks * block_size * group.token_size for group in groups)
    if len(groups) == 1:
        return largest
    unit = _ALIGNMENT * lcm(*(group.kernel_blocks for group in groups))
    return -(-largest // unit) * unit


def most_blocks(window: Window | None, chunk: int, block_size: int, num_tokens: int) -> int:
    """Return the most blocks that a group ever needs for one sequence of `num_tokens`.

    With a window these are the blocks that `chunk` tokens, computed in one step, attend to.
    """
    whole = -(-num_tokens // block_size)
    return whole if window is None else min(whole, -(-(window.size - 1 + chunk) // block_size) + 1)
