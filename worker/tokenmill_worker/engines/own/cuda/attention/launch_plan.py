"""Plans a launch of the Triton attention kernel: tiles, programs, and how contexts are split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton

from tokenmill_worker.engines.own.attention.base import AttentionMetadata, AttentionShape

MAX_PARTIAL_BYTES = 64 << 20  # values of split results
MAX_COUNTERS = 1 << 18  # of finished programs: one for each split block of query tokens and head
# Fewest tokens of a split: folding a shorter one takes longer than it saves.
TOKENS_A_SPLIT = 256
TOKENS_A_SHORT_SPLIT = 64  # in a decode
TOKENS_A_LONG_SPLIT = 512  # if the device is full without splits
LONGEST_SHARE = 2048  # longer contexts are split even if the device is full
# Programs that splits add for each multiprocessor, beside one for each block of query tokens.
PROGRAMS_A_MULTIPROCESSOR = 2
MOST_PROGRAMS_A_MULTIPROCESSOR = 4  # if there are many blocks
MANY_PROGRAMS_A_MULTIPROCESSOR = 3  # from this many on, a program of a decode has one warp
NUM_STAGES = 3  # with 2, a tile's load starts only after the tile before it was used


@dataclass(frozen=True, slots=True)
class Launch:
    """Grid and tile sizes of one call; a program computes `block_rows` rows (query tokens × group
    heads).
    """

    block_rows: int
    block_tokens: int
    tile_keys: int
    num_programs: int  # for each head of the cache
    is_split: bool
    least_tiles: int  # per split
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
    """Choose few, wide programs for prefill and narrow ones for decode, and decide on split
    contexts.
    """
    heads, group = shape.num_kv_heads, shape.num_heads // shape.num_kv_heads
    head_pad = max(16, triton.next_power_of_2(shape.head_dim))
    is_decode = metadata.max_query_len == 1
    rows = max(16, triton.next_power_of_2(group))
    if not is_decode and not is_exact:
        rows_a_multiprocessor = num_tokens * shape.num_heads / num_multiprocessors
        is_wide = has_warp_groups and element_size == 2 and rows_a_multiprocessor >= 256
        rows = max(rows, _prompt_rows(shape, num_tokens, metadata.num_seqs, is_wide=is_wide))
    block_tokens = 1 if is_decode else rows // group
    blocks = metadata.num_seqs if is_decode else num_tokens // block_tokens + metadata.num_seqs
    reach = metadata.max_seq_len
    if metadata.window is not None:
        reach = min(reach, metadata.window.size + min(block_tokens, metadata.max_query_len))
    spare, tokens_a_split = _split(
        reach, blocks, num_multiprocessors / heads,
        is_alone=metadata.num_seqs == 1, is_decode=is_decode,
    )  # fmt: skip
    bytes_a_program = heads * block_tokens * group * head_pad * 4
    room = min(MAX_PARTIAL_BYTES // bytes_a_program, MAX_COUNTERS // heads)
    spare = max(0, min(spare, room - blocks))
    if is_exact:  # float32 without tensor cores: registers bound the tile
        tile_keys, num_warps = min(32, 2048 // head_pad), 8 if rows * head_pad >= 8192 else 4
    elif is_decode and rows == 16:
        is_many = blocks * heads >= MANY_PROGRAMS_A_MULTIPROCESSOR * num_multiprocessors
        tile_keys, num_warps = _decode_tile(
            head_pad, element_size, is_split=spare > 0, is_many=is_many
        )
    else:
        tile_bytes = 16384 if is_decode or has_warp_groups else 8192
        tile_keys = min(128 if is_decode else 64, tile_bytes // (head_pad * 2))
        num_warps = 16 if rows == 256 else 8 if rows * head_pad >= 4096 else 4
    tile_keys = max(16, tile_keys)
    return Launch(
        block_rows=rows,
        block_tokens=block_tokens,
        tile_keys=tile_keys,
        num_programs=blocks + spare,
        is_split=spare > 0,
        least_tiles=-(-tokens_a_split // tile_keys),
        is_decode=is_decode,
        num_warps=num_warps,
        num_stages=NUM_STAGES,
    )


def _prompt_rows(shape: AttentionShape, num_tokens: int, num_seqs: int, *, is_wide: bool) -> int:
    """Return the rows of a program: many for long chunks, few if most sequences have one token.

    A program of 256 rows spills 100 bytes of registers a thread, and is still the fastest for long
    chunks, because the keys are read half as often as with 128 rows.
    """
    if num_tokens < 64 * num_seqs or shape.head_dim > 128:
        return 64
    return 256 if is_wide else 128


def _decode_tile(
    head_pad: int, element_size: int, *, is_split: bool, is_many: bool
) -> tuple[int, int]:
    """Return the keys of a tile and the number of warps: the fastest of those tried on an H100.

    A program of one warp never waits for another warp, but loads few bytes at once. It is used
    where many programs run on each multiprocessor, and none has a long context. The program of a
    short split has few tiles, and small ones start to be multiplied sooner; that of a whole context
    has large ones, since a step takes as long as the tiles of its longest context. Each warp takes
    at least 8 keys of a tile, as many as one instruction of tensor cores.
    """
    tile_bytes, num_warps = 16384, 4
    if is_split:
        tile_bytes = 8192
    elif is_many and head_pad <= 128:
        tile_bytes, num_warps = 4096, 1
    tile_keys = tile_bytes // (head_pad * element_size)
    return min(128, max(8 * num_warps, tile_keys)), num_warps


def _split(
    reach: int, blocks: int, multiprocessors_a_head: float, *, is_alone: bool, is_decode: bool
) -> tuple[int, int]:
    """Return how many programs splits add to the one of each block, and the fewest tokens of a
    split. `reach` is the longest context.

    Contexts are split if there are too few blocks of query tokens to fill the device. They are also
    split if the longest one is long: others may be short, and a step takes as long as its longest
    context. The kernel divides the contexts' real lengths, so equal contexts that fill the device
    stay whole.
    """
    few = math.ceil(PROGRAMS_A_MULTIPROCESSOR * multiprocessors_a_head)
    if 3 * blocks <= 2 * few:  # above, the device is nearly full: folding costs more than it gains
        tokens = TOKENS_A_SHORT_SPLIT if is_decode else TOKENS_A_SPLIT
        return (few if tokens < reach else 0), tokens
    if reach <= LONGEST_SHARE or is_alone:  # no program would wait for a longer one
        return 0, reach
    many = math.ceil(MOST_PROGRAMS_A_MULTIPROCESSOR * multiprocessors_a_head)
    return min(max(few, 2 * blocks), many), TOKENS_A_LONG_SPLIT


def fold_sizes(num_rows: int, head_pad: int) -> tuple[int, int]:
    """Return the rows and the splits whose results a folding program loads at once; they fit its
    registers.
    """
    rows = triton.next_power_of_2(num_rows)
    return rows, max(1, (8192 if head_pad <= 128 else 4096) // (rows * head_pad))
