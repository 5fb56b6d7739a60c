"""Triton functions that compute attention tile by tile of keys.

Softmax runs in base 2 over float32; the maximum and the sum are carried along the keys. A tile that
every row sees whole needs no masks.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1e-30)  # divisor of a row of zeros


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, IS_CHUNKED: tl.constexpr):
    """Return the first position in the window of the query at `position`; it may be below 0."""
    return position - (position % WINDOW if IS_CHUNKED else WINDOW - 1)


@triton.jit
def keys_of_tile(tile, begin, end, TILE_KEYS: tl.constexpr):
    """Return the positions of a tile's keys; beyond [begin, end) the nearest one that is a key."""
    key_position = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    return tl.minimum(tl.maximum(key_position, begin), end - 1)


@triton.jit
def load_tile(at, is_dim, HEAD_DIM: tl.constexpr, HEAD_PAD: tl.constexpr):
    """Load keys or values; without a mask where a head needs no padding."""
    return tl.load(at, mask=is_dim, other=0.0) if HEAD_PAD != HEAD_DIM else tl.load(at)


@triton.jit
def prepare_queries(queries, cache, scale, HAS_SOFTCAP: tl.constexpr):
    """Return queries in the type of their products, and the factor of each row's products.

    A product of a query and a key, times the factor, is a logit: in base 2 where there is no
    softcap. Over keys of 8 bits, bfloat16 becomes float16: the device converts E4M3 to float16 in
    one instruction, and to bfloat16 in four; E5M2 is the upper byte of a float16. Queries are then
    relative to their row's largest number, so none is out of range.
    """
    factor = tl.full([queries.shape[0]], scale, tl.float32)
    if cache.dtype.element_ty.primitive_bitwidth == 8 and queries.dtype == tl.bfloat16:
        wide = queries.to(tl.float32)
        largest = tl.maximum(tl.max(tl.abs(wide), 1), TINY)
        queries = (wide / largest[:, None]).to(tl.float16)
        factor *= largest
    if not HAS_SOFTCAP:
        factor *= LOG2_E
    return queries, factor


@triton.jit
def products_of_tile(
    queries,
    keys,
    factor,
    position,
    key_position,
    begin,
    softcap,
    WINDOW: tl.constexpr,
    IS_CHUNKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Multiply queries by keys; a product is −∞ where the row does not see the key.

    With a softcap the results are logits in base 2. Without one they are still to be multiplied by
    `factor`.
    """
    products = tl.dot(queries, tl.trans(keys.to(queries.dtype)), input_precision="ieee")
    if HAS_SOFTCAP:
        products *= factor[:, None]
        products = softcap * (1.0 - 2.0 / (tl.exp2(products * (2.0 * LOG2_E / softcap)) + 1.0))
        products *= LOG2_E
    if not IS_FULL:
        first = begin
        if WINDOW > 0:
            first = first_visible(position, WINDOW, IS_CHUNKED)[:, None]
        is_seen = (key_position[None, :] >= first) & (key_position[None, :] <= position[:, None])
        products = tl.where(is_seen, products, float("-inf"))
    return products


@triton.jit
def weights_of(products, factor, largest, total, HAS_SOFTCAP: tl.constexpr):
    """Compute weights relative to the maximum so far, and the factor that rescales the earlier
    sums.

    Few rows keep a sum for each key of a tile, since warps wait for each other to sum a row.
    """
    if HAS_SOFTCAP:
        factor = tl.full([products.shape[0]], 1.0, tl.float32)
    grown = tl.maximum(largest, tl.max(products, 1) * factor)
    shift = tl.where(grown == float("-inf"), 0.0, grown)  # −∞: the row has seen no key yet
    weights = tl.exp2(products * factor[:, None] - shift[:, None])  # one multiply-add, one power
    shrink = tl.exp2(largest - shift)
    if len(total.shape) == 2:
        total = total * shrink[:, None] + weights
    else:
        total = total * shrink + tl.sum(weights, 1)
    return weights, shrink, grown, total


@triton.jit
def halves_of(pairs, TYPE: tl.constexpr):
    """Return the first and the second number, of 8 bits, of each pair of bytes."""
    first = (pairs & 0xFF).to(tl.uint8).to(TYPE, bitcast=True)
    second = (pairs >> 8).to(tl.uint8).to(TYPE, bitcast=True)
    return first.to(tl.float16), second.to(tl.float16)


@triton.jit
def attend_tiles(
    queries,
    factor,  # of each row's products
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
    odds,  # with a cache of 8 bits: the odd dimensions; `values` then has the even ones
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
    IS_FULL: tl.constexpr,  # every row sees every key of every tile: no masks
):
    """Update maxima, sums and values by a range of tiles; return them.

    Values of 8 bits are loaded in pairs, as numbers of 16 bits: the device transposes operands of
    16 bits for a product, but none of 8.
    """
    IS_PAIRED: tl.constexpr = cache.dtype.element_ty.primitive_bitwidth == 8
    WIDTH: tl.constexpr = 2 if IS_PAIRED else 1  # dimensions in a number that is loaded
    dims = tl.arange(0, HEAD_PAD)
    is_dim = dims < HEAD_DIM
    value_dims = tl.arange(0, HEAD_PAD // WIDTH)
    values_at = cache + value_offset
    if IS_PAIRED:
        values_at = values_at.to(tl.pointer_type(tl.uint16))
    # Block ids are loaded a tile ahead: the compiler divides the pipeline stages among loads that
    # depend on each other.
    next_key = keys_of_tile(first_tile, begin, end, TILE_KEYS)
    next_block = tl.load(block_table + next_key // BLOCK_SIZE)
    for tile in range(first_tile, last_tile):
        key, block = next_key, next_block
        next_key = keys_of_tile(tile + 1, begin, end, TILE_KEYS)
        next_block = tl.load(block_table + next_key // BLOCK_SIZE)
        key_at = block.to(tl.int64) * block_stride + (key % BLOCK_SIZE) * HEAD_DIM
        at = cache + key_at[:, None] + dims[None, :]
        keys = load_tile(at, is_dim[None, :], HEAD_DIM, HEAD_PAD)
        key_position = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        products = products_of_tile(
            queries, keys, factor, position, key_position, begin, softcap, WINDOW, IS_CHUNKED,
            HAS_SOFTCAP, IS_FULL,
        )  # fmt: skip
        weights, shrink, largest, total = weights_of(products, factor, largest, total, HAS_SOFTCAP)
        weights = weights.to(queries.dtype)
        at = values_at + (key_at // WIDTH)[:, None] + value_dims[None, :]
        is_value = (value_dims < HEAD_DIM // WIDTH)[None, :]
        loaded = load_tile(at, is_value, HEAD_DIM, HEAD_PAD)
        if IS_PAIRED:
            loaded, odd = halves_of(loaded, cache.dtype.element_ty)
            odds = odds * shrink[:, None] + tl.dot(
                weights, odd.to(queries.dtype), input_precision="ieee"
            )
        values = values * shrink[:, None] + tl.dot(
            weights, loaded.to(queries.dtype), input_precision="ieee"
        )
    return largest, total, values, odds
