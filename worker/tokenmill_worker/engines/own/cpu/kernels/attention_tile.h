// The inner loops of paged attention: scores of a few query rows against strips of 16 keys, their
// softmax, and the weighted sum of the values, over one tile of keys.
//
// Every row is computed by the same operations in the same order however many rows go together and
// however wide the register tile is, so a row's result depends neither on its batch nor on its
// chunk.
#pragma once

#include "vectors.h"

// out[r][s·16 + lane] = Σ_d query[r][d] · strips[s][d][lane]; `ahead` is fetched into the cache
// meanwhile.
template <class T, int R, int S, bool AHEAD>
static void score_kernel(const float *query, int64_t query_stride, const T *const *strips,
                         const T *const *ahead, int dim, float *out, int64_t out_stride) {
    vf sums[R][S * VPS];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int i = 0; i < S * VPS; ++i) sums[r][i] = splat(0.0f);
    for (int d = 0; d < dim; ++d) {
        vf keys[S * VPS];
#pragma GCC unroll 16
        for (int i = 0; i < S * VPS; ++i)
            keys[i] = load(strips[i / VPS] + d * STRIP + (i % VPS) * VW);
        if (AHEAD)
#pragma GCC unroll 4
            for (int s = 0; s < S; ++s)
                if ((d * STRIP * sizeof(T)) % 64 == 0) __builtin_prefetch(ahead[s] + d * STRIP);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            vf q = splat(query[r * query_stride + d]);
#pragma GCC unroll 16
            for (int i = 0; i < S * VPS; ++i) sums[r][i] = fma(q, keys[i], sums[r][i]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int i = 0; i < S * VPS; ++i) store(out + r * out_stride + i * VW, sums[r][i]);
}

// out[r][column…] = Σ_{k in [first, last)} weights[r][k] · value of key k; strips hold 16 keys ×
// `dim` each.
template <class T, int R, int S, bool AHEAD>
static void value_kernel(const float *weights, int64_t weights_stride, const T *const *strips,
                         const T *const *ahead, int first, int last, int dim, float *out,
                         int64_t out_stride) {
    vf sums[R][S * VPS];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int i = 0; i < S * VPS; ++i) sums[r][i] = splat(0.0f);
    for (int k = first; k < last;) {
        const int strip = k / STRIP, end = last < (strip + 1) * STRIP ? last : (strip + 1) * STRIP;
        const T *row = strips[strip] + (k % STRIP) * dim;
        const T *next = ahead[strip] + (k % STRIP) * dim;
        for (; k < end; ++k, row += dim, next += dim) {
            vf values[S * VPS];
#pragma GCC unroll 16
            for (int i = 0; i < S * VPS; ++i) values[i] = load(row + i * VW);
            if (AHEAD)
#pragma GCC unroll 4
                for (int s = 0; s < S; ++s)
                    if ((s * STRIP * sizeof(T)) % 64 == 0) __builtin_prefetch(next + s * STRIP);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                vf w = splat(weights[r * weights_stride + k]);
#pragma GCC unroll 16
                for (int i = 0; i < S * VPS; ++i) sums[r][i] = fma(w, values[i], sums[r][i]);
            }
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
        for (int i = 0; i < S * VPS; ++i) store(out + r * out_stride + i * VW, sums[r][i]);
}

// Any number of strips: as many as fit the registers at a time.
template <class T, int R, bool AHEAD>
static void score_strips(const float *query, int64_t query_stride, const T *const *strips,
                         const T *const *ahead, int num_strips, int dim, float *out,
                         int64_t out_stride) {
    int s = 0;
    if constexpr (MAX_STRIPS == 4)
        for (; s + 4 <= num_strips; s += 4)
            score_kernel<T, R, 4, AHEAD>(query, query_stride, strips + s, ahead + s, dim,
                                         out + s * STRIP, out_stride);
    if constexpr (MAX_STRIPS == 4)
        for (; s + 2 <= num_strips; s += 2)
            score_kernel<T, R, 2, AHEAD>(query, query_stride, strips + s, ahead + s, dim,
                                         out + s * STRIP, out_stride);
    for (; s < num_strips; ++s)
        score_kernel<T, R, 1, AHEAD>(query, query_stride, strips + s, ahead + s, dim,
                                     out + s * STRIP, out_stride);
}

template <class T, int R, bool AHEAD>
static void value_columns(const float *weights, int64_t weights_stride, const T *const *strips,
                          const T *const *ahead, int first, int last, int dim, float *out,
                          int64_t out_stride) {
    const T *from[STRIP], *then[STRIP];
    const int strip0 = first / STRIP, strip1 = (last + STRIP - 1) / STRIP;
    for (int column = 0; column < dim;) {
        for (int s = strip0; s < strip1; ++s)
            from[s] = strips[s] + column, then[s] = ahead[s] + column;
        if (MAX_STRIPS == 4 && dim - column >= 4 * STRIP) {
            value_kernel<T, R, MAX_STRIPS, AHEAD>(weights, weights_stride, from, then, first, last,
                                                  dim, out + column, out_stride);
            column += MAX_STRIPS * STRIP;
        } else {
            value_kernel<T, R, 1, AHEAD>(weights, weights_stride, from, then, first, last, dim,
                                         out + column, out_stride);
            column += STRIP;
        }
    }
}

