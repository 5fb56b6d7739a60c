"""Paged attention by a Triton kernel: any block size, prefill and decode in one launch.

It needs no wheel beside Triton. The launch depends only on maxima that the host has (padded tokens,
sequences, the longest context). The kernel reads the lengths on the device and divides the work by
them, so a captured CUDA graph stays right for every batch that fits it. Blocks are
`[kv_head, token, head_dim]`: the part of a block that one program reads is contiguous.

A decode with a common prefix takes two launches, as in Hydragen and cascade attention: one attends
to the prefix with the queries of all sequences, the other to what follows it, and adds the results.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tokenmill_worker.engines.own.attention.base import (
    AttentionBackend,
    AttentionMetadata,
    AttentionShape,
    CommonPrefix,
)
from tokenmill_worker.engines.own.cuda.attention.launch_plan import (
    MAX_COUNTERS,
    MAX_PARTIAL_BYTES,
    Launch,
    fold_sizes,
    plan_launch,
)
from tokenmill_worker.engines.own.cuda.attention.triton_kernels import attend_kernel
from tokenmill_worker.engines.own.cuda.attention.write_kernel import write_kernel
from tokenmill_worker.engines.own.cuda.overlap import overlap_of

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
MAX_HEAD_DIM = 256
MAX_PREFIX_BYTES = 32 << 20  # of results over a common prefix; larger decodes ignore it


class PrefixResults(NamedTuple):
    """Attention of a decode's queries over a common prefix, and which sequences begin with it."""

    values: Tensor  # float32 [num_tokens, num_heads, head_dim]
    sums: Tensor  # float32 [num_tokens, num_heads]: logarithms, base 2, of the weights' sums
    lens: Tensor  # int32 [num_seqs]: the prefix's tokens, or 0


