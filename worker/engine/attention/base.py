"""The contract of paged attention: where a layer's keys and values lie, and how queries attend to them.

A backend knows nothing of requests or scheduling. It sees packed queries, block tables and slots, and
must give the reference backend's result for every ragged mix of prefill chunks and decodes.

One layer group's pool is one tensor `[num_blocks, num_layers, 2, *block_shape]`, so that a block with
all its layers is contiguous and offloading is one gather; `block_shape` is the backend's choice, e.g.
`(block_size, num_kv_heads, head_dim)`. A layer's view is `pool[:, layer]`: `[num_blocks, 2, *block_shape]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step as one layer group sees it; all tensors on the model's device.

    Sequence i's queries are packed rows [query_start[i], query_start[i+1]) and are its last positions:
    row r of sequence i stands at position seq_lens[i] - query_len_i + r. Block table entries that left
    the window, and padding, are block 0; padding tokens write to slots of block 0.
    """

    query_start: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs]: tokens in the cache once this step's are written
    block_table: Tensor  # int32 [num_seqs, max_blocks]
    slot_mapping: Tensor  # int64 [num_tokens]: block id × block_size + offset in the block
    max_query_len: int
    max_seq_len: int
    block_size: int
    window: int | None  # a query at position p sees positions (p - window, p]; None: all up to p
    query_lens_host: tuple[int, ...] = ()
    seq_lens_host: tuple[int, ...] = ()

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What stays the same for every call of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None = None  # logits become softcap · tanh(logits / softcap)


class AttentionBackend(ABC):
    """Stateless but for compiled kernels. `write` comes before `attend` for the same layer and step."""

    name: str
    uses_amx = True  # on a CPU that has such registers: EngineConfig.amx

    @classmethod
    @abstractmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int) -> str | None:
        """One sentence on why it cannot serve this layer here; None if it can."""

    @abstractmethod
    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """The layout of one layer's keys (and likewise values) in one block."""

    def token_and_head_strides(self, cache: Tensor) -> tuple[int, int] | None:
        """Elements between tokens and between heads of a block in a layer's view, a head's dimensions being together.

        None where blocks are laid out otherwise: then only `write` knows how.
        """
        return None

    def workspace_bytes(self, shape: AttentionShape, max_num_tokens: int, max_model_len: int, element_size: int) -> int:
        """The most memory that one call of `attend` takes beside its output; 0 for one that reads in place."""
        return 0

    @abstractmethod
    def write(self, key: Tensor, value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, at their slots of the layer's cache view."""

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of packed queries `[num_tokens, num_heads, head_dim]` over the cache; same shape back.

        `sinks` `[num_heads]` adds one logit per head to the softmax's denominator (gpt-oss).
        """


def stored_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as a cache of this type keeps them: what 8 bits cannot hold becomes their largest number."""
    if dtype == torch.float8_e4m3fn:
        largest = torch.finfo(dtype).max
        x = x.clamp(-largest, largest)  # NaN stays NaN
    return x.to(dtype)
