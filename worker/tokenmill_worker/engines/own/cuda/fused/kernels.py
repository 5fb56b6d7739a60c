"""Triton kernels around a decoder's products, each one pass over its rows; arithmetic is float32.

They are the RMS norm (after an addition, if there is one); head norms, rotation and cache write;
the gated activation; and rounding to 8 bits. The unfused modules round between these operations.
Here a result is rounded once, at the end, except the sum that the next layer reads.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from tokenmill_worker.engines.own.cuda.attention.write_kernel import narrowed
from tokenmill_worker.engines.own.cuda.overlap import start_next_kernel, wait_for_previous_kernel


@triton.jit
def norm_kernel(
    x,  # [num_rows, WIDTH], rows `x_stride` apart
    residual,  # [num_rows, WIDTH], or none
    weight,
    out,
    sums,  # x + residual, rounded to its type
    eps,
    x_stride,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    OFFSET: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    mask = column < WIDTH
    start_next_kernel(OVERLAPS)
    weights = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32) + OFFSET
    wait_for_previous_kernel(OVERLAPS)
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(sums.dtype.element_ty)
        tl.store(sums + row * WIDTH + column, rounded, mask=mask)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    tl.store(
        out + row * WIDTH + column, (values * scale * weights).to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def quantize_kernel(
    x,  # [num_rows, WIDTH], rows `x_stride` apart
    narrow,  # [num_rows, WIDTH], 8 bits
    scales,  # [num_rows] float32
    x_stride,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST_SCALE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Round a row per program, with a scale that makes its largest number `LARGEST`."""
    start_next_kernel(OVERLAPS)
    wait_for_previous_kernel(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PAD)
    mask = column < WIDTH
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) / LARGEST, LEAST_SCALE)
    tl.store(scales + row, scale)
    rounded = narrowed(values / scale, narrow.dtype.element_ty)
    tl.store(narrow + row * WIDTH + column, rounded, mask=mask)


