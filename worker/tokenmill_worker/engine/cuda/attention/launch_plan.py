"""Plans a launch of the Triton attention kernel: tiles, programs, and how contexts are split."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from tokenmill_worker.engine.attention.base import AttentionMetadata, AttentionShape

MAX_PARTIAL_BYTES = 64 << 20  # values of split results
MAX_SPLITS = 64  # most that the fold kernel takes
TOKENS_A_SPLIT = 256  # a shorter split does not pay for the fold kernel
TOKENS_A_SHORT_SPLIT = 128  # of a decode that would leave multiprocessors idle with longer ones
TOKENS_A_LONG_SPLIT = 1024  # the same, where the device is full without splits
LONGEST_SHARE = 2048  # most tokens of one program while programs of shorter contexts have finished
PROGRAMS_A_MULTIPROCESSOR = 2
# with split long contexts; splits of short contexts start too and return at once
MOST_PROGRAMS_A_MULTIPROCESSOR = 32
NUM_STAGES = 3  # with 2, a tile's load starts only after the tile before it was used


@dataclass(frozen=True, slots=True)
class Launch:
    """Grid and tile sizes of one call; a program computes `block_rows` rows (query tokens × group
    heads).
    """

    block_rows: int
    block_tokens: int
    tile_keys: int
    num_programs: int  # for each head of the cache and each split
    num_splits: int
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

    Contexts are split where there are too few programs. They are also split where some are long:
    the others may be short, and a step takes as long as its longest context.

    Sizes are chosen from what the compiler reports for compute capability 8.0 and 9.0: no register
    spills, loads of keys and values one tile ahead, and shared memory that each device has. A
    multiprocessor of an H200 runs one prefill program of 128 rows, or three decode programs.
    """
    group = shape.num_heads // shape.num_kv_heads
    rows = max(16, triton.next_power_of_2(group))
    is_decode = metadata.max_query_len == 1
    if (
        not is_decode
    ):  # long chunks fill wide tiles; a mix of many decodes with a chunk would waste them
        rows = max(
            rows, 128 if num_tokens >= 64 * metadata.num_seqs and shape.head_dim <= 128 else 64
        )
    head_pad = max(16, triton.next_power_of_2(shape.head_dim))
    tile_bytes = 16384 if is_decode or has_warp_groups else 8192
    tile_keys = max(
        16, min(128 if is_decode else 64, tile_bytes // (head_pad * max(element_size, 2)))
    )  # 8 bits: as 16
    if is_exact:  # float32 without tensor cores: registers bound the tile
        rows = max(16, triton.next_power_of_2(group))
        tile_keys = max(16, min(32, 2048 // head_pad))
    block_tokens = rows // group
    num_programs = (
        metadata.num_seqs if is_decode else num_tokens // block_tokens + metadata.num_seqs
    )
    programs = max(1, num_programs * shape.num_kv_heads)
    reach = metadata.max_seq_len
    if metadata.window is not None:
        reach = min(reach, metadata.window + min(block_tokens, metadata.max_query_len))
    room = MAX_PARTIAL_BYTES // max(num_tokens * shape.num_heads * head_pad * 4, 1)
    num_splits, tokens_a_split = _split(
        reach, programs, num_multiprocessors,
        is_alone=metadata.num_seqs == 1, is_decode=is_decode,
    )  # fmt: skip
    return Launch(
        block_rows=rows,
        block_tokens=block_tokens,
        tile_keys=tile_keys,
        num_programs=num_programs,
        num_splits=max(1, min(num_splits, room, MAX_SPLITS)),
        least_tiles=-(-tokens_a_split // tile_keys),
        is_decode=is_decode,
        num_warps=8 if rows * head_pad >= 64 * (128 if is_exact else 64) else 4,
        num_stages=NUM_STAGES,
    )


def _split(
    reach: int, programs: int, num_multiprocessors: int, *, is_alone: bool, is_decode: bool
) -> tuple[int, int]:
    """Return the number of splits for contexts of up to `reach` tokens, and the fewest tokens of a
    split.

    `programs` is the number of programs per split. The kernel divides each context's own length, so
    shorter ones use fewer splits. A sequence that is alone in its step has no shorter contexts
    beside it, so it is not split any further than it takes to fill the device.
    """
    wanted = PROGRAMS_A_MULTIPROCESSOR * num_multiprocessors
    to_fill = max(1, (wanted + programs // 2) // programs)  # rounded: nearly full needs no fold
    to_shorten = min(
        -(-reach // LONGEST_SHARE), MOST_PROGRAMS_A_MULTIPROCESSOR * num_multiprocessors // programs
    )
    if is_alone:
        to_shorten = 1
    if to_fill == 1:
        return max(1, to_shorten), TOKENS_A_LONG_SPLIT
    tokens = TOKENS_A_SPLIT
    if is_decode and programs * -(-reach // tokens) < wanted:
        tokens = TOKENS_A_SHORT_SPLIT
    return max(min(to_fill, -(-reach // tokens)), to_shorten), tokens


def fold_warps(head_pad: int) -> int:
    """Return the warps of the fold kernel, so that a row's splits fit in registers."""
    return 4 if head_pad <= 128 else 8
