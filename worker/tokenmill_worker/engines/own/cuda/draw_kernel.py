"""Triton kernels that sample each row's token from its logits, and the functions that they share.

Several programs share a row, each with a chunk of the vocabulary, so that even one row uses much of
the device. The chunks are the same in every batch, so a row's token does not depend on its batch.

1. `measure_kernel` finds the highest logit of each chunk.
2. `race_kernel` finds the winner of each chunk, for rows with a temperature alone or with min-p.
3. `pick_kernel` finds the row's token: the best of these winners, or at temperature 0 the first
   token with the highest logit.

Rows with top-k or top-p take the kernels of `draw_cut` in place of 2 and 3.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

# as an integer, +infinity follows the largest finite distance
INFINITY_BITS = tl.constexpr(0x7F800000)
LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
# A chunk's numbers: its highest logit; the number, sum and sum of squares of the finite ones; and
# the highest value of its race, or its mass if the row has top-p and no top-k.
HIGHEST = tl.constexpr(0)
NUMBER = tl.constexpr(1)
TOTAL = tl.constexpr(2)
SQUARES = tl.constexpr(3)
OUTCOME = tl.constexpr(4)
NUMBERS = tl.constexpr(5)


@triton.jit
def load_logits(row, token, vocab):
    """Load logits as float32; beyond the vocabulary they are −∞."""
    return tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def distances(logits, peak, scale):
    """Compute how far below the peak each scaled logit lies."""
    return -((logits - peak) * scale)


@triton.jit
def bits_of(distance):
    """Return the distance's bits: distances are not negative, so these are ordered alike."""
    return distance.to(tl.int32, bitcast=True)


@triton.jit
def is_near(distance, token, nearest, vocab):
    return (bits_of(distance) <= nearest) & (token < vocab)


@triton.jit
def gumbel_cost(token, first_key, second_key):
    """Compute minus the Gumbel noise of a token from the row's keys, like `noise.gumbel_costs`."""
    x = (token.to(tl.uint32) * 0x9E3779B1) ^ first_key
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) ^ second_key
    x = x * 0x846CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    u = tl.minimum((x.to(tl.float32) + 0.5) * 4.656612873077393e-10, LARGEST_BELOW_ONE)
    # -log(1 - u): a small u wins, and a device's logarithm near 1 is coarse, so a small u uses the
    # series
    series = 1.0 / 5 + u * (1.0 / 6 + u * (1.0 / 7 + u * (1.0 / 8 + u * (1.0 / 9))))
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4 + u * series))))
    return tl.log(tl.where(u < 0.1, series, -tl.log(1.0 - u)))


@triton.jit
def race(distance, token, is_in, keys, vocab):
    """Return the highest value among tokens with `is_in`, and its token, the first of equals."""
    first_key = tl.load(keys).to(tl.uint32, bitcast=True)
    second_key = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    values = tl.where(is_in, -distance - gumbel_cost(token, first_key, second_key), float("-inf"))
    best = tl.max(values)
    return best, tl.min(tl.where(values == best, token, vocab))


@triton.jit
def load_part(numbers, part, lane, chunks, other):
    """Load one number of each chunk of a row; lanes without a chunk get `other`."""
    return tl.load(numbers + part * chunks + lane, mask=lane < chunks, other=other)


@triton.jit
def peak_of(highs):
    """Return the row's highest logit; NaN where a logit is NaN."""
    is_broken = tl.max((highs != highs).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(highs == highs, highs, float("-inf")), 0)
    return tl.where(is_broken, float("nan"), highest)


@triton.jit
def distance_of(log_min_p):
    """Return min-p's distance, as an integer; an infinitely small logit never wins."""
    return tl.minimum(bits_of(tl.maximum(-log_min_p, 0.0)), INFINITY_BITS - 1)


@triton.jit
def has_cut(top_k, top_p, vocab):
    """Return whether a row has top-k or top-p."""
    return (top_k < vocab) | (top_p < 1.0)