@triton.jit
def gate_kernel(
    packed,  # [num_rows, 2 · INNER]: gate, then up
    out,  # [num_rows, INNER]
    INNER: tl.constexpr,
    TILE: tl.constexpr,
    IS_GELU: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    start_next_kernel(OVERLAPS)
    wait_for_previous_kernel(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < INNER
    gate = tl.load(packed + row * (2 * INNER) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(packed + row * (2 * INNER) + INNER + column, mask=mask, other=0.0).to(tl.float32)
    argument = gate
    if IS_GELU:  # ½(1 + tanh u) is the sigmoid of 2u
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    small = tl.exp(-tl.abs(argument))  # no overflow on either side
    sigmoid = tl.where(argument >= 0.0, 1.0, small) / (1.0 + small)
    tl.store(out + row * INNER + column, (gate * sigmoid * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def load_head(at, is_token, START: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr):
    """Load `SIZE` dimensions of a head from `START` on, as [tokens, PAD] float32."""
    dim = tl.arange(0, PAD)
    mask = is_token[:, None] & (dim < SIZE)[None, :]
    return tl.load(at[:, None] + START + dim[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_head(at, values, is_token, START: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr):
    dim = tl.arange(0, PAD)
    mask = is_token[:, None] & (dim < SIZE)[None, :]
    tl.store(at[:, None] + START + dim[None, :], narrowed(values, at.dtype.element_ty), mask=mask)


@triton.jit
def weights_of_head(
    weight, OFFSET: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr
):
    dim = tl.arange(0, PAD)
    return (
        tl.load(weight + START + dim, mask=dim < SIZE, other=0.0).to(tl.float32)[None, :] + OFFSET
    )


@triton.jit
def turn_head(
    source,  # address of each token's head
    target,
    weight,
    cos,  # address of each token's cosines
    sin,
    is_token,
    eps,
    factor,  # of the result, with scales
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Norm a head, rotate it by halves and store it; dimensions beyond the two halves are only
    normed.
    """
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    low = load_head(source, is_token, 0, HALF, HALF_PAD)
    high = load_head(source, is_token, HALF, HALF, HALF_PAD)
    rest = low
    if REST > 0:
        rest = load_head(source, is_token, 2 * HALF, REST, REST_PAD)
    if HAS_NORM:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if REST > 0:
            squares += tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        low = low * scale * weights_of_head(weight, OFFSET, 0, HALF, HALF_PAD)
        high = high * scale * weights_of_head(weight, OFFSET, HALF, HALF, HALF_PAD)
        if REST > 0:
            rest = rest * scale * weights_of_head(weight, OFFSET, 2 * HALF, REST, REST_PAD)
    if HAS_SCALES:
        low, high, rest = low * factor, high * factor, rest * factor
    low_cos = load_head(cos, is_token, 0, HALF, HALF_PAD)
    high_cos = load_head(cos, is_token, HALF, HALF, HALF_PAD)
    low_sin = load_head(sin, is_token, 0, HALF, HALF_PAD)
    high_sin = load_head(sin, is_token, HALF, HALF, HALF_PAD)
    store_head(target, low * low_cos - high * low_sin, is_token, 0, HALF, HALF_PAD)
    store_head(target, high * high_cos + low * high_sin, is_token, HALF, HALF, HALF_PAD)
    if REST > 0:
        store_head(target, rest, is_token, 2 * HALF, REST, REST_PAD)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def rotate_and_write_kernel(
    packed,  # [num_tokens, (NUM_HEADS + 2 · NUM_KV_HEADS) · HEAD_DIM]: queries, keys, values
    out,  # [num_tokens, NUM_HEADS, HEAD_DIM]: turned queries
    cache,  # the layer's view; keys of block b at b · block_stride, values value_offset further
    cos,  # [num_tokens, 2 · HALF]
    sin,
    slots,
    key_scales,  # [NUM_KV_HEADS], or none
    value_scales,
    query_weight,
    key_weight,
    eps,
    num_tokens,
    block_stride,
    value_offset,
    token_stride,
    head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Rotate and store a few tokens of one head per program: a query head, or a key head with its
    value head.

    With scales, queries are multiplied by their key head's; keys and values are divided by theirs.
    """
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    start_next_kernel(OVERLAPS)
    wait_for_previous_kernel(OVERLAPS)
    factor = 1.0
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    head = tl.program_id(1)
    is_token = token < num_tokens
    row = packed + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    cos_at, sin_at = cos + token * (2 * HALF), sin + token * (2 * HALF)
    source = row + head * HEAD_DIM
    if head < NUM_HEADS:
        target = out + (token * NUM_HEADS + head) * HEAD_DIM
        if HAS_SCALES:
            factor = tl.load(key_scales + head // GROUP)
        turn_head(source, target, query_weight, cos_at, sin_at, is_token, eps, factor,
                  HEAD_DIM, HALF, HALF_PAD, REST_PAD,
                  HAS_NORM, OFFSET, HAS_SCALES)  # fmt: skip
    else:
        slot = tl.load(slots + token, mask=is_token, other=0).to(tl.int64)
        kept = cache + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * token_stride
        kept += (head - NUM_HEADS).to(tl.int64) * head_stride
        if HAS_SCALES:
            factor = 1.0 / tl.load(key_scales + head - NUM_HEADS)
        turn_head(source, kept, key_weight, cos_at, sin_at, is_token, eps, factor,
                  HEAD_DIM, HALF, HALF_PAD, REST_PAD,
                  HAS_NORM, OFFSET, HAS_SCALES)  # fmt: skip
        values = load_head(source + NUM_KV_HEADS * HEAD_DIM, is_token, 0, HEAD_DIM, HEAD_PAD)
        if HAS_SCALES:
            values /= tl.load(value_scales + head - NUM_HEADS)
        store_head(kept + value_offset, values, is_token, 0, HEAD_DIM, HEAD_PAD)
