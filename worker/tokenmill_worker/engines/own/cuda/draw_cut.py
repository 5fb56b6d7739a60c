"""Triton kernels for rows with top-k or top-p: gather the candidates, find the floor, race.

The floor is the largest distance below the row's peak at which top-k, top-p and min-p keep a token.

`gather_kernel` stores the candidates: the tokens above a cut, which lies a fixed number of standard
deviations above the mean of the row's logits (the cut of Qrita, arXiv 2602.01518). Each program
takes one chunk of the vocabulary. `choose_kernel` sorts the candidates and reads the floor off. If
they are too many, or the floor may lie below the cut, it searches the whole row instead, whose
logits are still in the second-level cache. Both ways find the same floor: masses are summed as
integers, so that a sum does not depend on its order.
"""
# Triton reads annotations of kernel arguments as types: only constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, misc"

import triton
import triton.language as tl

from tokenmill_worker.engines.own.cuda.draw_kernel import (
    HIGHEST,
    INFINITY_BITS,
    NUMBER,
    NUMBERS,
    OUTCOME,
    SQUARES,
    TOTAL,
    bits_of,
    distance_of,
    distances,
    has_cut,
    is_near,
    load_logits,
    load_part,
    peak_of,
    race,
)

STAGES = tl.constexpr(3)  # two tiles of a row load while a third is read
UNITS = tl.constexpr(2.0**44)  # mass of a token at the peak: 2¹⁸ of them fit 63 bits
PROBES = tl.constexpr(8)
WIDTH = tl.constexpr(8)  # tokens that a thread loads at once: 16 bytes in 16-bit types


@triton.jit
def units_of(distance, is_in):
    """Return each token's mass, as an integer number of units."""
    return tl.where(is_in, (tl.exp(-distance) * UNITS).to(tl.int64), 0)


