"""One Triton kernel that samples a row's token from its logits: peak, floor (top-k, top-p, min-p),
race.

The floor is a distance from the row's peak. Distances are not negative, so their bit patterns are
ordered like integers. A search over the bit patterns finds the floor exactly in 16 passes, each
testing three distances, without sorting.

A program reads a row with top-k or top-p twice. The first time it finds the peak, the mean and the
deviation of the logits. The second time it gathers the candidates: the tokens above a cut, so many
deviations over the mean (the cut of Qrita, arXiv 2602.01518). The search goes over the candidates,
which fit one tile. Where the floor lies below the cut, or the candidates are too many, it goes over
the row, whose logits stay in the second-level cache. Both ways find the same floor.

A program reads a greedy row once, and a row without top-k and top-p twice.
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
def scan(row, vocab, TILE: tl.constexpr, MEASURES: tl.constexpr):
    """Find the row's peak and its token, and whether a logit is NaN.

    With MEASURES, also return the number, the mean and the deviation of its finite logits.
    """
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.zeros([TILE], tl.int32) + vocab
    is_broken = tl.zeros([TILE], tl.int32)
    count = tl.zeros([TILE], tl.float32)
    total = tl.zeros([TILE], tl.float32)
    squares = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        values = tl.load(row + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        is_broken |= (values != values).to(tl.int32)
        best, best_token = better(best, best_token, values, token)
        if MEASURES:
            is_finite = tl.abs(values) < float("inf")
            finite = tl.where(is_finite, values, 0.0)
            count += is_finite.to(tl.float32)
            total += finite
            squares += finite * finite
    peak, winner = winner_of(best, best_token, vocab)
    number = tl.sum(count, 0)
    mean = tl.sum(total, 0) / tl.maximum(number, 1.0)
    variance = tl.sum(squares, 0) / tl.maximum(number, 1.0) - mean * mean
    deviation = tl.sqrt(tl.maximum(variance, 0.0))
    return peak, winner, tl.max(is_broken, 0), number, mean, deviation


@triton.jit
def gather(row, vocab, peak, scale, cut, nearest, kept, kept_tokens, TILE: tl.constexpr):
    """Store distances and tokens of the candidates, those within `cut`, up to a tile of them.

    Return their number, and the mass of all tokens within `nearest`.
    """
    found = 0
    mass = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        distance = distances(row, token, vocab, peak, scale)
        bits = distance.to(tl.int32, bitcast=True)
        is_in = ((bits <= cut) & (token < vocab)).to(tl.int32)
        place = found + tl.cumsum(is_in, 0) - 1
        is_kept = (is_in != 0) & (place < TILE)
        tl.store(kept + place, distance, mask=is_kept)
        tl.store(kept_tokens + place, token, mask=is_kept)
        found += tl.sum(is_in, 0)
        mass += tl.where((bits <= nearest) & (token < vocab), tl.exp(-distance), 0.0)
    tl.debug_barrier()  # other threads read what this one has stored
    return found, tl.sum(mass.to(tl.float64), 0)


@triton.jit
def within(distance, bits, bound, COUNTS: tl.constexpr):
    """Count the candidates, or sum their mass, within the distance `bound`."""
    return tl.sum(share(bits, bound, tl.exp(-distance), COUNTS).to(tl.float64), 0)


@triton.jit
def farthest_kept(distance, bits, target, nearest, COUNTS: tl.constexpr):
    """Find among the candidates what `farthest` finds in the row."""
    low = 0
    high = INFINITY_BITS
    bits = tl.where(bits <= nearest, bits, INFINITY_BITS + 1)
    while low < high:
        step = (high - low + 3) // 4
        missed = 0
        for quarter in tl.static_range(1, 4):
            bound = tl.minimum(low + quarter * step - 1, high)
            missed += (within(distance, bits, bound, COUNTS) < target).to(tl.int32)
        low += step * missed
        high = tl.minimum(low + step - 1, high)
    return low


@triton.jit
def floor_of_kept(distance, bits, nearest, whole, top_k, top_p, vocab):
    """Return the floor, by a search among the candidates.

    `whole` is the mass of all tokens that min-p keeps; with top-k, the mass is that of what top-k
    keeps.
    """
    if top_k < vocab:
        wanted = top_k.to(tl.float64)
        nearest = tl.minimum(nearest, farthest_kept(distance, bits, wanted, INFINITY_BITS, True))
        whole = within(distance, bits, nearest, False)
    if top_p < 1.0:
        wanted = top_p * whole
        nearest = tl.minimum(nearest, farthest_kept(distance, bits, wanted, nearest, False))
    return nearest


@triton.jit
def floor_of_row(row, vocab, peak, scale, nearest, top_k, top_p, TILE: tl.constexpr):
    """Return the floor, by a search over the row."""
    if top_k < vocab:
        wanted = top_k.to(tl.float64)
        nearest = tl.minimum(
            nearest, farthest(row, vocab, peak, scale, wanted, INFINITY_BITS, True, TILE)
        )
    if top_p < 1.0:
        _, _, whole = reach(
            row, vocab, peak, scale, nearest, nearest, nearest, nearest, False, TILE
        )
        wanted = top_p * whole
        nearest = tl.minimum(
            nearest, farthest(row, vocab, peak, scale, wanted, nearest, False, TILE)
        )
    return nearest


@triton.jit
def floor_of_cut(
    row, vocab, peak, scale, kept, found, whole, nearest, cut, top_k, top_p, TILE: tl.constexpr
):
    """Return the floor, and the number of candidates: 0 where they are not all that may stay.

    They are, if min-p keeps no other token, or if top-k or top-p is reached among them.
    """
    lanes = tl.arange(0, TILE)
    distance = tl.load(kept + lanes, mask=lanes < found, other=float("inf"))
    bits = tl.where(lanes < found, distance.to(tl.int32, bitcast=True), INFINITY_BITS + 1)
    mass = within(distance, bits, cut, False)
    is_reached = tl.where(top_k < vocab, found >= top_k, mass >= top_p * whole)
    if (found <= TILE) & ((nearest <= cut) | is_reached):
        nearest = floor_of_kept(distance, bits, nearest, whole, top_k, top_p, vocab)
    else:
        nearest = floor_of_row(row, vocab, peak, scale, nearest, top_k, top_p, TILE)
        found = 0
    return nearest, found


@triton.jit
def cost_of(distance, token, is_in, first_key, second_key):
    """Return what a token adds to the race, −∞ where it is not in."""
    return tl.where(is_in, -distance - gumbel_cost(token, first_key, second_key), float("-inf"))


@triton.jit
def draw_kernel(
    logits,  # [num_rows, vocab], rows `row_stride` apart
    inverse_temperature,  # [num_rows] float32; 0: the highest logit
    log_min_p,  # float32; −infinity: off
    top_p,  # float64; 1 or more: off
    top_k,  # int64; vocab or more: off
    keys,  # [num_rows, 2] int32
    kept,  # [num_rows, TILE] float32: distances of candidates; unused without top-k and top-p
    kept_tokens,  # [num_rows, TILE] int32
    token_ids,  # [num_rows] int64
    peaks,  # [num_rows] float32
    vocab,
    row_stride,
    deviations,  # of the cut over the mean
    TILE: tl.constexpr,
):
    row_id = tl.program_id(0)
    row = logits + row_id.to(tl.int64) * row_stride
    lanes = tl.arange(0, TILE)
    scale = tl.load(inverse_temperature + row_id)
    k, p = tl.load(top_k + row_id), tl.load(top_p + row_id)
    is_cut = (scale != 0.0) & ((k < vocab) | (p < 1.0))
    if is_cut:
        peak, winner, is_broken, number, mean, deviation = scan(row, vocab, TILE, True)
    else:
        peak, winner, is_broken, number, mean, deviation = scan(row, vocab, TILE, False)
    tl.store(peaks + row_id, tl.where(is_broken > 0, float("nan"), peak))

    nearest = tl.maximum(-tl.load(log_min_p + row_id), 0.0).to(tl.int32, bitcast=True)  # min-p's
    nearest = tl.minimum(nearest, INFINITY_BITS - 1)  # an infinitely small logit never wins
    num_kept = 0  # candidates; 0: the row was searched
    kept += row_id.to(tl.int64) * TILE
    kept_tokens += row_id.to(tl.int64) * TILE
    if is_cut:
        cut = tl.maximum((peak - mean - deviations * deviation) * scale, 0.0)
        cut = tl.where(number <= TILE, INFINITY_BITS - 1, cut.to(tl.int32, bitcast=True))
        found, whole = gather(
            row, vocab, peak, scale, tl.minimum(cut, nearest), nearest, kept, kept_tokens, TILE
        )
        nearest, num_kept = floor_of_cut(
            row, vocab, peak, scale, kept, found, whole, nearest, cut, k, p, TILE
        )

    if scale != 0.0:
        first_key = tl.load(keys + 2 * row_id).to(tl.uint32, bitcast=True)
        second_key = tl.load(keys + 2 * row_id + 1).to(tl.uint32, bitcast=True)
        best = tl.full([TILE], float("-inf"), tl.float32)
        best_token = tl.zeros([TILE], tl.int32) + vocab
        if num_kept > 0:
            token = tl.load(kept_tokens + lanes, mask=lanes < num_kept, other=0)
            far = tl.load(kept + lanes, mask=lanes < num_kept, other=float("inf"))
            is_in = (far.to(tl.int32, bitcast=True) <= nearest) & (lanes < num_kept)
            values = cost_of(far, token, is_in, first_key, second_key)
            best, best_token = better(best, best_token, values, token)
        else:
            for start in tl.range(0, vocab, TILE, num_stages=STAGES):
                token = start + lanes
                far = distances(row, token, vocab, peak, scale)
                is_in = (far.to(tl.int32, bitcast=True) <= nearest) & (token < vocab)
                values = cost_of(far, token, is_in, first_key, second_key)
                best, best_token = better(best, best_token, values, token)
        _, winner = winner_of(best, best_token, vocab)
    tl.store(token_ids + row_id, tl.minimum(winner, vocab - 1).to(tl.int64))
