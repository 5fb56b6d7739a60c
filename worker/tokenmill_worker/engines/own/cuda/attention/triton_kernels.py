"""The Triton kernel of paged attention.

Nothing outside a row's visible positions is ever loaded, so the contents of unused slots cannot
leak, not even NaN.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from tokenmill_worker.engines.own.cuda.attention.fold_kernels import (
    rows_of_block,
    store_rows,
    store_split,
)
from tokenmill_worker.engines.own.cuda.attention.split_kernels import divide_tiles, work_of
from tokenmill_worker.engines.own.cuda.attention.tile_kernels import (
    attend_tiles,
    first_visible,
    prepare_queries,
)
from tokenmill_worker.engines.own.cuda.overlap import start_next_kernel, wait_for_previous_kernel


@triton.jit
def attend_block(
    queries,
    factor,
    cache,
    block_table,
    position,
    first_position,
    first_tile,
    last_tile,
    begin,
    end,
    softcap,
    block_stride,
    value_offset,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_DECODE: tl.constexpr,
):
    """Attend to a range of tiles; return maxima, sums and values of the rows."""
    IS_PAIRED: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
    largest = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    HAS_FEW_ROWS: tl.constexpr = IS_DECODE and queries.shape[0] == 16
    total = tl.zeros(
        [queries.shape[0], TILE_KEYS] if HAS_FEW_ROWS else [queries.shape[0]], tl.float32
    )
    values = tl.zeros([queries.shape[0], HEAD_PAD // 2 if IS_PAIRED else HEAD_PAD], tl.float32)
    odds = tl.zeros_like(values)
    full_tile = first_tile
    # Every row sees every key before the block's own tokens: a first loop takes these tiles without
    # masks. A decode has at most one tile that is not full, so one loop is faster than two.
    if WINDOW == 0 and not IS_DECODE:
        full_tile = tl.maximum(tl.minimum((first_position + 1) // TILE_KEYS, last_tile), first_tile)
        largest, total, values, odds = attend_tiles(
            queries, factor, cache, block_table, position, first_tile, full_tile, begin, end,
            largest, total, values, odds, softcap, block_stride, value_offset,
            HEAD_DIM, HEAD_PAD, BLOCK_SIZE, WINDOW, IS_CHUNKED, HAS_SOFTCAP, TILE_KEYS, True,
        )  # fmt: skip
    largest, total, values, odds = attend_tiles(
        queries, factor, cache, block_table, position, full_tile, last_tile, begin, end,
        largest, total, values, odds, softcap, block_stride, value_offset,
        HEAD_DIM, HEAD_PAD, BLOCK_SIZE, WINDOW, IS_CHUNKED, HAS_SOFTCAP, TILE_KEYS, False,
    )  # fmt: skip
    if IS_PAIRED:
        values = tl.interleave(values, odds)
    if HAS_FEW_ROWS:
        total = tl.sum(total, 1)
    return largest, total, values


# Triton would otherwise compile a 1 into the kernel as a constant, and build the kernel again for
# other values. A step's inputs arrive in one copy, so the alignment of each changes from step to
# step: no builds for that either. The width of the block table changes too, since it grows with the
# longest sequence.
@triton.jit(
    do_not_specialize=["num_seqs", "table_stride", "least_tiles"],
    do_not_specialize_on_alignment=["block_table", "query_start", "seq_lens", "prefix_lens"],
)
def attend_kernel(
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    cache,  # the layer's view; keys of block b at b · block_stride, values value_offset further
    out,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    partials,  # with splits: float32 [programs, kv_heads, BLOCK_TOKENS · GROUP, HEAD_PAD]
    limits,  # with splits: [programs, kv_heads, BLOCK_TOKENS · GROUP, 2], maximum and sum
    counters,  # with splits: int32 [programs, kv_heads], 0 before and after
    sinks,
    prefix,  # results over a common prefix, to be added: float32 [num_tokens, NUM_HEADS, HEAD_DIM]
    prefix_sums,  # logarithms of their sums: float32 [num_tokens, NUM_HEADS]; IS_PREFIX stores them
    prefix_lens,  # int32 [num_seqs]: keys that these results are of, 0: none
    block_table,
    query_start,
    seq_lens,
    scale,
    softcap,
    num_seqs,
    query_stride,
    query_head_stride,
    block_stride,
    value_offset,
    table_stride,
    least_tiles,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_PREFIX: tl.constexpr,  # its queries have no keys: each sees all keys before the first one
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_DECODE: tl.constexpr,  # each sequence has one token at most
    FOLD_ROWS: tl.constexpr,  # a power of 2, at least BLOCK_TOKENS · GROUP
    FOLD_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend: a program takes a block of query tokens of one sequence, one head of the cache, and
    with splits a share of its keys.
    """
    KV_HEADS: tl.constexpr = NUM_HEADS // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    program = tl.program_id(0) // KV_HEADS
    start_next_kernel(OVERLAPS)
    seq, block, split, splits = work_of(
        query_start, seq_lens, prefix_lens, num_seqs, program, tl.num_programs(0) // KV_HEADS,
        least_tiles, BLOCK_TOKENS, WINDOW, TILE_KEYS, IS_SPLIT, IS_DECODE,
    )  # fmt: skip
    wait_for_previous_kernel(OVERLAPS)
    if seq < 0:
        return
    start = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - start
    base = tl.load(seq_lens + seq) - query_len  # position of the sequence's first query
    first_token = block * BLOCK_TOKENS
    if first_token >= query_len:
        return
    # The block's rows see the keys [begin, end).
    end = base + tl.minimum(first_token + BLOCK_TOKENS, query_len)
    first_position = base + first_token
    begin, prefix_len = 0, 0
    if IS_PREFIX:
        end, first_position = base, base - 1
    if prefix_lens is not None:
        prefix_len = tl.load(prefix_lens + seq)
        begin = prefix_len
    if WINDOW > 0:
        begin = tl.maximum(first_visible(first_position, WINDOW, IS_CHUNKED), 0)
    first_tile, last_tile, num_used = divide_tiles(
        begin // TILE_KEYS, tl.cdiv(end, TILE_KEYS), split, splits
    )
    if first_tile >= last_tile:
        return

    token, head, is_row = rows_of_block(
        kv_head, first_token, query_len, BLOCK_TOKENS, GROUP, BLOCK_ROWS
    )
    dims = tl.arange(0, HEAD_PAD)
    query_at = (start + token).to(tl.int64) * query_stride + head.to(tl.int64) * query_head_stride
    queries = tl.load(
        query + query_at[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    queries, factor = prepare_queries(queries, cache, scale, HAS_SOFTCAP)
    largest, total, values = attend_block(
        queries, factor, cache + kv_head * (BLOCK_SIZE * HEAD_DIM),
        block_table + seq.to(tl.int64) * table_stride, tl.minimum(base + token, end - 1),
        first_position, first_tile, last_tile, begin, end, softcap, block_stride, value_offset,
        HEAD_DIM, HEAD_PAD, BLOCK_SIZE, WINDOW, IS_CHUNKED, HAS_SOFTCAP, TILE_KEYS, IS_DECODE,
    )  # fmt: skip
    if not IS_SPLIT or num_used == 1:
        store_rows(
            out, sinks, prefix, prefix_sums, prefix_len, start + token, head, is_row,
            largest, total, values,
            NUM_HEADS, HEAD_DIM, HEAD_PAD, HAS_SINKS, IS_PREFIX,
        )  # fmt: skip
    else:
        store_split(
            out, partials, limits, counters, sinks, prefix, prefix_sums, prefix_len,
            program * KV_HEADS + kv_head, (program - split) * KV_HEADS + kv_head,
            start, kv_head, first_token, query_len, is_row, largest, total, values, num_used,
            NUM_HEADS, GROUP, HEAD_DIM, HEAD_PAD, HAS_SINKS, IS_PREFIX,
            BLOCK_TOKENS, FOLD_ROWS, FOLD_SPLITS,
        )  # fmt: skip