@triton.jit
def reach(row, vocab, peak, scale, nearest, bounds, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Count the tokens, or sum the units, within each of the bounds and within `nearest`."""
    reached = tl.zeros([PROBES, TILE], tl.int64)
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        distance = distances(load_logits(row, token, vocab), peak, scale)
        is_in = is_near(distance, token, nearest, vocab)
        shares = is_in.to(tl.int64) if COUNTS else units_of(distance, is_in)
        reached += tl.where(bits_of(distance)[None, :] <= bounds[:, None], shares[None, :], 0)
    return tl.sum(reached, 1)


@triton.jit
def farthest(row, vocab, peak, scale, target, nearest, COUNTS: tl.constexpr, TILE: tl.constexpr):
    """Find the smallest distance (as an integer) within which the row's tokens reach `target`.

    Each pass over the row tests eight distances, which divide the range into nine parts.
    """
    low = 0
    high = INFINITY_BITS
    while low < high:
        step = (high - low + PROBES) // (PROBES + 1)
        bounds = tl.minimum(low + (tl.arange(0, PROBES) + 1) * step - 1, high)
        reached = reach(row, vocab, peak, scale, nearest, bounds, COUNTS, TILE)
        low += step * tl.sum((reached.to(tl.float64) < target).to(tl.int32), 0)
        high = tl.minimum(low + step - 1, high)
    return low


@triton.jit
def floor_of_row(row, vocab, peak, scale, nearest, top_k, top_p, TILE: tl.constexpr):
    """Return the floor, by a search over the row."""
    if top_k < vocab:
        wanted = top_k.to(tl.float64)
        found = farthest(row, vocab, peak, scale, wanted, INFINITY_BITS, True, TILE)
        nearest = tl.minimum(nearest, found)
    if top_p < 1.0:
        everywhere = tl.full([PROBES], INFINITY_BITS, tl.int32)
        whole = tl.max(reach(row, vocab, peak, scale, nearest, everywhere, False, TILE), 0)
        wanted = top_p * whole.to(tl.float64)
        found = farthest(row, vocab, peak, scale, wanted, nearest, False, TILE)
        nearest = tl.minimum(nearest, found)
    return nearest


@triton.jit
def floor_of_sorted(distance, nearest, whole, top_k, top_p, vocab, TILE: tl.constexpr):
    """Return the floor, read off the sorted candidates; lanes without one are infinitely far.

    `whole` is the mass of all tokens that min-p keeps. With top-k it is not used: top-p then counts
    the mass of the tokens that top-k keeps.
    """
    bits = bits_of(distance)
    if top_k < vocab:
        kth = tl.max(tl.where(tl.arange(0, TILE) < top_k, bits, 0), 0)
        nearest = tl.minimum(nearest, kth)
        whole = tl.sum(units_of(distance, bits <= nearest), 0).to(tl.float64)
    if top_p < 1.0:
        reached = tl.cumsum(units_of(distance, bits <= nearest), 0).to(tl.float64)
        is_enough = reached >= top_p * whole
        nearest = tl.minimum(nearest, tl.min(tl.where(is_enough, bits, INFINITY_BITS), 0))
    return nearest


@triton.jit
def race_row(row, vocab, peak, scale, nearest, keys, TILE: tl.constexpr):
    """Return the winner of the row's tokens within `nearest`."""
    best = float("-inf")
    winner = vocab
    for start in tl.range(0, vocab, TILE, num_stages=STAGES):
        token = start + tl.arange(0, TILE)
        distance = distances(load_logits(row, token, vocab), peak, scale)
        is_in = is_near(distance, token, nearest, vocab)
        value, first = race(distance, token, is_in, keys, vocab)
        winner = tl.where(value > best, first, winner)
        best = tl.maximum(value, best)
    return winner


@triton.jit
def peak_and_cut(numbers, chunks, scale, deviations, CHUNKS_PAD: tl.constexpr, TILE: tl.constexpr):
    """Return a row's peak, and the distance of the cut as an integer.

    A row with no more finite logits than a tile has lanes needs no cut: all are candidates.
    """
    lane = tl.arange(0, CHUNKS_PAD)
    highs = load_part(numbers, HIGHEST, lane, chunks, float("-inf"))
    counts = load_part(numbers, NUMBER, lane, chunks, 0.0)
    totals = load_part(numbers, TOTAL, lane, chunks, 0.0)
    squares = load_part(numbers, SQUARES, lane, chunks, 0.0)
    peak = peak_of(highs)
    number = tl.sum(counts, 0)
    mean = tl.sum(totals, 0) / tl.maximum(number, 1.0)
    variance = tl.sum(squares, 0) / tl.maximum(number, 1.0) - mean * mean
    above = mean + deviations * tl.sqrt(tl.maximum(variance, 0.0))
    cut = bits_of(tl.maximum((peak - above) * scale, 0.0))
    return peak, tl.where(number <= TILE, INFINITY_BITS - 1, cut)


@triton.jit
def gather_kernel(
    logits,  # as in `measure_kernel`, whose numbers it reads
    inverse_temperature,
    log_min_p,
    top_p,
    top_k,
    numbers,
    found,  # [num_rows] int32: the number of candidates
    kept,  # [num_rows, TILE] int32: the candidates
    vocab,
    row_stride,
    deviations,  # standard deviations of the cut above the mean
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the candidates of a chunk."""
    row_id, chunk, chunks = tl.program_id(1), tl.program_id(0), tl.num_programs(0)
    scale = tl.load(inverse_temperature + row_id)
    k, p = tl.load(top_k + row_id), tl.load(top_p + row_id)
    if (scale == 0.0) | (not has_cut(k, p, vocab)):
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK // WIDTH)[:, None] * WIDTH
    token += tl.arange(0, WIDTH)[None, :]
    values = load_logits(logits + row_id.to(tl.int64) * row_stride, token, vocab)
    nearest = distance_of(tl.load(log_min_p + row_id))
    numbers += row_id * NUMBERS * chunks
    peak, cut = peak_and_cut(numbers, chunks, scale, deviations, CHUNKS_PAD, TILE)
    distance = distances(values, peak, scale)
    if k >= vocab:
        is_in = is_near(distance, token, nearest, vocab)
        mass = tl.sum(tl.where(is_in, tl.exp(-distance), 0.0))
        tl.store(numbers + OUTCOME * chunks + chunk, mass)
    is_above = is_near(distance, token, tl.minimum(cut, nearest), vocab).to(tl.int32)
    number = tl.sum(is_above, 1)
    place = tl.cumsum(number, 0) - number
    place += tl.atomic_add(found + row_id, tl.sum(number, 0), sem="relaxed")
    places = place[:, None] + tl.cumsum(is_above, 1) - is_above
    is_kept = (is_above > 0) & (places < TILE)
    tl.store(kept + row_id.to(tl.int64) * TILE + places, token, mask=is_kept)


@triton.jit
def choose_kernel(
    logits,
    inverse_temperature,
    log_min_p,
    top_p,
    top_k,
    keys,  # [num_rows, 2] int32
    numbers,
    found,
    kept,
    token_ids,  # [num_rows] int64
    peaks,  # [num_rows] float32; NaN where a logit is
    vocab,
    row_stride,
    deviations,
    chunks,
    CHUNKS_PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Find a row's floor and race the tokens above it; store its token and its peak."""
    row_id = tl.program_id(0)
    scale = tl.load(inverse_temperature + row_id)
    k, p = tl.load(top_k + row_id), tl.load(top_p + row_id)
    if (scale == 0.0) | (not has_cut(k, p, vocab)):
        return
    row = logits + row_id.to(tl.int64) * row_stride
    keys += 2 * row_id
    nearest = distance_of(tl.load(log_min_p + row_id))
    number = tl.load(found + row_id)
    lane, lanes = tl.arange(0, CHUNKS_PAD), tl.arange(0, TILE)
    token = tl.load(kept + row_id.to(tl.int64) * TILE + lanes, mask=lanes < number, other=vocab)
    numbers += row_id * NUMBERS * chunks
    peak, cut = peak_and_cut(numbers, chunks, scale, deviations, CHUNKS_PAD, TILE)
    masses = load_part(numbers, OUTCOME, lane, chunks, 0.0)
    whole = tl.sum(masses.to(tl.float64), 0) * UNITS
    distance = distances(load_logits(row, token, vocab), peak, scale)
    mass = tl.sum(units_of(distance, token < vocab), 0).to(tl.float64)
    is_reached = tl.where(k < vocab, number >= k, mass >= p * whole)
    # The floor is among the candidates if min-p keeps no other token, or if they reach top-k or
    # top-p.
    if (number <= TILE) & ((nearest <= cut) | is_reached):
        nearest = floor_of_sorted(tl.sort(distance), nearest, whole, k, p, vocab, TILE)
        is_in = is_near(distance, token, nearest, vocab)
        _, winner = race(distance, token, is_in, keys, vocab)
    elif tl.abs(peak) < float("inf"):
        nearest = floor_of_row(row, vocab, peak, scale, nearest, k, p, TILE)
        winner = race_row(row, vocab, peak, scale, nearest, keys, TILE)
    else:
        winner = 0  # a logit is NaN or the peak is infinite: the row ends with an error
    tl.store(peaks + row_id, peak)
    tl.store(token_ids + row_id, tl.minimum(winner, vocab - 1).to(tl.int64))