class TritonAttention(AttentionBackend):
    """Attention by the Triton kernels; keeps the device's properties, and counters of splits."""

    name = "triton"
    takes_prefixes = True

    def __init__(self, num_multiprocessors: int | None = None) -> None:
        properties = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
        if num_multiprocessors is None:
            num_multiprocessors = properties.multi_processor_count if properties else 1
        self._num_multiprocessors = num_multiprocessors
        # Warp groups multiply from shared memory, which is larger here too; other devices load keys
        # to registers.
        self._has_warp_groups = properties is not None and properties.major in (9, 10)
        self._counters: dict[torch.device, Tensor] = {}

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int
    ) -> str | None:
        if device.type != "cuda" and not is_interpreted():
            return f"Triton kernels do not run on {device.type}"
        if (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device)[0] < 8
            and dtype == torch.bfloat16
        ):
            return "bfloat16 needs compute capability 8.0"
        if (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) < (8, 9)
            and dtype.itemsize == 1
        ):
            return "8-bit keys and values need compute capability 8.9"
        if dtype.itemsize == 1 and shape.head_dim % 2:
            return f"8-bit values are read in pairs, and the head size {shape.head_dim} is odd"
        if device.type == "cpu" and dtype == torch.bfloat16:
            return "Triton's interpreter multiplies no bfloat16 matrices"
        if dtype not in DTYPES:
            return f"the Triton kernel does not take {dtype}"
        if shape.head_dim > MAX_HEAD_DIM:
            return f"the Triton kernel takes head sizes up to {MAX_HEAD_DIM}, not {shape.head_dim}"
        return None

    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_kv_heads, block_size, head_dim

    def workspace_bytes(
        self, shape: AttentionShape, max_num_tokens: int, max_model_len: int, element_size: int
    ) -> int:
        """Return the size of split results and of a common prefix's, with a maximum and a sum per
        row of at least 16 values, and of the counters.
        """
        prefix = min(MAX_PREFIX_BYTES, 4 * max_num_tokens * shape.num_heads * shape.head_dim)
        return (MAX_PARTIAL_BYTES + prefix) * 9 // 8 + 4 * MAX_COUNTERS

    def write(self, key: Tensor, value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        write_blocks(
            key, value, cache, metadata, token_stride=cache.stride(3), head_stride=cache.stride(2)
        )

    def token_and_head_strides(self, cache: Tensor) -> tuple[int, int]:
        return cache.stride(3), cache.stride(2)

    def attend(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        query, num_tokens = _rows(query), query.shape[0]
        prefix = None
        if metadata.prefix is not None and 4 * query.numel() <= MAX_PREFIX_BYTES:
            prefix = self._attend_prefix(query, cache, metadata, metadata.prefix, shape)
        new = torch.zeros if _may_have_padding(metadata, num_tokens) else torch.empty
        out = new(query.shape, dtype=query.dtype, device=query.device)
        self._launch(query, cache, metadata, shape, out, sinks=sinks, prefix=prefix)
        return out

    def _attend_prefix(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        common: CommonPrefix,
        shape: AttentionShape,
    ) -> PrefixResults:
        """Attend to the common prefix with the queries of all sequences, as if they were one's.

        Sequences that do not begin with it are computed too, and their results not used.
        """
        values, sums = (
            torch.empty(size, dtype=torch.float32, device=query.device)
            for size in (query.shape, query.shape[:2])
        )
        step = replace(
            metadata,
            query_start=common.bounds[:2],
            seq_lens=common.bounds[2:],
            block_table=common.block_table[None],
            max_query_len=query.shape[0],
        )
        self._launch(query, cache, step, shape, values, sums=sums)
        return PrefixResults(values, sums, common.lens)

    def _launch(
        self,
        query: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
        prefix: PrefixResults | None = None,
        sums: Tensor | None = None,
    ) -> None:
        """Launch the kernel: with `prefix` its results are added; with `sums`, which it fills, they
        are computed.
        """
        window = metadata.window
        launch = plan_launch(
            shape,
            metadata,
            query.shape[0],
            element_size=cache.element_size(),
            num_multiprocessors=self._num_multiprocessors,
            has_warp_groups=self._has_warp_groups,
            is_exact=cache.dtype == torch.float32,
        )
        head_pad = max(16, triton.next_power_of_2(shape.head_dim))
        group = shape.num_heads // shape.num_kv_heads
        partials, limits, counters = self._split_results(launch, shape, head_pad, query)
        fold_rows, fold_splits = fold_sizes(launch.block_tokens * group, head_pad)
        values, prefix_sums, prefix_lens = prefix or (None, sums, None)
        attend_kernel[(launch.num_programs * shape.num_kv_heads,)](
            query,
            cache,
            out,
            partials,
            limits,
            counters,
            sinks,
            values,
            prefix_sums,
            prefix_lens,
            metadata.block_table,
            metadata.query_start,
            metadata.seq_lens,
            shape.scale,
            shape.softcap or 0.0,
            metadata.num_seqs,
            query.stride(0),
            query.stride(1),
            cache.stride(0),
            cache.stride(1),
            metadata.block_table.stride(0),
            launch.least_tiles,
            NUM_HEADS=shape.num_heads,
            GROUP=group,
            HEAD_DIM=shape.head_dim,
            HEAD_PAD=head_pad,
            BLOCK_SIZE=metadata.block_size,
            WINDOW=window.size if window else 0,
            IS_CHUNKED=window is not None and window.is_chunked,
            HAS_SOFTCAP=bool(shape.softcap),
            HAS_SINKS=sinks is not None,
            IS_PREFIX=sums is not None,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_TOKENS=launch.block_tokens,
            TILE_KEYS=launch.tile_keys,
            IS_SPLIT=launch.is_split,
            IS_DECODE=launch.is_decode,
            FOLD_ROWS=fold_rows,
            FOLD_SPLITS=fold_splits,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **overlap_of(query.device),
        )

    def _split_results(
        self, launch: Launch, shape: AttentionShape, head_pad: int, query: Tensor
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        """Return memory for split results, and the counters, which are 0 between launches.

        The first call allocates the counters. It runs before any graph is captured, so they belong
        to no graph's memory.
        """
        device = query.device
        if device not in self._counters:
            self._counters[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
        if not launch.is_split:
            return None, None, None
        rows = launch.block_tokens * shape.num_heads // shape.num_kv_heads
        size = (launch.num_programs, shape.num_kv_heads, rows)
        partials = torch.empty((*size, head_pad), dtype=torch.float32, device=device)
        limits = torch.empty((*size, 2), dtype=torch.float32, device=device)
        return partials, limits, self._counters[device]


def write_blocks(
    key: Tensor,
    value: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    *,
    token_stride: int,
    head_stride: int,
) -> None:
    """Store keys and values `[num_tokens, num_kv_heads, head_dim]`, for any order of tokens and
    heads in a block.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    key, value = _rows(key), _rows(value)
    # per program: enough programs for decodes, wide ones for prompts
    tokens = 4 if num_tokens <= 256 else 16
    write_kernel[(-(-num_tokens // tokens), num_kv_heads)](
        key,
        value,
        cache,
        metadata.slot_mapping,
        num_tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.stride(0),
        cache.stride(1),
        token_stride,
        head_stride,
        BLOCK_SIZE=metadata.block_size,
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        TOKENS=tokens,
    )


def is_interpreted() -> bool:
    """Return whether this process runs Triton kernels in Python (TRITON_INTERPRET=1)."""
    return not isinstance(attend_kernel, triton.runtime.JITFunction)


def _may_have_padding(metadata: AttentionMetadata, num_tokens: int) -> bool:
    """Return whether there may be rows of padding, which no program writes.

    The host does not know the lengths of a step in a graph. In its decodes each row belongs to a
    sequence; its mixed steps may have padding.
    """
    if metadata.query_lens_host:
        return sum(metadata.query_lens_host) != num_tokens
    return metadata.max_query_len != 1


def _rows(x: Tensor) -> Tensor:
    """Make the dimensions of a head contiguous; tokens and heads keep their strides."""
    return x if x.stride(2) == 1 else x.contiguous()
