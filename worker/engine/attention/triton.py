"""Paged attention by a Triton kernel of ours: no wheel needed, any block size, prefill and decode in one launch.

The launch depends only on maxima that the host knows (padded tokens, sequences, the longest context), and
lengths are read on the device, so a captured CUDA graph stays right for every batch that fits it.
Blocks are `[kv_head, token, head_dim]`: what one program reads of a block is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from worker.engine.attention.base import AttentionBackend, AttentionMetadata, AttentionShape
from worker.engine.attention.triton_kernels import attend_kernel, fold_kernel, write_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
MAX_HEAD_DIM = 256
MAX_PARTIAL_BYTES = 64 << 20  # of split-KV results
MAX_SPLITS = 64  # what the kernel that folds them takes
TOKENS_A_SPLIT = 256  # a shorter share of a context does not pay for its second pass
TOKENS_A_LONG_SPLIT = 1024  # nor does this, where there is work enough without
LONGEST_SHARE = 2048  # that a program goes through alone while others have long been done
PROGRAMS_A_MULTIPROCESSOR = 2
MOST_PROGRAMS_A_MULTIPROCESSOR = 32  # of long contexts: those of short ones are started too, and have nothing to do
NUM_STAGES = 3  # at 2, a tile is loaded once the one before has been used


@dataclass(frozen=True, slots=True)
class Launch:
    """How one call is cut up. A program takes `block_rows` rows: query tokens × the heads of a group."""

    block_rows: int
    block_tokens: int
    tile_keys: int
    num_programs: int  # of each of the cache's heads and each split
    num_splits: int
    least_tiles: int  # of a split
    is_decode: bool
    num_warps: int
    num_stages: int


def plan_launch(
    shape: AttentionShape,
    metadata: AttentionMetadata,
    num_tokens: int,
    *,
    element_size: int,
    num_multiprocessors: int,
    has_warp_groups: bool,
    is_exact: bool,
) -> Launch:
    """Few, wide programs for prompts; narrow ones for decodes. Contexts are split where those are too few, and where
    some are long: others may be short, and a step waits for the longest.

    Sizes are chosen from what the compiler reports for compute capability 8.0 and 9.0: no register spills, loads of
    keys and values a tile ahead, shared memory that each device has. An H200's multiprocessor runs one program of a
    prompt's 128 rows, and three of a decode's.
    """
    group = shape.num_heads // shape.num_kv_heads
    rows = max(16, triton.next_power_of_2(group))
    is_decode = metadata.max_query_len == 1
    if not is_decode:  # long chunks fill wide tiles; a mix of many decodes with a chunk would waste them
        rows = max(rows, 128 if num_tokens >= 64 * metadata.num_seqs and shape.head_dim <= 128 else 64)
    head_pad = max(16, triton.next_power_of_2(shape.head_dim))
    tile_bytes = 16384 if is_decode or has_warp_groups else 8192
    tile_keys = max(16, min(128 if is_decode else 64, tile_bytes // (head_pad * max(element_size, 2))))  # 8 bits: as 16
    if is_exact:  # float32 without tensor cores: registers bound the tile
        rows = max(16, triton.next_power_of_2(group))
        tile_keys = max(16, min(32, 2048 // head_pad))
    block_tokens = rows // group
    num_programs = metadata.num_seqs if is_decode else num_tokens // block_tokens + metadata.num_seqs
    programs = max(1, num_programs * shape.num_kv_heads)
    reach = metadata.max_seq_len
    if metadata.window is not None:
        reach = min(reach, metadata.window + min(block_tokens, metadata.max_query_len))
    room = MAX_PARTIAL_BYTES // max(num_tokens * shape.num_heads * head_pad * 4, 1)
    num_splits, tokens_a_split = _split(reach, programs, num_multiprocessors, is_alone=metadata.num_seqs == 1)
    return Launch(
        block_rows=rows,
        block_tokens=block_tokens,
        tile_keys=tile_keys,
        num_programs=num_programs,
        num_splits=max(1, min(num_splits, room, MAX_SPLITS)),
        least_tiles=-(-tokens_a_split // tile_keys),
        is_decode=is_decode,
        num_warps=8 if rows * head_pad >= 64 * 64 or (is_exact and head_pad > 128) else 4,
        num_stages=NUM_STAGES,
    )


def _split(reach: int, programs: int, num_multiprocessors: int, *, is_alone: bool) -> tuple[int, int]:
    """Into how many parts contexts of up to `reach` tokens are cut, and the fewest tokens of a part.

    `programs` are those of a split. Who is alone in its step waits for no longer context than its own.
    """
    to_fill = -(-PROGRAMS_A_MULTIPROCESSOR * num_multiprocessors // programs)
    to_shorten = min(-(-reach // LONGEST_SHARE), MOST_PROGRAMS_A_MULTIPROCESSOR * num_multiprocessors // programs)
    if to_shorten > to_fill and not is_alone:
        return to_shorten, TOKENS_A_LONG_SPLIT
    return min(to_fill, -(-reach // TOKENS_A_SPLIT)), TOKENS_A_SPLIT


def fold_warps(head_pad: int) -> int:
    """So that a row's splits fit in registers."""
    return 4 if head_pad <= 128 else 8


