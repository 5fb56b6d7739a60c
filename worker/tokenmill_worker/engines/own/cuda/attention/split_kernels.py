"""Triton functions that divide the blocks of query tokens, and their keys, among programs."""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

SEQS = tl.constexpr(32)  # lengths that a program loads at once: as many as a warp has threads
UNDIVIDED = tl.constexpr(1 << 30)  # tiles: more than any context has


@triton.jit
def blocks_and_tiles(
    query_start,
    seq_lens,
    prefix_lens,
    seq,
    num_seqs,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Return a sequence's blocks of query tokens, and the most tiles of keys that one of them sees
    beside a common prefix.

    `seq` may be a vector.
    """
    is_seq = seq < num_seqs
    start = tl.load(query_start + seq, mask=is_seq, other=0)
    query_len = tl.load(query_start + seq + 1, mask=is_seq, other=0) - start
    end = tl.load(seq_lens + seq, mask=is_seq, other=0)
    tiles = tl.cdiv(end, TILE_KEYS)
    if prefix_lens is not None:
        tiles -= tl.load(prefix_lens + seq, mask=is_seq, other=0) // TILE_KEYS
    if WINDOW > 0:
        tiles -= tl.maximum(end - BLOCK_TOKENS - WINDOW + 1, 0) // TILE_KEYS
    return tl.cdiv(query_len, BLOCK_TOKENS), tiles


@triton.jit
def share_of(
    query_start,
    seq_lens,
    prefix_lens,
    num_seqs,
    num_programs,
    least_tiles,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Return the most tiles that a program takes: at least `least_tiles`.

    The tiles of all blocks are divided by the number of programs beyond one for each block. So
    every block gets enough programs, whatever the lengths.
    """
    num_blocks, num_tiles = 0, 0
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        blocks, tiles = blocks_and_tiles(
            query_start, seq_lens, prefix_lens, first + tl.arange(0, SEQS), num_seqs,
            BLOCK_TOKENS, WINDOW, TILE_KEYS,
        )  # fmt: skip
        num_blocks += tl.sum(blocks, 0)
        num_tiles += tl.sum(blocks * tiles, 0)
    return tl.maximum(tl.cdiv(num_tiles, num_programs - num_blocks), least_tiles)


@triton.jit
def find_work(
    query_start,
    seq_lens,
    prefix_lens,
    num_seqs,
    program,
    num_programs,
    share,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Return a program's sequence (−1: none), its block of query tokens, its split, and how many
    splits that block has.

    All blocks of a sequence have as many splits as its last block needs for at most `share` tiles
    each. Programs with low numbers start first, so they take the split sequences, and of each
    sequence its last block first, which sees most keys.
    """
    num_split, num_whole, found, start_of_found = 0, 0, 0, 0
    for first in tl.range(0, num_seqs, SEQS, num_stages=1):
        seq = first + tl.arange(0, SEQS)
        blocks, tiles = blocks_and_tiles(
            query_start, seq_lens, prefix_lens, seq, num_seqs, BLOCK_TOKENS, WINDOW, TILE_KEYS
        )
        splits = tl.cdiv(tiles, share)
        programs = blocks * splits
        split = tl.where(splits > 1, programs, 0)
        whole = programs - split
        start = tl.where(
            splits > 1,
            num_split + tl.cumsum(split, 0) - split,
            num_programs - num_whole - tl.cumsum(whole, 0),
        )
        is_found = (start <= program) & (program < start + programs)
        found += tl.sum(tl.where(is_found, seq + 1, 0), 0)
        start_of_found += tl.sum(tl.where(is_found, start, 0), 0)
        num_split += tl.sum(split, 0)
        num_whole += tl.sum(whole, 0)
    seq = tl.maximum(found - 1, 0)
    blocks, tiles = blocks_and_tiles(
        query_start, seq_lens, prefix_lens, seq, num_seqs, BLOCK_TOKENS, WINDOW, TILE_KEYS
    )
    splits = tl.maximum(tl.cdiv(tiles, share), 1)
    place = program - start_of_found
    return found - 1, blocks - 1 - place // splits, place % splits, splits


@triton.jit
def work_of(
    query_start,
    seq_lens,
    prefix_lens,
    num_seqs,
    program,
    num_programs,
    least_tiles,
    BLOCK_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_DECODE: tl.constexpr,
):
    """Return a program's sequence (−1: none), its block of query tokens, its split, and how many
    splits that block has.

    In a decode without splits, program i takes sequence i.
    """
    seq, block, split, splits = program, 0, 0, 1
    if IS_SPLIT:
        share = share_of(
            query_start, seq_lens, prefix_lens, num_seqs, num_programs, least_tiles,
            BLOCK_TOKENS, WINDOW, TILE_KEYS,
        )  # fmt: skip
        seq, block, split, splits = find_work(
            query_start, seq_lens, prefix_lens, num_seqs, program, num_programs, share,
            BLOCK_TOKENS, WINDOW, TILE_KEYS,
        )  # fmt: skip
    elif not IS_DECODE:
        seq, block, split, splits = find_work(
            query_start, seq_lens, prefix_lens, num_seqs, program, num_programs, UNDIVIDED,
            BLOCK_TOKENS, WINDOW, TILE_KEYS,
        )  # fmt: skip
    return seq, block, split, splits


@triton.jit
def divide_tiles(first_tile, last_tile, split, splits):
    """Return a split's range of tiles, and how many splits have tiles; shares are equal."""
    tiles = last_tile - first_tile
    share = tl.cdiv(tiles, splits)
    first_tile += split * share
    return first_tile, tl.minimum(first_tile + share, last_tile), tl.cdiv(tiles, share)
