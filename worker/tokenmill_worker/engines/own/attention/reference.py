"""Paged attention in plain PyTorch: the reference that every other backend is checked against.

Keys and values are gathered position by position through the block tables, so it reads only what a
query may see: nothing outside the window, nothing of other sequences, and no unused slots of a
half-filled block, which may hold another sequence's NaN. Prefill chunks run one sequence at a time,
decodes in groups of similar length. It works on any device; where the metadata has no lengths on
the host, it copies them from the device.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmill_worker.engines.own.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    stored_as,
)
from tokenmill_worker.engines.own.config.cache import Window, first_visible

# decodes share one batch while the longest is at most this much longer than the shortest
MAX_PADDING = 1.25
PADDING_SLACK = 32  # ... or longer by no more than this many tokens
MAX_SCORES = 1 << 23  # per call; longer chunks attend in pieces
MAX_GATHERED_TOKENS = 65_536  # per share, padding included; bounds the memory of a call
# layer groups whose gather indices are kept while a step runs through the layers
_REMEMBERED_STEPS = 8


@dataclass(frozen=True, slots=True)
class _Share:
    """Sequences that attend together: `num_queries` rows each, over `length` gathered positions."""

    rows: Tensor | slice  # their packed query rows
    num_seqs: int
    num_queries: int
    length: int
    blocks: Tensor  # int64 [num_seqs, length]; positions past a sequence's end repeat its last one
    offsets: Tensor  # int64 [num_seqs, length]
    # bool [num_seqs, num_queries, length]; None: every query sees every position
    visible: Tensor | None


class ReferenceAttention(AttentionBackend):
    """The reference backend; its block layout is (block_size, num_kv_heads, head_dim)."""

    name = "reference"

    def __init__(
        self, max_scores: int = MAX_SCORES, max_gathered_tokens: int = MAX_GATHERED_TOKENS
    ) -> None:
        self._max_scores = max_scores
        self._max_gathered_tokens = max_gathered_tokens
        self._layouts: list[tuple[AttentionMetadata, list[_Share]]] = []
        self._slots: list[tuple[AttentionMetadata, Tensor, Tensor]] = []

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
    ) -> str | None:
        if shape.num_heads % shape.num_kv_heads:
            return (
                f"{shape.num_heads} query heads do not divide over {shape.num_kv_heads} key heads"
            )
        return None

    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (block_size, num_kv_heads, head_dim)

    def workspace_bytes(
        self, shape: AttentionShape, max_num_tokens: int, max_model_len: int, element_size: int
    ) -> int:
        """Return the size of one share's keys and values, and of its scores with their mask or
        softmax.
        """
        gathered = (
            max(MAX_GATHERED_TOKENS, max_model_len)
            * 2
            * shape.num_kv_heads
            * shape.head_dim
            * element_size
        )
        scores = max(MAX_SCORES, shape.num_heads * max_model_len) * (3 * 4 + element_size)
        return gathered + scores

    def write(self, key: Tensor, value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        blocks, offsets = self._slots_of(metadata)
        cache[:, 0].index_put_((blocks, offsets), stored_as(key, cache.dtype))
        cache[:, 1].index_put_((blocks, offsets), stored_as(value, cache.dtype))

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        output = torch.zeros_like(query)  # rows of padding stay zero
        for share in self._layout_of(metadata):
            keys = _gather(cache[:, 0], share, query.dtype)
            values = _gather(cache[:, 1], share, query.dtype)
            queries = query[share.rows].view(
                share.num_seqs, share.num_queries, shape.num_heads, shape.head_dim
            )
            attended = _attend_in_pieces(
                queries, keys, values, share.visible, shape, sinks, self._max_scores
            )
            output[share.rows] = attended.reshape(-1, shape.num_heads, shape.head_dim)
        return output

    def _slots_of(self, metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        for known, blocks, offsets in self._slots:
            if known is metadata:
                return blocks, offsets
        blocks = torch.div(metadata.slot_mapping, metadata.block_size, rounding_mode="floor")
        offsets = metadata.slot_mapping - blocks * metadata.block_size
        self._slots = [(metadata, blocks, offsets), *self._slots[: _REMEMBERED_STEPS - 1]]
        return blocks, offsets

    def _layout_of(self, metadata: AttentionMetadata) -> list[_Share]:
        for known, layout in self._layouts:
            if known is metadata:
                return layout
        layout = _plan(metadata, self._max_gathered_tokens)
        self._layouts = [(metadata, layout), *self._layouts[: _REMEMBERED_STEPS - 1]]
        return layout


# ── which positions a step reads; the same for all layers of a group ──


def _plan(metadata: AttentionMetadata, max_tokens: int) -> list[_Share]:
    seq_lens = metadata.seq_lens_host or tuple(metadata.seq_lens.tolist())
    starts = metadata.query_start.tolist()
    query_lens = metadata.query_lens_host or tuple(b - a for a, b in itertools.pairwise(starts))
    live = [i for i, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True)) if q > 0 and s > 0]
    decodes = [i for i in live if query_lens[i] == 1]
    groups = _by_length(decodes, seq_lens, metadata.window, max_tokens)
    shares = [_plan_decodes(metadata, group, seq_lens, starts) for group in groups]
    shares += [
        _plan_chunk(metadata, i, query_lens[i], seq_lens[i], starts[i])
        for i in live
        if query_lens[i] > 1
    ]
    return shares


def _by_length(
    decodes: list[int], seq_lens: tuple[int, ...], window: Window | None, max_tokens: int
) -> list[list[int]]:
    groups: list[list[int]] = []
    shortest = 0
    num_visible = {i: seq_lens[i] - first_visible(seq_lens[i] - 1, window) for i in decodes}
    for i, length in sorted(num_visible.items(), key=lambda item: item[1]):
        is_similar = length <= max(shortest * MAX_PADDING, shortest + PADDING_SLACK)
        if groups and is_similar and length * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(i)
        else:
            groups.append([i])
            shortest = length
    return groups


def _plan_decodes(
    metadata: AttentionMetadata, group: list[int], seq_lens: tuple[int, ...], starts: list[int]
) -> _Share:
    device = metadata.seq_lens.device
    ends = [seq_lens[i] for i in group]
    firsts = [first_visible(end - 1, metadata.window) for end in ends]
    length = max(end - first for end, first in zip(ends, firsts, strict=True))
    first = torch.tensor(firsts, device=device)[:, None]
    last = torch.tensor(ends, device=device)[:, None] - 1
    wanted = first + torch.arange(length, device=device)
    members = torch.tensor(group, device=device)
    blocks, offsets = _places(metadata, metadata.block_table[members], wanted.minimum(last))
    is_uniform = all(end - start == length for end, start in zip(ends, firsts, strict=True))
    visible = None if is_uniform else (wanted <= last)[:, None, :]
    rows = torch.tensor([starts[i] for i in group], device=device)
    return _Share(rows, len(group), 1, length, blocks, offsets, visible)


def _plan_chunk(
    metadata: AttentionMetadata, i: int, num_queries: int, seq_len: int, start: int
) -> _Share:
    """Plan one sequence's prefill chunk: queries at positions [seq_len - num_queries, seq_len)."""
    device = metadata.seq_lens.device
    first_query = seq_len - num_queries
    first = first_visible(first_query, metadata.window)
    positions = torch.arange(first, seq_len, device=device)
    queries = torch.arange(first_query, seq_len, device=device)[:, None]
    visible = positions <= queries
    if metadata.window is not None:
        firsts = [first_visible(query, metadata.window) for query in range(first_query, seq_len)]
        visible &= positions >= torch.tensor(firsts, device=device)[:, None]
    blocks, offsets = _places(metadata, metadata.block_table[i : i + 1], positions[None])
    return _Share(
        slice(start, start + num_queries),
        1,
        num_queries,
        seq_len - first,
        blocks,
        offsets,
        visible[None],
    )


