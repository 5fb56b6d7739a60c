// The inner loops of paged attention: scores of a few query rows against strips of 16 keys, their softmax,
// and the weighted sum of the values, over one tile of keys.
//
// Every row is computed by the same operations in the same order however many rows go together and
// however wide the register tile is, so a row's result never depends on its batch or its chunk.
#pragma once

#include "vectors.h"

// out[r][s·16 + lane] = Σ_d query[r][d] · strips[s][d][lane]; `ahead` is fetched into the cache meanwhile.
template <class T, int R, int S, bool AHEAD>
static void score_kernel(const float *query, int64_t query_stride, const T *const *strips, const T *const *ahead,
                         int dim, float *out, int64_t out_stride) {
    vf sums[R][S * VPS];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < S * VPS; ++i) sums[r][i] = splat(0.0f);
    for (int d = 0; d < dim; ++d) {
        vf keys[S * VPS];
#pragma GCC unroll 16
        for (int i = 0; i < S * VPS; ++i) keys[i] = load(strips[i / VPS] + d * STRIP + (i % VPS) * VW);
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
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < S * VPS; ++i) store(out + r * out_stride + i * VW, sums[r][i]);
}

// out[r][column…] += Σ_{k in [first, last)} weights[r][k] · value of key k; strips hold 16 keys × `dim` each.
template <class T, int R, int S, bool AHEAD>
static void value_kernel(const float *weights, int64_t weights_stride, const T *const *strips, const T *const *ahead,
                         int first, int last, int dim, float *out, int64_t out_stride) {
    vf sums[R][S * VPS];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < S * VPS; ++i) sums[r][i] = load(out + r * out_stride + i * VW);
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
                for (int s = 0; s < S; ++s) __builtin_prefetch(next + s * STRIP);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                vf w = splat(weights[r * weights_stride + k]);
#pragma GCC unroll 16
                for (int i = 0; i < S * VPS; ++i) sums[r][i] = fma(w, values[i], sums[r][i]);
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < S * VPS; ++i) store(out + r * out_stride + i * VW, sums[r][i]);
}

// Any number of strips: as many as fit the registers at a time.
template <class T, int R, bool AHEAD>
static void score_strips(const float *query, int64_t query_stride, const T *const *strips, const T *const *ahead,
                         int num_strips, int dim, float *out, int64_t out_stride) {
    int s = 0;
    if constexpr (MAX_STRIPS == 4)
        for (; s + 4 <= num_strips; s += 4)
            score_kernel<T, R, 4, AHEAD>(query, query_stride, strips + s, ahead + s, dim, out + s * STRIP, out_stride);
    for (; s < num_strips; ++s)
        score_kernel<T, R, 1, AHEAD>(query, query_stride, strips + s, ahead + s, dim, out + s * STRIP, out_stride);
}

template <class T, int R, bool AHEAD>
static void value_columns(const float *weights, int64_t weights_stride, const T *const *strips, const T *const *ahead,
                          int first, int last, int dim, float *out, int64_t out_stride) {
    const T *from[STRIP], *then[STRIP];
    const int strip0 = first / STRIP, strip1 = (last + STRIP - 1) / STRIP;
    for (int column = 0; column < dim;) {
        for (int s = strip0; s < strip1; ++s) from[s] = strips[s] + column, then[s] = ahead[s] + column;
        if (MAX_STRIPS == 4 && dim - column >= 4 * STRIP) {
            value_kernel<T, R, MAX_STRIPS, AHEAD>(weights, weights_stride, from, then, first, last, dim, out + column,
                                                  out_stride);
            column += MAX_STRIPS * STRIP;
        } else {
            value_kernel<T, R, 1, AHEAD>(weights, weights_stride, from, then, first, last, dim, out + column,
                                         out_stride);
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

// Logits [first, last) of one row become weights exp(logit − max); the rest of [begin, end), both multiples of a
// strip, becomes 0. Returns the maximum (−∞ where nothing is visible) and the sum of the weights.
static void softmax_row(float *row, int begin, int end, int first, int last, float softcap, float *max, float *sum) {
    const vi lane = lanes();
    const vf nothing = splat(-INFINITY);
    vf best[VPS], total[VPS];
    for (int v = 0; v < VPS; ++v) best[v] = nothing, total[v] = splat(0.0f);
    for (int c = begin; c < end; c += STRIP)
        for (int v = 0; v < VPS; ++v) {
            vf x = load(row + c + v * VW);
            if (softcap > 0) x = splat(softcap) * vtanh(x * splat(1.0f / softcap));
            if (c < first || c + STRIP > last) {
                vi index = lane + (c + v * VW);
                x = select((index >= first) & (index < last), x, nothing);
            }
            best[v] = larger(best[v], x);
            if (softcap > 0 || c < first || c + STRIP > last) store(row + c + v * VW, x);
        }
    float m = max_lanes(best[0]);
    for (int v = 1; v < VPS; ++v) m = fmaxf(m, max_lanes(best[v]));
    const vf shift = splat(first < last && m > -INFINITY ? m : 0.0f);
    for (int c = begin; c < end; c += STRIP)
        for (int v = 0; v < VPS; ++v) {
            vf w = vexp(load(row + c + v * VW) - shift);
            total[v] += w;
            store(row + c + v * VW, w);
        }
    for (int v = 1; v < VPS; ++v) total[0] += total[v];
    *sum = sum_lanes(total[0]);
    *max = *sum == *sum ? m : *sum;  // a NaN among the logits must not pass for a row that saw nothing
}

// Fold one tile's (max, sum, values) into the running ones. A row that saw nothing leaves them untouched.
INLINE void fold(float *max, float *sum, float *values, float tile_max, float tile_sum, const float *tile, int width) {
    if (tile_max == -INFINITY) return;
    if (*max == -INFINITY) {
        *max = tile_max, *sum = tile_sum;
        memcpy(values, tile, width * sizeof(float));
        return;
    }
    const float m = fmaxf(*max, tile_max);
    const vf both = vexp(vf{*max - m, tile_max - m});
    *sum = *sum * both[0] + tile_sum * both[1];
    *max = m;
    for (int c = 0; c < width; c += VW)
        store(values + c, fma(splat(both[0]), load(values + c), splat(both[1]) * load(tile + c)));
}
