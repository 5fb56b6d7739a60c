"""Writes keys and values of new tokens into the cache's blocks, rounded to its type."""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl


@triton.jit
def narrowed(values, TYPE: tl.constexpr):
    """Convert keys or values to the type of the cache.

    8 bits are rounded here: to nearest, ties to even, and at most to the largest number. A cast
    would round differently on some devices, beyond the largest number and where a carry occurs.
    """
    if TYPE.primitive_bitwidth == 8:
        IS_E5M2: tl.constexpr = tl.float8e5 == TYPE
        SHIFT: tl.constexpr = 21 if IS_E5M2 else 20  # of the fraction
        BIAS: tl.constexpr = 448 if IS_E5M2 else 960
        UNIT: tl.constexpr = 128.0 if IS_E5M2 else 16384.0  # its last bit: a subnormal's unit
        UNIT_BITS: tl.constexpr = 0x43000000 if IS_E5M2 else 0x46800000
        NORMAL: tl.constexpr = 0x38800000 if IS_E5M2 else 0x3C800000  # the smallest
        LARGEST: tl.constexpr = 0x47600000 if IS_E5M2 else 0x43E00000
        bits = values.to(tl.float32).to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        unit = magnitude.to(tl.float32, bitcast=True) + UNIT
        normal = magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
        normal = (normal >> SHIFT) - BIAS
        kept = tl.where(magnitude < NORMAL, unit.to(tl.uint32, bitcast=True) - UNIT_BITS, normal)
        kept = tl.where(magnitude >= LARGEST, 0x7B if IS_E5M2 else 0x7E, kept)
        kept = tl.where(magnitude > 0x7F800000, 0x7F, kept)
        result = (kept | ((bits >> 24) & 0x80)).to(tl.uint8).to(TYPE, bitcast=True)
    else:
        result = values.to(TYPE)
    return result


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def write_kernel(
    key,  # [num_tokens, num_kv_heads, HEAD_DIM]
    value,
    cache,
    slots,
    num_tokens,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    block_stride,
    value_offset,
    token_stride,  # between the tokens of a block
    head_stride,  # between the heads of a block
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, HEAD_PAD)
    is_token = token < num_tokens
    mask = is_token[:, None] & (dims < HEAD_DIM)[None, :]
    slot = tl.load(slots + token, mask=is_token, other=0).to(tl.int64)
    at = (
        (slot // BLOCK_SIZE) * block_stride
        + head * head_stride
        + (slot % BLOCK_SIZE) * token_stride
    )
    at = at[:, None] + dims[None, :]
    token_at = token.to(tl.int64)[:, None]
    keys = tl.load(key + token_at * key_stride + head * key_head_stride + dims[None, :], mask=mask)
    values = tl.load(
        value + token_at * value_stride + head * value_head_stride + dims[None, :], mask=mask
    )
    tl.store(cache + at, narrowed(keys, cache.dtype.element_ty), mask=mask)
    tl.store(cache + value_offset + at, narrowed(values, cache.dtype.element_ty), mask=mask)