def _places(metadata: AttentionMetadata, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    indices = torch.div(positions, metadata.block_size, rounding_mode="floor")
    return table.long().gather(1, indices), positions - indices * metadata.block_size


def _gather(cache: Tensor, share: _Share, dtype: torch.dtype) -> Tensor:
    """Gather a share's keys or values: `[num_seqs, num_kv_heads, length, head_dim]`."""
    return cache[share.blocks, share.offsets].to(dtype).transpose(1, 2)


# ── attention proper ──


def _attend_in_pieces(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    shape: AttentionShape,
    sinks: Tensor | None,
    max_scores: int,
) -> Tensor:
    """Attend with a long chunk's queries in pieces, so that the scores stay within `max_scores`."""
    num_seqs, num_queries = query.shape[:2]
    piece = max(1, max_scores // (num_seqs * shape.num_heads * keys.shape[2]))
    if piece >= num_queries:
        return _attend(query, keys, values, visible, shape, sinks)
    masks = (
        [None] * -(-num_queries // piece) if visible is None else torch.split(visible, piece, dim=1)
    )
    pieces = [
        _attend(part, keys, values, mask, shape, sinks)
        for part, mask in zip(torch.split(query, piece, dim=1), masks, strict=True)
    ]
    return torch.cat(pieces, dim=1)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor | None,
    shape: AttentionShape,
    sinks: Tensor | None,
) -> Tensor:
    """Attend without repeating keys: query heads that share a key head become more rows of it.

    `query` is [num_seqs, num_queries, num_heads, head_dim], and so is the result; `keys` is
    [num_seqs, num_kv_heads, length, head_dim].
    """
    num_seqs, num_queries, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    per_key = num_heads // num_kv_heads
    rows = query.view(num_seqs, num_queries, num_kv_heads, per_key, head_dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(num_seqs, num_kv_heads, per_key * num_queries, head_dim)
    mask = None
    if visible is not None:
        mask = (
            visible[:, None, None]
            .expand(-1, 1, per_key, -1, -1)
            .reshape(num_seqs, 1, per_key * num_queries, -1)
        )
    if sinks is None and shape.softcap is None:
        attended = F.scaled_dot_product_attention(
            rows, keys, values, attn_mask=mask, scale=shape.scale
        )
    else:
        row_sinks = None
        if sinks is not None:
            row_sinks = sinks.view(1, num_kv_heads, per_key, 1).expand(1, -1, -1, num_queries)
            row_sinks = row_sinks.reshape(1, num_kv_heads, per_key * num_queries, 1)
        attended = _attend_by_hand(rows, keys, values, mask, shape, row_sinks)
    attended = attended.view(num_seqs, num_kv_heads, per_key, num_queries, head_dim).permute(
        0, 3, 1, 2, 4
    )
    return attended.reshape(num_seqs, num_queries, num_heads, head_dim)


def _attend_by_hand(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    shape: AttentionShape,
    sinks: Tensor | None,
) -> Tensor:
    logits = torch.matmul(query, keys.transpose(2, 3)) * shape.scale
    if shape.softcap is not None:
        logits = torch.tanh(logits / shape.softcap) * shape.softcap
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    if sinks is not None:  # one more column that takes weight but has no value
        logits = torch.cat([logits, sinks.to(logits.dtype).expand(*logits.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(values.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights, values)
