"""Triton functions that carry attention along tiles of keys.

Softmax runs in base 2 over float32; the maximum and the sum are carried along the keys. A tile that
every row sees whole needs no masks.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def blocks_of_tile(table, tile, begin, end, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Load the block id of each key of a tile, and 0 where there is no key; the tile may be out of
    range.
    """
    key_position = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    is_key = (key_position >= begin) & (key_position < end)
    return tl.load(table + key_position // BLOCK_SIZE, mask=is_key, other=0)


@triton.jit
def load_tile(
    at, is_key, is_dim, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr, IS_FULL: tl.constexpr
):
    """Load keys or values; where a tile is full and a head needs no padding, without a mask."""
    if not IS_FULL:
        tile = tl.load(at, mask=is_key & is_dim, other=0.0)
    elif HEAD_PAD != HEAD_DIM:
        tile = tl.load(at, mask=is_dim, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def logits_of_tile(
    queries,
    keys,
    position,
    key_position,
    is_key,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Compute logits in base 2; they are −∞ where a row does not see a key of a tile that is not
    full.
    """
    logits = tl.dot(queries, keys.to(queries.dtype), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        logits = softcap * (1.0 - 2.0 / (tl.exp2(logits * (2.0 * LOG2_E / softcap)) + 1.0))
    logits *= LOG2_E
    if not IS_FULL:
        is_seen = is_key[None, :] & (key_position[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (key_position[None, :] > position[:, None] - WINDOW)
        logits = tl.where(is_seen, logits, float("-inf"))
    return logits


@triton.jit
def weights_of(logits, largest, total):
    """Compute weights relative to the maximum so far, and the factor that rescales the earlier
    sums.
    """
    grown = tl.maximum(largest, tl.max(logits, 1))
    shift = tl.where(grown == float("-inf"), 0.0, grown)  # rows that have seen nothing yet
    weights = tl.exp2(logits - shift[:, None])
    shrink = tl.exp2(largest - shift)
    return weights, shrink, grown, total * shrink + tl.sum(weights, 1)


@triton.jit
def attend_tiles(
    queries,
    cache,
    block_table,
    position,  # of each row
    first_tile,
    last_tile,
    begin,
    end,
    largest,
    total,
    values,
    scale,
    softcap,
    block_stride,
    value_offset,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    IS_FULL: tl.constexpr,  # every row sees every key of every tile
):
    """Carry maxima, sums and values along a range of tiles."""
    dims = tl.arange(0, HEAD_PAD)
    is_dim = dims < HEAD_DIM
    # Block ids are loaded a tile ahead: the compiler divides the pipeline stages among loads that
    # depend on each other.
    next_block = blocks_of_tile(block_table, first_tile, begin, end, BLOCK_SIZE, TILE_KEYS)
    for tile in range(first_tile, last_tile):
        key_position = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        is_key = (key_position >= begin) & (key_position < end)
        block = next_block
        next_block = blocks_of_tile(block_table, tile + 1, begin, end, BLOCK_SIZE, TILE_KEYS)
        key_at = block.to(tl.int64) * block_stride + (key_position % BLOCK_SIZE) * HEAD_DIM
        at = cache + key_at[None, :] + dims[:, None]
        keys = load_tile(at, is_key[None, :], is_dim[:, None], HEAD_DIM, HEAD_PAD, IS_FULL)
        logits = logits_of_tile(
            queries, keys, position, key_position, is_key, scale, softcap, WINDOW, HAS_SOFTCAP,
            IS_FULL,
        )  # fmt: skip
        weights, shrink, largest, total = weights_of(logits, largest, total)
        at = cache + value_offset + key_at[:, None] + dims[None, :]
        loaded = load_tile(at, is_key[:, None], is_dim[None, :], HEAD_DIM, HEAD_PAD, IS_FULL)
        values = values * shrink[:, None] + tl.dot(
            weights.to(queries.dtype), loaded.to(queries.dtype), input_precision="ieee"
        )
    return largest, total, values
