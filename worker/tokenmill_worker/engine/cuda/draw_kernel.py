"""One Triton kernel that samples a row's token from its logits: peak, floor (top-k, top-p, min-p),
race.

A program reads one row several times; its logits stay in the second-level cache. A greedy row's
token is known after the first time. The floor is a distance from the row's peak. Distances are not
negative, so their bit patterns are ordered like integers. A search over the bit patterns finds the
floor exactly in 16 passes, each testing three distances, without sorting the row.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

INFINITY_BITS = tl.constexpr(
    0x7F800000
)  # as an integer, +infinity follows the largest finite distance
STAGES = tl.constexpr(3)  # a row's next two tiles are being loaded while one is read
LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)


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
def distances(row, token, vocab, peak, inverse_temperature):
    """Compute how far below the peak each scaled logit lies; beyond the vocabulary that is
    infinitely far.
    """
    logits = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return -((logits - peak) * inverse_temperature)


@triton.jit
def share(bits, bound, mass, COUNTS: tl.constexpr):
    """Return what a token adds to the count, or to the mass, of the tokens within the distance
    `bound`.
    """
    return tl.where(bits <= bound, 1.0 if COUNTS else mass, 0.0)


@triton.jit
def reach(
    row, vocab, peak, scale, first, second, third, nearest, COUNTS: tl.constexpr, TILE: tl.constexpr
):
    """Count the tokens, or sum the mass, within each of three distances (as integers) and within
    `nearest`.

    A lane's part is summed in float32, in the order of the tokens, so a larger distance never
    yields less.
    """
    near = tl.zeros([TILE], tl.float32)
    middle = tl.zeros([TILE], tl.float32)
    far = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        distance = distances(row, token, vocab, peak, scale)
        bits = tl.where(token < vocab, distance.to(tl.int32, bitcast=True), INFINITY_BITS + 1)
        bits = tl.where(bits <= nearest, bits, INFINITY_BITS + 1)
        mass = tl.exp(-distance)
        near += share(bits, first, mass, COUNTS)
        middle += share(bits, second, mass, COUNTS)
        far += share(bits, third, mass, COUNTS)
    return (
        tl.sum(near.to(tl.float64), 0),
        tl.sum(middle.to(tl.float64), 0),
        tl.sum(far.to(tl.float64), 0),
    )


@triton.jit
def farthest(row, vocab, peak, scale, target, nearest, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Find the smallest distance (as an integer) within which `target` is reached.

    Each pass quarters the range.
    """
    low = 0
    high = INFINITY_BITS
    while low < high:
        step = (high - low + 3) // 4
        first = tl.minimum(low + step - 1, high)
        second = tl.minimum(low + 2 * step - 1, high)
        third = tl.minimum(low + 3 * step - 1, high)
        near, middle, far = reach(
            row, vocab, peak, scale, first, second, third, nearest, COUNTS, TILE
        )
        missed = (
            (near < target).to(tl.int32)
            + (middle < target).to(tl.int32)
            + (far < target).to(tl.int32)
        )
        low += step * missed
        high = tl.minimum(low + step - 1, high)
    return low


@triton.jit
def better(best, best_token, values, token):
    """Return each lane's higher value, of the best so far and the new one, and its token; never
    NaN.
    """
    is_better = values > best
    return tl.where(is_better, values, best), tl.where(is_better, token, best_token)


@triton.jit
def winner_of(best, best_token, vocab):
    """Return the highest value of all lanes and its token, the first of equals; `vocab` if no lane
    has one.
    """
    highest = tl.max(best, 0)
    return highest, tl.min(tl.where(best == highest, best_token, vocab), 0)


@triton.jit
def draw_kernel(
    logits,  # [num_rows, vocab], rows `row_stride` apart
    inverse_temperature,  # [num_rows] float32; 0: the highest logit
    log_min_p,  # float32; −infinity: off
    top_p,  # float64; 1 or more: off
    top_k,  # int64; vocab or more: off
    keys,  # [num_rows, 2] int32
    token_ids,  # [num_rows] int64
    peaks,  # [num_rows] float32
    vocab,
    row_stride,
    TILE: tl.constexpr,
):
    row_id = tl.program_id(0)
    row = logits + row_id.to(tl.int64) * row_stride
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.zeros([TILE], tl.int32) + vocab
    is_broken = tl.zeros([TILE], tl.int32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        token = start + lanes
        values = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        is_broken |= (values != values).to(tl.int32)
        best, best_token = better(best, best_token, values, token)
    peak, winner = winner_of(best, best_token, vocab)
    tl.store(peaks + row_id, tl.where(tl.max(is_broken, 0) > 0, float("nan"), peak))
    scale = tl.load(inverse_temperature + row_id)

    floor = -tl.load(log_min_p + row_id)  # as a distance
    nearest = tl.maximum(floor, 0.0).to(tl.int32, bitcast=True)
    if (tl.load(top_k + row_id) < vocab) & (scale != 0.0):
        wanted = tl.load(top_k + row_id).to(tl.float64)
        nearest = tl.minimum(
            nearest, farthest(row, vocab, peak, scale, wanted, INFINITY_BITS, True, TILE)
        )
    if (tl.load(top_p + row_id) < 1.0) & (scale != 0.0):
        _, _, whole = reach(
            row, vocab, peak, scale, nearest, nearest, nearest, nearest, False, TILE
        )
        wanted = tl.load(top_p + row_id) * whole
        nearest = tl.minimum(
            nearest, farthest(row, vocab, peak, scale, wanted, nearest, False, TILE)
        )

    if scale != 0.0:
        first_key = tl.load(keys + 2 * row_id).to(tl.uint32, bitcast=True)
        second_key = tl.load(keys + 2 * row_id + 1).to(tl.uint32, bitcast=True)
        best = tl.full([TILE], float("-inf"), tl.float32)
        best_token = tl.zeros([TILE], tl.int32) + vocab
        for start in tl.range(0, vocab, TILE, num_stages=STAGES):
            token = start + lanes
            distance = distances(row, token, vocab, peak, scale)
            is_in = (distance.to(tl.int32, bitcast=True) <= nearest) & (token < vocab)
            values = tl.where(
                is_in, -distance - gumbel_cost(token, first_key, second_key), float("-inf")
            )
            best, best_token = better(best, best_token, values, token)
        _, winner = winner_of(best, best_token, vocab)
    tl.store(token_ids + row_id, tl.minimum(winner, vocab - 1).to(tl.int64))