class TritonAttention(AttentionBackend):
    """Holds no state but what it knows of the device."""

    name = "triton"

    def __init__(self, num_multiprocessors: int | None = None) -> None:
        properties = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
        if num_multiprocessors is None:
            num_multiprocessors = properties.multi_processor_count if properties else 1
        self._num_multiprocessors = num_multiprocessors
        # Their products read shared memory, of which there is more too; elsewhere keys take registers on the way.
        self._has_warp_groups = properties is not None and properties.major in (9, 10)

    @classmethod
    def why_not(cls, device: torch.device, dtype: torch.dtype, shape: AttentionShape, block_size: int) -> str | None:
        if device.type != "cuda" and not is_interpreted():
            return f"Triton kernels do not run on {device.type}"
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8 and dtype == torch.bfloat16:
            return "bfloat16 needs compute capability 8.0"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9) and dtype.itemsize == 1:
            return "8-bit keys and values need compute capability 8.9"
        if device.type == "cpu" and dtype == torch.bfloat16:
            return "Triton's interpreter multiplies no bfloat16 matrices"
        if dtype not in DTYPES:
            return f"the Triton kernel does not take {dtype}"
        if shape.head_dim > MAX_HEAD_DIM:
            return f"the Triton kernel takes head sizes up to {MAX_HEAD_DIM}, not {shape.head_dim}"
        return None

    def block_shape(self, block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return num_kv_heads, block_size, head_dim

    def workspace_bytes(self, shape: AttentionShape, max_num_tokens: int, max_model_len: int, element_size: int) -> int:
        """Of split contexts: values, and a maximum and a sum beside at least 16 of them."""
        return MAX_PARTIAL_BYTES + MAX_PARTIAL_BYTES // 8

    def write(self, key: Tensor, value: Tensor, cache: Tensor, metadata: AttentionMetadata) -> None:
        write_blocks(key, value, cache, metadata, token_stride=cache.stride(3), head_stride=cache.stride(2))

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
        query = _rows(query)
        num_tokens = query.shape[0]
        new = torch.zeros if _has_rows_of_nobody(metadata, num_tokens) else torch.empty
        out = new(query.shape, dtype=query.dtype, device=query.device)
        launch = plan_launch(
            shape,
            metadata,
            num_tokens,
            element_size=cache.element_size(),
            num_multiprocessors=self._num_multiprocessors,
            has_warp_groups=self._has_warp_groups,
            is_exact=cache.dtype == torch.float32,
        )
        head_pad = max(16, triton.next_power_of_2(shape.head_dim))
        partials, limits = _partials(query, launch.num_splits, head_pad)
        grid = (launch.num_programs, shape.num_kv_heads, launch.num_splits)
        attend_kernel[grid](
            query,
            cache,
            out if partials is None else partials,
            limits,
            sinks,
            metadata.block_table,
            metadata.query_start,
            metadata.seq_lens,
            shape.scale,
            shape.softcap or 0.0,
            metadata.num_seqs,
            num_tokens,
            query.stride(0),
            query.stride(1),
            cache.stride(0),
            cache.stride(1),
            metadata.block_table.stride(0),
            launch.least_tiles,
            NUM_HEADS=shape.num_heads,
            GROUP=shape.num_heads // shape.num_kv_heads,
            HEAD_DIM=shape.head_dim,
            HEAD_PAD=head_pad,
            BLOCK_SIZE=metadata.block_size,
            WINDOW=metadata.window or 0,
            HAS_SOFTCAP=bool(shape.softcap),
            HAS_SINKS=sinks is not None,
            BLOCK_ROWS=launch.block_rows,
            BLOCK_TOKENS=launch.block_tokens,
            TILE_KEYS=launch.tile_keys,
            IS_SPLIT=partials is not None,
            IS_DECODE=launch.is_decode,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
        if partials is not None:
            fold_kernel[(num_tokens, shape.num_heads)](
                partials,
                limits,
                sinks,
                out,
                num_tokens,
                launch.num_splits,
                NUM_HEADS=shape.num_heads,
                HEAD_DIM=shape.head_dim,
                HEAD_PAD=head_pad,
                HAS_SINKS=sinks is not None,
                MAX_SPLITS=MAX_SPLITS,
                num_warps=fold_warps(head_pad),
            )
        return out


def write_blocks(
    key: Tensor, value: Tensor, cache: Tensor, metadata: AttentionMetadata, *, token_stride: int, head_stride: int
) -> None:
    """Store keys and values `[num_tokens, num_kv_heads, head_dim]`, whichever way tokens and heads lie in a block."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    key, value = _rows(key), _rows(value)
    tokens = 4 if num_tokens <= 256 else 16  # of one program: enough programs for decodes, wide ones for prompts
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
    """Does this process run Triton kernels in Python (TRITON_INTERPRET=1)?"""
    return not isinstance(attend_kernel, triton.runtime.JITFunction)


def _has_rows_of_nobody(metadata: AttentionMetadata, num_tokens: int) -> bool:
    """Rows of padding, which no program writes. In a graph the lengths are not known here: there each row of a decode
    is some sequence's, and a mixed step may be padded."""
    if metadata.query_lens_host:
        return sum(metadata.query_lens_host) != num_tokens
    return metadata.max_query_len != 1


def _partials(query: Tensor, num_splits: int, head_pad: int) -> tuple[Tensor | None, Tensor | None]:
    """Split-KV results: values [splits, num_tokens, num_heads, head_pad], and maximum and sum of each row.

    A sum of zeros says that a split saw nothing, so only the sums need a first value.
    """
    if num_splits == 1:
        return None, None
    size = (num_splits, query.shape[0], query.shape[1])
    values = torch.empty((*size, head_pad), dtype=torch.float32, device=query.device)
    return values, torch.zeros((2, *size), dtype=torch.float32, device=query.device)


def _rows(x: Tensor) -> Tensor:
    """A head's dimensions together; tokens and heads may lie in any order, as projections leave them."""
    return x if x.stride(2) == 1 else x.contiguous()
