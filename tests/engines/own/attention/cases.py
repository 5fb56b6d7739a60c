"""Ragged attention problems, and their answers in dense float64 arithmetic.

A problem's pool is full of NaN wherever nothing was written, its blocks are shuffled, and its
tables are padded with block 0, which is also where entries that left the window point.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill_worker.engines.own.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    stored_as,
)
from tokenmill_worker.engines.own.config.cache import Window, first_visible

NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True, slots=True)
class Case:
    """One problem. `lens` holds (query tokens, tokens in the cache) of each sequence."""

    name: str
    lens: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: Window | None = None
    softcap: float | None = None
    has_sinks: bool = False
    scale: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> AttentionShape:
        scale = self.scale or self.head_dim**-0.5
        is_chunked = self.window is not None and self.window.is_chunked
        return AttentionShape(
            self.num_heads, self.num_kv_heads, self.head_dim, scale, self.softcap, is_chunked
        )


@dataclass(frozen=True, slots=True)
class Problem:
    case: Case
    query: Tensor  # [num_tokens, num_heads, head_dim]
    key: Tensor  # [sum of all tokens in the cache, num_kv_heads, head_dim]
    value: Tensor
    sinks: Tensor | None
    table: Tensor  # int32 [num_seqs, max_blocks + padding]
    num_blocks: int


def make_problem(case: Case, device: str = "cpu") -> Problem:
    random = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    total = sum(seq_len for _, seq_len in case.lens)
    num_tokens = sum(query_len for query_len, _ in case.lens)
    counts = [-(-seq_len // case.block_size) for _, seq_len in case.lens]
    order = torch.randperm(sum(counts), generator=random) + 1
    table = torch.zeros(len(case.lens), max(counts) + 3, dtype=torch.int32)
    for row, ids in zip(table, order.split(counts), strict=True):
        row[: len(ids)] = ids

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=random).to(case.dtype).to(device)

    return Problem(
        case=case,
        query=normal(num_tokens, case.num_heads, case.head_dim) * 1.5,
        key=normal(total, case.num_kv_heads, case.head_dim),
        value=normal(total, case.num_kv_heads, case.head_dim),
        sinks=normal(case.num_heads) if case.has_sinks else None,
        table=table.to(device),
        num_blocks=sum(counts) + 1,
    )


def metadata_of(
    problem: Problem, lens: tuple[tuple[int, int], ...], rows: Tensor | None = None
) -> AttentionMetadata:
    """Make a step's metadata: the last `query_len` tokens of each sequence that `rows` picks."""
    case, device = problem.case, problem.table.device
    table = problem.table if rows is None else problem.table[rows]
    slots = []
    for row, (query_len, seq_len) in zip(table.cpu(), lens, strict=True):
        positions = torch.arange(seq_len - query_len, seq_len)
        slots.append(
            row[positions // case.block_size].long() * case.block_size + positions % case.block_size
        )
    query_lens = [query_len for query_len, _ in lens]
    table = table.clone()
    for row, (query_len, seq_len) in zip(table, lens, strict=True):
        # blocks that no query of this step or a later one sees are gone
        row[: first_visible(seq_len - query_len, case.window) // case.block_size] = 0
    return AttentionMetadata(
        query_start=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        seq_lens=torch.tensor([seq_len for _, seq_len in lens], dtype=torch.int32, device=device),
        block_table=table,
        slot_mapping=torch.cat(slots).to(device),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_len for _, seq_len in lens),
        block_size=case.block_size,
        window=case.window,
        query_lens_host=tuple(query_lens),
        seq_lens_host=tuple(seq_len for _, seq_len in lens),
    )


def filled_cache(
    backend: AttentionBackend, problem: Problem, kv_dtype: torch.dtype | None = None
) -> Tensor:
    """Return a layer's view of a pool of NaN with all keys and values written by the backend."""
    case = problem.case
    block_shape = backend.block_shape(case.block_size, case.num_kv_heads, case.head_dim)
    size = (problem.num_blocks, NUM_LAYERS, 2, *block_shape)
    pool = torch.full(size, float("nan"), dtype=kv_dtype or case.dtype, device=problem.key.device)
    everything = tuple((seq_len, seq_len) for _, seq_len in case.lens)
    widest = Case(**{**{f: getattr(case, f) for f in case.__slots__}, "window": None})
    whole = metadata_of(
        Problem(widest, *[getattr(problem, f) for f in problem.__slots__[1:]]), everything
    )
    backend.write(problem.key, problem.value, pool[:, LAYER], whole)
    return pool[:, LAYER]


def round_as_stored(problem: Problem, kv_dtype: torch.dtype) -> None:
    """Round a problem's keys and values to what a cache of this type holds."""
    for stored in (problem.key, problem.value):
        stored.copy_(stored_as(stored, kv_dtype))


def attend(backend: AttentionBackend, problem: Problem, cache: Tensor) -> Tensor:
    metadata = metadata_of(problem, problem.case.lens)
    return backend.attend(problem.query, cache, metadata, problem.case.shape, problem.sinks)


def with_threads(
    counts: Sequence[int], backend: AttentionBackend, problem: Problem, cache: Tensor
) -> list[Tensor]:
    """Call `attend` with that many torch threads each, then restore the number of threads."""
    before, results = torch.get_num_threads(), []
    try:
        for count in counts:
            torch.set_num_threads(count)
            results.append(attend(backend, problem, cache))
    finally:
        torch.set_num_threads(before)
    return results


def dense(problem: Problem) -> Tensor:
    """Compute attention sequence by sequence in float64, straight from its definition."""
    case, results, query_end, key_end = problem.case, [], 0, 0
    per_key = case.num_heads // case.num_kv_heads
    for query_len, seq_len in case.lens:
        query_end, key_end = query_end + query_len, key_end + seq_len
        query = problem.query[query_end - query_len : query_end].double()
        key = problem.key[key_end - seq_len : key_end].double().repeat_interleave(per_key, dim=1)
        value = (
            problem.value[key_end - seq_len : key_end].double().repeat_interleave(per_key, dim=1)
        )
        logits = torch.einsum("qhd,khd->hqk", query, key) * case.shape.scale
        if case.softcap is not None:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        queries = torch.arange(seq_len - query_len, seq_len)[:, None]
        keys = torch.arange(seq_len)[None]
        hidden = keys > queries
        if case.window is not None:
            size = case.window.size
            is_far = (keys // size < queries // size) if case.window.is_chunked else False
            hidden |= (queries - keys >= size) | is_far
        weights = logits.masked_fill(hidden.to(logits.device), -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if problem.sinks is not None:
            total = total + problem.sinks.double().exp()[:, None, None]
        results.append(torch.einsum("hqk,khd->qhd", weights / total, value))
    return torch.cat(results)
