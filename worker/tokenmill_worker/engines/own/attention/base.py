"""Contract of paged attention: how a layer's keys and values are stored, and how queries read them.

A backend sees packed queries, block tables and slots; it sees no requests and no scheduling. For
every ragged mix of prefill chunks and decodes its result must equal that of the reference backend.

A layer group sees the pool as `[num_blocks, num_layers, 2, *block_shape]`: a block has all its
layers side by side. `block_shape` is the backend's choice, e.g.
`(block_size, num_kv_heads, head_dim)`. The view of one layer is `[num_blocks, 2, *block_shape]`,
whose blocks need not be adjacent. A *block* here is a kernel block of `config.cache`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tokenmill_worker.engines.own.config.cache import Window


class CommonPrefix(NamedTuple):
    """Whole blocks that many sequences of a decode begin with, for a backend to read once.

    A sequence that begins with them has at least one token more.
    """

    lens: Tensor  # int32 [num_seqs]: tokens of the prefix; 0: the sequence does not begin with it
    # int32 [3]: 0, the number of sequences, and that number plus the prefix's tokens. They are
    # query_start and seq_lens of one sequence whose new tokens are the queries of all sequences.
    bounds: Tensor
    block_table: Tensor  # int32 [max_blocks]; only the prefix's blocks count


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step as one layer group sees it; all tensors are on the model's device.

    The queries of sequence i are the packed rows [query_start[i], query_start[i+1]), and they are
    its last positions: row r of sequence i has position seq_lens[i] - query_len_i + r. Block table
    entries are block 0 for padding and for blocks that left the window. Padding tokens write to
    slots of block 0.
    """

    query_start: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs]: tokens in the cache once this step's are written
    block_table: Tensor  # int32 [num_seqs, max_blocks]
    slot_mapping: Tensor  # int64 [num_tokens]: block id × block_size + offset in the block
    max_query_len: int
    max_seq_len: int
    block_size: int
    window: Window | None  # which positions a query sees; None: all up to its own
    query_lens_host: tuple[int, ...] = ()
    seq_lens_host: tuple[int, ...] = ()
    prefix: CommonPrefix | None = None  # of a decode, where it pays

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Parameters of one layer's attention that are the same in every call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None  # logits become softcap · tanh(logits / softcap)
    is_chunked: bool = False  # the metadata's window is chunked, which not every backend serves


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales of a layer whose keys and values are stored in 8 bits: constants of the layer.

    Keys and values are divided by their head's scale before they are stored. Queries and attended
    values are multiplied by it, which is the same as multiplying what is read. So no attention
    kernel knows of scales.
    """

    key: Tensor  # float32 [num_kv_heads]
    value: Tensor  # float32 [num_kv_heads]

    def divided(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is stored of keys and values `[num_tokens, num_kv_heads, head_dim]`."""
        return key / self.key[:, None], value / self.value[:, None]

    def of_query(self, query: Tensor) -> Tensor:
        """Return the queries `[num_tokens, num_heads, head_dim]` that read stored keys."""
        return (_by_kv_head(query, self.key) * self.key[:, None, None]).view_as(query).to(query)

    def of_output(self, attended: Tensor) -> Tensor:
        """Scale attended values `[num_tokens, num_heads, head_dim]` in place."""
        _by_kv_head(attended, self.value).mul_(self.value[:, None, None])
        return attended


def _by_kv_head(states: Tensor, scales: Tensor) -> Tensor:
    num_tokens, num_heads, head_dim = states.shape
    return states.view(num_tokens, len(scales), num_heads // len(scales), head_dim)


class AttentionBackend(ABC):
    """Base class of the backends; an instance holds no state but compiled kernels.

    In one step `write` runs before `attend` for the same layer.
    """

    name: str
    uses_amx = True  # on a CPU that has such registers: EngineConfig.amx
    takes_prefixes = False  # whether it reads `AttentionMetadata.prefix`

    @classmethod
    @abstractmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
    ) -> str | None:
        """Return one sentence on why this backend cannot serve the layer here, or None if it
        can.
        """

    @classmethod
    def default_block_size(cls, device: torch.device) -> int:
        """Return the tokens of a block where the settings name no number."""
        return 16

    @classmethod
    def block_size_of(cls, wanted: int, device: torch.device) -> int:
        """Return `wanted`, the setting's tokens of a block, or where it is 0 the default."""
        return wanted or cls.default_block_size(device)

    @abstractmethod
    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Return the layout of one layer's keys in one block; its values have the same."""

    def token_and_head_strides(self, cache: Tensor) -> tuple[int, int] | None:
        """Return the elements between tokens and between heads of a block in a layer's view.

        The dimensions of a head are contiguous. Returns None where blocks have another layout,
        which only `write` can fill.
        """
        return None

    def workspace_bytes(
        self, shape: AttentionShape, max_num_tokens: int, max_model_len: int, element_size: int
    ) -> int:
        """Return the most memory that one call of `attend` takes beside its output.

        It is 0 for a backend that reads the cache in place.
        """
        return 0

    @abstractmethod
    def write(self, key: Tensor, value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        """Store keys and values `[num_tokens, num_kv_heads, head_dim]` in their slots of the
        layer's cache view.
        """

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute causal attention of packed queries over the cache.

        Args:
            query: `[num_tokens, num_heads, head_dim]`; the result has the same shape.
            sinks: `[num_heads]`, one more logit per head in the softmax's denominator (gpt-oss).
        """


def stored_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert keys or values to the type of the cache.

    In 8 bits, a value out of range becomes the largest number of that sign.
    """
    if dtype.itemsize == 1:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)  # NaN stays NaN
    return x.to(dtype)
