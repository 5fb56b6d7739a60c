// Splits float32 numbers into parts for the matrix registers: rows, and a form's weights as right
// factors.
//
// A form (weight_form.h) has
//     PARTS      bfloat16 numbers that add up to any of its weights; 0: codes, with the members
//                    static void store_codes(const Chunk &, uint32_t *to);    makes right factors
//                    static void scales_of(const Group &, vf *scale, vf *zero);
//                and HAS_ZEROS
//     IS_FACTOR  its weights lie as right factors do, from start() on
//     FEW        rows up to which vectors are faster; at most DIRECT (decode_weights.h), but for
//                float32 itself
#pragma once

#include "amx.h"
#include "weight_form.h"

#define AMX_DEPTH 32  // steps of k in one product of registers

// What a row's parts take, and its sums by AMX_DEPTH steps.
static inline int64_t amx_row_bytes(int64_t k) {
    return may_use_amx() && k % AMX_DEPTH == 0
               ? 3 * k * (int64_t)sizeof(bf16) + k / AMX_DEPTH * (int64_t)sizeof(float)
               : 0;
}

// Of a layer's workspace for each of its rows: parts, or numbers behind a norm.
static inline int64_t float_row_bytes(int64_t k) {
    const int64_t parts = amx_row_bytes(k);
    return parts ? parts : k * (int64_t)sizeof(float);
}

#if AMX
#define AMX_ROWS 16          // of a register

namespace {

constexpr int64_t PART_LANES =
    AMX_DEPTH / 2 * NR;  // one part of a panel's weights in AMX_DEPTH steps

INLINE vu rounded_up(vf x) { return (vu)x + 0x8000; }  // its upper half is x rounded to bfloat16
INLINE vf left_of(vf x, vu rounded) { return x - (vf)(rounded & 0xffff0000u); }

// use(part, a, b) with the bits of two vectors whose upper halves are the next part of them.
template <int PARTS, class Use>
INLINE void each_part(vf a, vf b, Use use) {
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; ++part) {
        if (part == PARTS - 1 && part) {  // few bits are left: nothing to round
            use(part, (vu)a, (vu)b);
            return;
        }
        const vu first = rounded_up(a), second = rounded_up(b);
        use(part, first, second);
        a = left_of(a, first), b = left_of(b, second);
    }
}

INLINE vf widened(__m256i bf16s) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bf16s), 16); }

// Two steps of k side by side, as a right factor has them.
INLINE void store_pair(uint32_t *to, vu even, vu odd) {
    const vu pair = (odd & 0xffff0000u) | even >> 16;
    memcpy(to, &pair, sizeof pair);
}

// The parts of rows [m, k], as [m / AMX_ROWS][k / AMX_DEPTH][3][AMX_ROWS][AMX_DEPTH], the last tile
// having the rows that are left: a register's rows lie together, and those of the next steps behind
// them. Then sums [k / AMX_DEPTH][m].
struct SplitRows {
    bf16 *parts;
    float *sums;
    int64_t m, k;

    static SplitRows at(char *memory, const LinearArguments &a) {
        bf16 *parts = (bf16 *)memory;
        return {parts, (float *)(parts + 3 * a.m * a.k), a.m, a.k};
    }
    // Rows of the tile that begins with `row`.
    INLINE_MEMBER int64_t height(int64_t row) const {
        return row >= m ? 0 : m - row < AMX_ROWS ? m - row : AMX_ROWS;
    }
    // `row`: the first of a tile.
    INLINE_MEMBER bf16 *tile(int64_t block, int part, int64_t row) const {
        return parts + 3 * row * k + (block * 3 + part) * height(row) * AMX_DEPTH;
    }
    INLINE_MEMBER float *sum(int64_t block, int64_t row) const { return sums + block * m + row; }
    // The row that is split after it lies `next` floats further on, and is fetched: another core
    // has written it, mostly.
    template <bool WITH_SUMS>
    void split(const float *x, int64_t next, int64_t k, int64_t row) const {
        for (int64_t block = 0; block < k / AMX_DEPTH; ++block, x += AMX_DEPTH) {
            vf low = load(x), high = load(x + VW);
            __builtin_prefetch(x + next), __builtin_prefetch(x + next + VW);
            if (WITH_SUMS) *sum(block, row) = sum_lanes(low + high);
            bf16 *to = tile(block, 0, row - row % AMX_ROWS) + row % AMX_ROWS * AMX_DEPTH;
#pragma GCC unroll 3
            for (int part = 0; part < 3; ++part, to += height(row - row % AMX_ROWS) * AMX_DEPTH) {
                const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
                _mm512_storeu_si512(to, both);
                low -= widened(_mm512_castsi512_si256(both)),
                    high -= widened(_mm512_extracti64x4_epi64(both, 1));
            }
        }
    }
};

// How a form's weights become right factors: BLOCK lanes for AMX_DEPTH steps of k, as [part][pair
// of steps][NR]. They are made in pieces, which the products of earlier blocks hide.
constexpr int PIECE = 8;  // steps of k
constexpr int AHEAD = 1;  // blocks, a power of two minus 1

template <class Form, int PARTS = Form::PARTS>
struct Factors {
    static constexpr int64_t BLOCK = PARTS * PART_LANES;

    static INLINE_MEMBER void make(const Form &panel, const Form &ahead, int64_t step,
                                   uint32_t *to) {
        vf even[2];
        each_step<1>(&panel, &ahead, {step, PIECE},
                     [&](int64_t i, int step, const vf *w) __attribute__((always_inline)) {
                         if (step % 2 == 0) {
                             even[0] = w[0], even[1] = w[1];
                             return;
                         }
                         for (int half = 0; half < 2; ++half)
                             each_part<PARTS>(
                                 even[half], w[half],
                                 [&](int part, vu a, vu b) __attribute__((always_inline)) {
                                     store_pair(to + part * PART_LANES +
                                                    (i + step) % AMX_DEPTH / 2 * NR + half * VW,
                                                a, b);
                                 });
                     });
    }
};

// Codes, which are not scaled yet.
template <class Form>
struct Factors<Form, 0> {
    static constexpr int64_t BLOCK = PART_LANES;

    static INLINE_MEMBER void make(const Form &panel, const Form &ahead, int64_t step,
                                   uint32_t *to) {
        if (step % AMX_DEPTH == 0) ahead.fetch_group(step);
#pragma GCC unroll 4
        for (int64_t i = step; i < step + PIECE; i += Form::CHUNK) {
            ahead.fetch_chunk(i);
            Form::store_codes(panel.chunk(i), to + i % AMX_DEPTH / 2 * NR);
        }
    }
};

}  // namespace

#endif
