// Many rows against codes of 4 bits with half of the products.
//
// For two numbers x and two codes y,  x₁y₁ + x₂y₂ = (x₁ + y₂)(x₂ + y₁) − x₁x₂ − y₁y₂,  where what is taken away is of the row
// alone or of the column alone (Winograd 1968, inner products). Sums of a byte of 7 bits and a code still fit a byte, so one
// VPDPBUSD multiplies eight steps of k instead of four. It takes two additions of bytes, which AMD's cores do beside it on
// ports of their own; on Intel's they would take its place.
//
// Everything is exact in 32 bits, so bits are those of `dots` over the same rows.
#pragma once

#include "dots.h"

#define PAIR_HEIGHT 4   // rows of a tile at most, against one panel
#define PAIR_ROWS 5     // from so many on
#define PAIR_DEPTH 512  // steps of k from which rounding to 22 bits is no coarser than a chain of floats

namespace {

// A panel's codes y, from -8 to 7: for each group [eight steps of k][quads][NR] lanes, those of the second quad greater by 128,
// then [NR] lanes of what the row's sums are to be less by.
template <class Form>
struct PairedCodes {
    static constexpr int64_t GROUP_VECTORS = DOT_GROUP / 8 * 4 + 2;

    const __m512i *codes;

    static int64_t floats(int64_t k) { return k / DOT_GROUP * GROUP_VECTORS * VW; }

    static void make(const Form &form, int64_t k, __m512i *to) {
        const __m512i first = _mm512_set1_epi8(-Form::OFFSET), second = _mm512_set1_epi8((char)(128 - Form::OFFSET));
        for (int64_t group = 0; group < k; group += DOT_GROUP) {
            __m512i products[2] = {};
            for (int64_t i = group; i < group + DOT_GROUP; i += 8, to += 4) {
                form.quads(i, 0, to), form.quads(i, 1, to + 2);
                for (int half = 0; half < 2; ++half) {
                    to[half] = _mm512_add_epi8(to[half], first), to[2 + half] = _mm512_add_epi8(to[2 + half], second);
                    products[half] = _mm512_dpbusd_epi32(products[half], to[2 + half], to[half]);
                }
            }
            for (int half = 0; half < 2; ++half) *to++ = _mm512_mullo_epi32(products[half], _mm512_set1_epi32(-(1 << 14 | 1 << 7 | 1)));
        }
    }
};

// In assembly, since GCC would load what is added again for each row.
INLINE __m512i add_bytes(__m512i a, __m512i b) {
    __m512i sum;
    asm("vpaddb %2, %1, %0" : "=v"(sum) : "v"(a), "v"(b));
    return sum;
}

// Whether additions of bytes have ports of their own.
inline bool pairs_pay() {
    static const bool are_amds = __builtin_cpu_is("amd");
    return are_amds;
}

// One panel against R rows from `row` on; sums [R, STEP]; `fetched` as for `dots`.
template <int R, class Form>
void pairs(const Wholes<Form, 7> &rows, int64_t row, const PairedCodes<Form> &paired, const Form &panel, const Form &ahead,
           unsigned fetched, Reading &reading, float *sums) {
    const __m512i *codes = paired.codes;
    const int64_t num_groups = rows.num_groups;
    const int32_t *x[R];
    vf acc[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = rows.quads(row + r), acc[r][0] = acc[r][1] = vf{};
    for (int64_t g = 0; g < num_groups; ++g, codes += PairedCodes<Form>::GROUP_VECTORS) {
        reading.fetch();
        if (fetched & 1) ahead.fetch_group(g * DOT_GROUP);
        if (fetched)
            for (int64_t eight = 0; eight < DOT_GROUP / 8; ++eight)
                if (fetched >> eight & 1) ahead.fetch_chunk(g * DOT_GROUP + eight * 8);
        __m512i whole[R][2];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) whole[r][0] = whole[r][1] = _mm512_setzero_si512();
#pragma GCC unroll 3
        for (int part = 0; part < DOT_PARTS; ++part) {
            if (part > 0)
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half) whole[r][half] = _mm512_slli_epi32(whole[r][half], 7);
#pragma GCC unroll 4
            for (int eight = 0; eight < DOT_GROUP / 8; ++eight) {
                __m512i y[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) y[i] = codes[4 * eight + i];
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const int32_t *at = x[r] + (eight * DOT_PARTS + part) * 2;
                    const __m512i first = _mm512_set1_epi32(at[0]), second = _mm512_set1_epi32(at[1]);
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half)
                        add_dots(whole[r][half], add_bytes(first, y[2 + half]), add_bytes(second, y[half]));
                }
            }
        }
        vf scale[2], zero[2];
        Form::scales_of(panel.group(g * DOT_GROUP), scale, zero);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const vf unit = splat(rows.units(row + r)[g]);
            const __m512i start = _mm512_set1_epi32(rows.pair_starts(row + r)[g]);
            x[r] += 2 * DOT_PARTS * DOT_GROUP / 8;
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __m512i sum = _mm512_add_epi32(whole[r][half], _mm512_add_epi32(codes[DOT_GROUP / 8 * 4 + half], start));
                acc[r][half] = fma((vf)_mm512_cvtepi32_ps(sum), scale[half] * unit, acc[r][half]);
                if (Form::HAS_ZEROS) acc[r][half] = fma(zero[half], splat(rows.sums(row + r)[g]), acc[r][half]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) store(sums + r * STEP, acc[r][0]), store(sums + r * STEP + VW, acc[r][1]);
}

// Rows [first, end), in tiles of nearly equal height.
template <class Form>
void pairs_of_rows(const Wholes<Form, 7> &rows, int64_t first, int64_t end, const PairedCodes<Form> &codes, const Form &panel,
                   const Form &ahead, Reading &reading, float *sums) {
    typedef void (*Tile)(const Wholes<Form, 7> &, int64_t, const PairedCodes<Form> &, const Form &, const Form &, unsigned, Reading &,
                         float *);
    static constexpr Tile TILES[] = {nullptr, pairs<1, Form>, pairs<2, Form>, pairs<3, Form>, pairs<4, Form>};
    const bool is_few = end - first <= DOT_FEW;
    unsigned fetched = is_few ? 15 : 1;
    for (int64_t left = (end - first + PAIR_HEIGHT - 1) / PAIR_HEIGHT; left; --left, fetched <<= !is_few) {
        const int64_t height = (end - first + left - 1) / left;
        TILES[height](rows, first, codes, panel, ahead, fetched & 15, reading, sums);
        first += height, sums += height * STEP;
    }
}

}  // namespace