#define FOR_ROWS(rows, CALL)                                       \
    switch (rows) {                                                \
        case 1: CALL(1); break;                                    \
        case 2: CALL(2); break;                                    \
        case 3: CALL(3); break;                                    \
        case 4: CALL(4 < MAX_ROWS ? 4 : MAX_ROWS); break;          \
        case 5: CALL(5 < MAX_ROWS ? 5 : MAX_ROWS); break;          \
        default: CALL(MAX_ROWS); break;                            \
    }

#define SEEN_ROWS 32  // at most

// The positions of a tile that rows which are computed together see: [first, last) each,
// [any_first, any_last) some of them.
struct Seen {
    int first[SEEN_ROWS], last[SEEN_ROWS], any_first, any_last;

    int begin() const { return any_first / STRIP * STRIP; }  // in whole strips
    int end() const {
        return any_last > any_first ? (any_last + STRIP - 1) / STRIP * STRIP : begin();
    }
};

// The logits of row i as they count: capped, −∞ where it does not see. Returns their maximum.
static float cap_and_hide(float *row, const Seen &seen, int i, float softcap) {
    const int begin = seen.begin(), end = seen.end(), first = seen.first[i], last = seen.last[i];
    const vf nothing = splat(-INFINITY);
    const auto hide = [&](int strip) {
        for (int c = strip; c < strip + STRIP; c += VW) {
            const vi index = lanes() + c;
            store(row + c, select((index >= first) & (index < last), load(row + c), nothing));
        }
    };
    if (softcap > 0)
        for (int c = begin; c < end; c += VW)
            store(row + c, splat(softcap) * vtanh(load(row + c) * splat(1.0f / softcap)));
    for (int c = begin; c < end && c < first; c += STRIP) hide(c);
    for (int c = last > begin ? last / STRIP * STRIP : begin; c < end; c += STRIP) hide(c);
    vf best = nothing, other = nothing;
    int c = begin;
    for (; c + 2 * STRIP <= end; c += 2 * STRIP)
        for (int i = 0; i < STRIP; i += VW) {
            best = larger(best, load(row + c + i));
            other = larger(other, load(row + c + STRIP + i));
        }
    for (; c < end; c += VW) best = larger(best, load(row + c));
    return max_lanes(larger(best, other));
}

// exp(logit − shift) of S strips, added to `total` strip by strip.
template <int S>
INLINE void weigh_strips(float *row, vf shift, vf *total) {
    vf weights[S * VPS];
#pragma GCC unroll 4
    for (int i = 0; i < S * VPS; ++i) weights[i] = load(row + i * VW) - shift;
    vexps<S * VPS>(weights);
#pragma GCC unroll 4
    for (int i = 0; i < S * VPS; ++i) {
        total[i % VPS] += weights[i];
        store(row + i * VW, weights[i]);
    }
}

// Logits become weights exp(logit − max). Returns their sum; `max` is −∞ where nothing is seen, and
// becomes NaN with the sum, for a NaN among the logits must not pass for a row that saw nothing.
static float weigh(float *row, const Seen &seen, float *max) {
    const int end = seen.end();
    const vf shift = splat(*max > -INFINITY ? *max : 0.0f);
    vf total[VPS] = {};
    int c = seen.begin();
    for (; c + MAX_STRIPS * STRIP <= end; c += MAX_STRIPS * STRIP)
        weigh_strips<MAX_STRIPS>(row + c, shift, total);
    for (; c < end; c += STRIP) weigh_strips<1>(row + c, shift, total);
    for (int v = 1; v < VPS; ++v) total[0] += total[v];
    const float sum = sum_lanes(total[0]);
    if (sum != sum) *max = sum;
    return sum;
}

// Fold one tile's max[rows], sum[rows], values[rows][width] into the running ones, whose max and
// sum have room for whole vectors. A row that saw nothing leaves them untouched.
static void fold(int rows, int width, float *max, float *sum, float *values, const float *tile_max,
                 const float *tile_sum, const float *tile) {
    for (int first = 0; first < rows; first += VW) {
        const vf before = load(max + first), now = load(tile_max + first),
                 both = larger(before, now);
        const vi saw_nothing = now == splat(-INFINITY);
        vf factors[2] = {before - both, now - both};
        vexps<2>(factors);
        const vf total = fma(load(sum + first), factors[0], load(tile_sum + first) * factors[1]);
        store(max + first, select(saw_nothing, before, both));
        store(sum + first, select(saw_nothing, load(sum + first), total));
        for (int r = first; r < first + VW && r < rows; ++r) {
            if (saw_nothing[r - first]) continue;
            float *to = values + (int64_t)r * width;
            const float *from = tile + (int64_t)r * width;
            const vf keep = splat(factors[0][r - first]), add = splat(factors[1][r - first]);
            if (before[r - first] == -INFINITY)
                memcpy(to, from, width * sizeof(float));
            else
                for (int c = 0; c < width; c += VW)
                    store(to + c, fma(keep, load(to + c), add * load(from + c)));
        }
    }
}
