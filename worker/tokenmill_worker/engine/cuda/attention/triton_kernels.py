"""Triton kernels of paged attention: attend, and fold the results of splits.

Nothing outside a row's visible positions is ever loaded, so the contents of unused slots cannot
leak, not even NaN.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from tokenmill_worker.engine.cuda.attention.tile_kernels import (
    LOG2_E,
    attend_tiles,
    prepare_queries,
)


@triton.jit
def find_sequence(query_start, num_seqs, program, BLOCK_TOKENS: tl.constexpr):
    """Find the sequence of block `program` of query tokens; sequence i has the blocks from start_i
    // T + i on.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first = tl.load(query_start + middle) // BLOCK_TOKENS + middle
        if first <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def place_of(query_start, num_seqs, BLOCK_TOKENS: tl.constexpr, IS_DECODE: tl.constexpr):
    """Return a program's sequence, its first query row, its number of queries, and the program's
    first query.
    """
    program = (
        tl.num_programs(0) - 1 - tl.program_id(0)
    )  # a prompt's last tokens see the most keys, so they start first
    seq = program if IS_DECODE else find_sequence(query_start, num_seqs, program, BLOCK_TOKENS)
    start = tl.load(query_start + seq)
    query_len = tl.load(query_start + seq + 1) - start
    first_token = 0 if IS_DECODE else (program - (start // BLOCK_TOKENS + seq)) * BLOCK_TOKENS
    return seq, start, query_len, first_token


@triton.jit
def tiles_to_visit(
    first_position,
    end,
    least_tiles,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Return the first key and the range of key tiles that a block's rows see.

    Its rows see the keys [begin, end). A split takes a share of the tiles: at least `least_tiles`,
    as long as any are left.
    """
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0)
    first_tile = begin // TILE_KEYS
    last_tile = tl.cdiv(end, TILE_KEYS)
    if IS_SPLIT:
        share = tl.maximum(tl.cdiv(last_tile - first_tile, tl.num_programs(2)), least_tiles)
        first_tile += tl.program_id(2) * share
        last_tile = tl.minimum(first_tile + share, last_tile)
    return begin, first_tile, last_tile


@triton.jit
def store_no_partials(limits, row_at, is_row, num_tokens, NUM_HEADS: tl.constexpr):
    """Store that a split has nothing to fold: a sum of 0."""
    rows_of_split = num_tokens.to(tl.int64) * NUM_HEADS
    row_at += (tl.num_programs(2) + tl.program_id(2)) * rows_of_split
    tl.store(limits + row_at, tl.zeros_like(row_at).to(tl.float32), mask=is_row)


@triton.jit
def store_partials(
    partials,
    limits,
    row_at,
    dims,
    is_row,
    largest,
    total,
    values,
    num_tokens,
    NUM_HEADS: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    """Store a split's result: maxima, then the sums of all splits behind all maxima, and
    unnormalised values.
    """
    rows_of_split = num_tokens.to(tl.int64) * NUM_HEADS
    row_at += tl.program_id(2) * rows_of_split
    tl.store(limits + row_at, largest, mask=is_row)
    tl.store(limits + tl.num_programs(2) * rows_of_split + row_at, total, mask=is_row)
    tl.store(partials + row_at[:, None] * HEAD_PAD + dims[None, :], values, mask=is_row[:, None])


@triton.jit
def store_rows(
    out,
    sinks,
    row_at,
    head,
    dims,
    is_row,
    largest,
    total,
    values,
    HEAD_DIM: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        grown = tl.maximum(largest, sink)
        shrink = tl.exp2(largest - grown)
        total = total * shrink + tl.exp2(sink - grown)
        values = values * shrink[:, None]
    values = values / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(
        out + row_at[:, None] * HEAD_DIM + dims[None, :], values.to(out.dtype.element_ty), mask=mask
    )


# Triton would otherwise compile a 1 into the kernel as a constant, and build the kernel again for
# other values. A step's inputs arrive in one copy, so the alignment of each changes from step to
# step: no builds for that either. The width of the block table changes too, since it grows with the
# longest sequence.
@triton.jit(
    do_not_specialize=["num_seqs", "num_tokens", "table_stride", "least_tiles"],
    do_not_specialize_on_alignment=["block_table", "query_start", "seq_lens"],
)
def attend_kernel(
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    cache,  # the layer's view; keys of block b at b · block_stride, values value_offset further
    out,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    partials,  # with splits: float32 [splits, num_tokens, NUM_HEADS, HEAD_PAD]
    limits,  # with splits: [2, splits, num_tokens, NUM_HEADS], maxima and sums
    sinks,
    block_table,
    query_start,
    seq_lens,
    scale,
    softcap,
    num_seqs,
    num_tokens,
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
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_DECODE: tl.constexpr,  # each sequence has one token at most, and one program
):
    kv_head = tl.program_id(1)
    seq, start, query_len, first_token = place_of(query_start, num_seqs, BLOCK_TOKENS, IS_DECODE)
    if first_token >= query_len:
        return
    base = tl.load(seq_lens + seq) - query_len  # position of the sequence's first query
    end = base + tl.minimum(first_token + BLOCK_TOKENS, query_len)
    begin, first_tile, last_tile = tiles_to_visit(
        base + first_token, end, least_tiles, WINDOW, TILE_KEYS, IS_SPLIT
    )

    # Row r: query token r // GROUP of the block, query head r % GROUP of the group.
    rows = tl.arange(0, BLOCK_ROWS)
    token = first_token + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_TOKENS * GROUP) & (token < query_len)
    row_at = (start + token).to(tl.int64) * NUM_HEADS + head
    if IS_SPLIT and first_tile >= last_tile:
        store_no_partials(limits, row_at, is_row, num_tokens, NUM_HEADS)
        return

    dims = tl.arange(0, HEAD_PAD)
    is_dim = dims < HEAD_DIM
    query_at = (start + token).to(tl.int64) * query_stride + head.to(tl.int64) * query_head_stride
    queries = tl.load(
        query + query_at[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0
    )
    queries, factor = prepare_queries(queries, cache, scale, HAS_SOFTCAP)

    IS_PAIRED: tl.constexpr = cache.dtype.element_ty == tl.float8e4nv
    largest = tl.full([BLOCK_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    values = tl.zeros([BLOCK_ROWS, HEAD_PAD // 2 if IS_PAIRED else HEAD_PAD], tl.float32)
    odds = tl.zeros_like(values)
    cache += kv_head * (BLOCK_SIZE * HEAD_DIM)
    block_table += seq.to(tl.int64) * table_stride
    full_tile = first_tile
    if WINDOW == 0:  # up to the tile of the block's own tokens, every row sees every key
        full_tile = tl.maximum(
            tl.minimum((base + first_token + 1) // TILE_KEYS, last_tile), first_tile
        )
        largest, total, values, odds = attend_tiles(
            queries, factor, cache, block_table, base + token, first_tile, full_tile, begin, end,
            largest, total, values, odds, softcap, block_stride, value_offset,
            HEAD_DIM, HEAD_PAD, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, TILE_KEYS, True,
        )  # fmt: skip
    largest, total, values, odds = attend_tiles(
        queries, factor, cache, block_table, base + token, full_tile, last_tile, begin, end,
        largest, total, values, odds, softcap, block_stride, value_offset,
        HEAD_DIM, HEAD_PAD, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, TILE_KEYS, False,
    )  # fmt: skip

    if IS_PAIRED:
        values = tl.interleave(values, odds)
    if IS_SPLIT and (tl.program_id(2) > 0 or last_tile * TILE_KEYS < end):
        store_partials(
            partials,
            limits,
            row_at,
            dims,
            is_row,
            largest,
            total,
            values,
            num_tokens,
            NUM_HEADS,
            HEAD_PAD,
        )
    else:
        store_rows(
            out, sinks, row_at, head, dims, is_row, largest, total, values, HEAD_DIM, HAS_SINKS
        )
        if IS_SPLIT:
            store_no_partials(limits, row_at, is_row, num_tokens, NUM_HEADS)


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def fold_kernel(
    partials,
    limits,
    sinks,
    out,
    num_tokens,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Fold the splits of one row per program.

    A split with a sum of 0 left its values unwritten: it saw no key, or wrote the row itself.
    """
    row = tl.program_id(0).to(tl.int64) * NUM_HEADS + tl.program_id(1)
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, HEAD_PAD)
    row_at = splits * num_tokens.to(tl.int64) * NUM_HEADS + row
    sums_at = num_splits * num_tokens.to(tl.int64) * NUM_HEADS + row_at
    sums = tl.load(limits + sums_at, mask=splits < num_splits, other=0.0)
    is_used = sums != 0.0
    if tl.max(sums, 0) == 0.0:
        return
    maxima = tl.load(limits + row_at, mask=is_used, other=float("-inf"))
    largest = tl.max(maxima, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + tl.program_id(1)).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2(maxima - shift)
    total = tl.sum(weights * sums, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - shift)
    values = tl.load(
        partials + row_at[:, None] * HEAD_PAD + dims[None, :], mask=is_used[:, None], other=0.0
    )
    result = tl.sum(values * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
