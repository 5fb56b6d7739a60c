// Rows of floats rounded to 8 bits, and the dot product of four bytes with four others, as this
// machine has it.
#pragma once

#include "linear.h"

typedef int8_t i8;
typedef uint8_t u8;

#define DEPTH 4  // bytes of k in one 32-bit lane

namespace {

// ── the dot product of four bytes, summed into 32-bit lanes ──

#if VW == 16 && defined(__AVX512VNNI__)
#define VNNI 1
INLINE vi dot4(vi sum, vi w, vi x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}
#elif VW == 8 && defined(__AVXVNNI__)
#define VNNI 1
INLINE vi dot4(vi sum, vi w, vi x) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
#else
#define VNNI 0
// Products of two 16-bit pairs, summed: bytes would saturate where no VNNI is.
INLINE vi dot2(vi w, vi x) {
#if VW == 16 && defined(__AVX512BW__)
    return (vi)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif VW == 8
    return (vi)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__)
    return (vi)_mm_madd_epi16((__m128i)w, (__m128i)x);
#else
    return ((w << 16) >> 16) * ((x << 16) >> 16) + (w >> 16) * (x >> 16);
#endif
}
#endif

#if VNNI
typedef vi Columns;       // four bytes of each column
typedef int32_t Quad;     // four bytes of a row
INLINE Columns columns(const u8 *p) {
    vi w;
    memcpy(&w, p, sizeof w);
    return w;
}
INLINE vi dot(vi sum, Columns w, const Quad &x) { return dot4(sum, w, x - vi{}); }
INLINE Quad quad(const i8 *q) {
    Quad x;
    memcpy(&x, q, 4);
    return x;
}
#else
struct Columns {
    vi even, odd;  // bytes 0 and 2, bytes 1 and 3 of each column, as 16-bit pairs
};
struct Quad {
    int32_t even, odd;
};
INLINE Columns columns(const u8 *p) {
    vu w;
    memcpy(&w, p, sizeof w);
    return {(vi)(w & 0x00ff00ff), (vi)((w >> 8) & 0x00ff00ff)};
}
INLINE vi dot(vi sum, const Columns &w, const Quad &x) {
    return sum + dot2(w.even, x.even - vi{}) + dot2(w.odd, x.odd - vi{});
}
INLINE Quad quad(const i8 *q) {
    return {(q[0] & 0xffff) | (int32_t)((uint32_t)q[2] << 16),
            (q[1] & 0xffff) | (int32_t)((uint32_t)q[3] << 16)};
}
#endif

INLINE int64_t quads(int64_t k) { return (k + DEPTH - 1) / DEPTH; }

// ── rows of activations ──

// What the end of a row's sums needs.
struct Row {
    float scale, zero;
    int32_t offset;  // 128 · the sum of the row's q
};

struct Rows {
    Quad *values;  // [m, stride]
    Row *rows;     // [m]
    int64_t stride;
};

INLINE int64_t row_bytes(int64_t k) {
    return quads(k) * (int64_t)sizeof(Quad) + (int64_t)sizeof(Row);
}
INLINE Rows rows_at(char *memory, const LinearArguments &a) {
    const int64_t stride = quads(a.k);
    return {(Quad *)memory, (Row *)((Quad *)memory + a.m * stride), stride};
}

struct Range {
    float low, high, bad;  // bad: x − x summed, which is zero only if all are finite
};

INLINE Range range_of(const float *x, int64_t k) {
    Range range{x[0], x[0], 0.0f};
    int64_t i = 0;
    if (k >= 2 * VW) {
        vf high[2] = {load(x), load(x + VW)}, low[2] = {high[0], high[1]}, bad[2] = {};
        for (; i + 2 * VW <= k; i += 2 * VW)
#pragma GCC unroll 2
            for (int j = 0; j < 2; ++j) {
                const vf v = load(x + i + j * VW);
                high[j] = larger(v, high[j]);
                low[j] = select(v < low[j], v, low[j]);
                bad[j] += v - v;
            }
        const vf least = select(low[1] < low[0], low[1], low[0]);
        range = {-max_lanes(-least), max_lanes(larger(high[1], high[0])),
                 sum_lanes(bad[0] + bad[1])};
    }
    for (; i < k; ++i) {
        range.low = x[i] < range.low ? x[i] : range.low;
        range.high = x[i] > range.high ? x[i] : range.high;
        range.bad += x[i] - x[i];
    }
    return range;
}

// VW steps as bytes, of which the first `count` quads exist.
INLINE void store_steps(vi steps, Quad *to, int64_t count) {
    const vb bytes = __builtin_convertvector(steps, vb);
    i8 each[VW];
    memcpy(each, &bytes, sizeof bytes);
#pragma GCC unroll 4
    for (int j = 0; j < VW / DEPTH; ++j)
        if (j < count) to[j] = quad(each + j * DEPTH);
}

Row quantise(const float *x, int64_t k, Quad *values) {
    const Range range = range_of(x, k);
    if (range.bad != 0.0f) {  // a row that is not finite must not come out finite; NaN as a whole
                              // number is anything
        memset((void *)values, 0, quads(k) * sizeof(Quad));
        return {0.0f, range.bad, 0};
    }
    const float low = range.low, width = range.high - low;
    const bool varies = width > 0.0f;
    const float inverse = varies ? 255.0f / width : 0.0f, scale = varies ? width / 255.0f : 0.0f;
    const auto steps_of = [&](vf v) __attribute__((always_inline)) {
        const vf magic = splat(
            12582912.0f);  // 1.5 · 2^23: adding it rounds to the nearest integer, ties to even
        return __builtin_convertvector(fma(v - splat(low), splat(inverse), magic) - magic, vi) -
               128;
    };
    vi sums{};
    int64_t i = 0;
    for (; i + VW <= k; i += VW) {
        const vi steps = steps_of(load(x + i));
        sums += steps;
        store_steps(steps, values + i / DEPTH, VW / DEPTH);
    }
    if (i < k) {
        float rest[VW] = {};
        memcpy(rest, x + i, (k - i) * sizeof(float));
        const vi steps = steps_of(load(rest)) & (lanes() < (int32_t)(k - i));
        sums += steps;
        store_steps(steps, values + i / DEPTH, quads(k - i));
    }
    int32_t sum = 0;
    for (int j = 0; j < VW; ++j) sum += sums[j];
    return {scale, low + 128.0f * scale, 128 * sum};
}

}  // namespace
