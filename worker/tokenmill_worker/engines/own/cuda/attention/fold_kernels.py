"""Triton functions that store the results of a program, and fold those of splits.

Each program of a split context stores its values, maxima and sums, then counts itself. The one that
counts last folds them in the order of the splits, so the result does not depend on which one it is.
No second kernel is launched.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from tokenmill_worker.engines.own.cuda.attention.tile_kernels import LOG2_E


@triton.jit
def rows_of_block(
    kv_head,
    first_token,
    query_len,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return each row's query token of the sequence, its head, and whether there is such a row.

    Row r has query token r // GROUP of the block, and query head r % GROUP of the group.
    """
    rows = tl.arange(0, ROWS)
    token = first_token + rows // GROUP
    is_row = (rows < BLOCK_TOKENS * GROUP) & (token < query_len)
    return token, kv_head * GROUP + rows % GROUP, is_row


@triton.jit
def add_logit(logit, largest, total, values):
    """Add a logit, in base 2, to each row; return its weights, and maxima, sums and values."""
    grown = tl.maximum(largest, logit)
    shrink = tl.exp2(largest - grown)
    weight = tl.exp2(logit - grown)
    return weight, grown, total * shrink + weight, values * shrink[:, None]


@triton.jit
def store_rows(
    out,
    sinks,
    prefix,
    prefix_sums,
    prefix_len,
    token,
    head,
    is_row,
    largest,
    total,
    values,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_PREFIX: tl.constexpr,
):
    """Divide values by their weights' sums, to which sinks add, and store them as results.

    The result over a common prefix counts as one key more: its logit is the logarithm of the
    prefix's sum, its value the prefix's result.
    """
    dims = tl.arange(0, HEAD_PAD)
    row_at = token.to(tl.int64) * NUM_HEADS + head
    result_at = row_at[:, None] * HEAD_DIM + dims[None, :]
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        _, largest, total, values = add_logit(sink, largest, total, values)
    if prefix is not None and prefix_len > 0:
        logit = tl.load(prefix_sums + row_at, mask=is_row, other=0.0)
        weight, largest, total, values = add_logit(logit, largest, total, values)
        values += weight[:, None] * tl.load(prefix + result_at, mask=mask, other=0.0)
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + result_at, (values / total[:, None]).to(out.dtype.element_ty), mask=mask)
    if IS_PREFIX:
        tl.store(prefix_sums + row_at, largest + tl.log2(total), mask=is_row)


@triton.jit
def store_partials(partials, limits, place, is_row, largest, total, values, NUM_ROWS: tl.constexpr):
    """Store a split's result: unnormalised values, and a maximum and a sum for each row."""
    at = place * NUM_ROWS + tl.arange(0, values.shape[0])
    dims = tl.arange(0, values.shape[1])
    tl.store(limits + 2 * at, largest, mask=is_row)
    tl.store(limits + 2 * at + 1, total, mask=is_row)
    tl.store(partials + at[:, None] * values.shape[1] + dims[None, :], values, mask=is_row[:, None])


@triton.jit
def is_last_to_finish(counter, num_used):
    """Count this program; the last one resets the count for the next launch."""
    tl.debug_barrier()  # all threads have stored
    is_last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_used - 1
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def fold_splits(
    partials,
    limits,
    first_place,
    stride,  # from a split's place to the next one's
    num_used,
    is_row,
    NUM_ROWS: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    SPLITS: tl.constexpr,  # loaded at once
):
    """Fold the results of splits, in their order: return maxima, sums and values of the rows.

    The loads bypass the multiprocessor's own cache, because other programs stored the results.
    """
    ROWS: tl.constexpr = is_row.shape[0]
    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_PAD)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    values = tl.zeros([ROWS, HEAD_PAD], tl.float32)
    for first in tl.range(0, num_used, SPLITS, num_stages=1):
        split = first + tl.arange(0, SPLITS)
        at = (first_place + split * stride)[None, :] * NUM_ROWS + rows[:, None]
        is_there = is_row[:, None] & (split < num_used)[None, :]
        maxima = tl.load(limits + 2 * at, mask=is_there, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(limits + 2 * at + 1, mask=is_there, other=0.0, cache_modifier=".cg")
        parts = tl.load(
            partials + at[:, :, None] * HEAD_PAD + dims[None, None, :],
            mask=is_there[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        grown = tl.maximum(largest, tl.max(maxima, 1))
        shift = tl.where(grown == float("-inf"), 0.0, grown)
        weights = tl.exp2(maxima - shift[:, None])
        shrink = tl.exp2(largest - shift)
        total = total * shrink + tl.sum(weights * sums, 1)
        values = values * shrink[:, None] + tl.sum(parts * weights[:, :, None], 1)
        largest = grown
    return largest, total, values


@triton.jit
def store_split(
    out,
    partials,
    limits,
    counters,
    sinks,
    prefix,
    prefix_sums,
    prefix_len,
    place,  # of this split's results
    first_place,  # of the results of the block's first split
    start,  # index of the sequence's first query token
    kv_head,
    first_token,
    query_len,
    is_row,
    largest,
    total,
    values,
    num_used,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_PREFIX: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    FOLD_ROWS: tl.constexpr,
    FOLD_SPLITS: tl.constexpr,
):
    """Store a split's results, and fold those of the block's splits if this one is the last."""
    NUM_ROWS: tl.constexpr = BLOCK_TOKENS * GROUP
    store_partials(partials, limits, place, is_row, largest, total, values, NUM_ROWS)
    if is_last_to_finish(counters + first_place, num_used):
        token, head, is_fold_row = rows_of_block(
            kv_head, first_token, query_len, BLOCK_TOKENS, GROUP, FOLD_ROWS
        )
        fold_largest, fold_total, fold_values = fold_splits(
            partials, limits, first_place, NUM_HEADS // GROUP, num_used, is_fold_row,
            NUM_ROWS, HEAD_PAD, FOLD_SPLITS,
        )  # fmt: skip
        store_rows(
            out, sinks, prefix, prefix_sums, prefix_len, start + token, head, is_fold_row,
            fold_largest, fold_total, fold_values,
            NUM_HEADS, HEAD_DIM, HEAD_PAD, HAS_SINKS, IS_PREFIX,
        )  # fmt: skip