@triton.jit
def measure_kernel(
    logits,  # [num_rows, vocab], rows `row_stride` apart
    inverse_temperature,  # [num_rows] float32; 0: the highest logit
    top_p,  # float64; 1 or more: off
    top_k,  # int64; vocab or more: off
    numbers,  # [num_rows, NUMBERS, chunks] float32
    found,  # [num_rows] int32: set to 0
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
):
    """Store a chunk's highest logit (NaN if a logit is NaN) and the numbers that the cut needs."""
    row_id, chunk, chunks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    scale = tl.load(inverse_temperature + row_id)
    k, p = tl.load(top_k + row_id), tl.load(top_p + row_id)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_logits(logits + row_id.to(tl.int64) * row_stride, token, vocab)
    numbers += row_id * NUMBERS * chunks + chunk
    total = tl.sum(values, 0)
    highest = tl.max(tl.where(values == values, values, float("-inf")), 0)
    tl.store(numbers + HIGHEST * chunks, tl.where(total == total, highest, float("nan")))
    if (scale != 0.0) & has_cut(k, p, vocab):
        tl.store(found + row_id, 0)
        is_finite = tl.abs(values) < float("inf")
        finite = tl.where(is_finite, values, 0.0)
        tl.store(numbers + NUMBER * chunks, tl.sum(is_finite.to(tl.float32), 0))
        tl.store(numbers + TOTAL * chunks, tl.sum(finite, 0))
        tl.store(numbers + SQUARES * chunks, tl.sum(finite * finite, 0))


@triton.jit
def race_kernel(
    logits,
    inverse_temperature,
    log_min_p,  # float32; −infinity: off
    top_p,
    top_k,
    keys,  # [num_rows, 2] int32
    numbers,
    winners,  # [num_rows, chunks] int32: the token that wins each chunk's race
    vocab,
    row_stride,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    """Store the winner of a chunk's race, and its value."""
    row_id, chunk, chunks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    scale = tl.load(inverse_temperature + row_id)
    if (scale == 0.0) | has_cut(tl.load(top_k + row_id), tl.load(top_p + row_id), vocab):
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    values = load_logits(logits + row_id.to(tl.int64) * row_stride, token, vocab)
    numbers += row_id * NUMBERS * chunks
    lane = tl.arange(0, CHUNKS_PAD)
    peak = peak_of(load_part(numbers, HIGHEST, lane, chunks, float("-inf")))
    distance = distances(values, peak, scale)
    is_in = is_near(distance, token, distance_of(tl.load(log_min_p + row_id)), vocab)
    best, winner = race(distance, token, is_in, keys + 2 * row_id, vocab)
    tl.store(numbers + OUTCOME * chunks + chunk, best)
    tl.store(winners + row_id * chunks + chunk, winner)


@triton.jit
def pick_kernel(
    logits,
    inverse_temperature,
    top_p,
    top_k,
    numbers,
    winners,
    token_ids,  # [num_rows] int64
    peaks,  # [num_rows] float32; NaN where a logit is
    vocab,
    row_stride,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
):
    """Store a row's token and peak: the race's winner, or the first token of the peak."""
    row_id = tl.program_id(0)
    scale = tl.load(inverse_temperature + row_id)
    if (scale != 0.0) & has_cut(tl.load(top_k + row_id), tl.load(top_p + row_id), vocab):
        return
    lane = tl.arange(0, CHUNKS_PAD)
    numbers += row_id * NUMBERS * chunks
    highs = load_part(numbers, HIGHEST, lane, chunks, float("-inf"))
    peak = peak_of(highs)
    if scale == 0.0:
        chunk = tl.min(tl.where(highs == peak, lane, chunks - 1), 0)
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        values = load_logits(logits + row_id.to(tl.int64) * row_stride, token, vocab)
        winner = tl.min(tl.where(values == peak, token, vocab), 0)
    else:
        outcomes = load_part(numbers, OUTCOME, lane, chunks, float("-inf"))
        tokens = tl.load(winners + row_id * chunks + lane, mask=lane < chunks, other=vocab)
        winner = tl.min(tl.where(outcomes == tl.max(outcomes, 0), tokens, vocab), 0)
    tl.store(peaks + row_id, peak)
    tl.store(token_ids + row_id, tl.minimum(winner, vocab - 1).to(tl.int64))
