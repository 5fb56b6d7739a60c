// Multiplies many rows by codes of 4 bits with a third fewer products.
//
// For two numbers x and two codes y,  x₁y₁ + x₂y₂ = (x₁ + y₂)(x₂ + y₁) − x₁x₂ − y₁y₂.  The
// subtracted terms depend on the row alone or the column alone (Winograd 1968, inner products). A
// byte of 7 bits plus a code still fits a byte, so one VPDPBUSD multiplies eight steps of k instead
// of four. This takes two additions of bytes: AMD's cores do them beside it on separate ports, on
// Intel's they would take its place. Two of a number's three parts are multiplied in this way and
// the lowest part one by one, which balances the ports of products and additions.
//
// Everything is exact in 32 bits, so the bits equal those of `byte_dot` over the same numbers.
#pragma once

#include "byte_dot.h"

#define PAIR_HEIGHT 4   // rows of a tile at most, against one panel
#define PAIR_ROWS 5     // from so many on
// PAIR_DEPTH: steps of k from which rounding to 23 bits is no coarser than a chain of floats
#define PAIR_DEPTH 256

namespace {

// A panel's codes y, from -8 to 7: for each group [eight steps of k][quads][NR] lanes, then [NR]
// lanes each of what the sums of products are to be less by, of scales and of zeros.
template <class Form>
struct PairedCodes {
    static constexpr int64_t CODE_VECTORS = DOT_GROUP / 8 * 4, GROUP_VECTORS = CODE_VECTORS + 6;

    const __m512i *codes;

    static int64_t floats(int64_t k) { return k / DOT_GROUP * GROUP_VECTORS * VW; }

    static void make(const Form &form, int64_t k, __m512i *to) {
        const __m512i from = _mm512_set1_epi8(-Form::OFFSET), bias = _mm512_set1_epi8((char)128);
        for (int64_t group = 0; group < k; group += DOT_GROUP) {
            __m512i products[2] = {},
                    sums[2] = {};  // Σ (y₂ + 128) y₁, of parts in pairs, and Σ 128 y of the others
            for (int64_t i = group; i < group + DOT_GROUP; i += 8, to += 4) {
                form.quads(i, 0, to), form.quads(i, 1, to + 2);
                for (int half = 0; half < 2; ++half) {
                    const __m512i first = _mm512_add_epi8(to[half], from),
                                  second = _mm512_add_epi8(to[2 + half], from);
                    products[half] =
                        _mm512_dpbusd_epi32(products[half], _mm512_xor_si512(second, bias), first);
                    sums[half] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums[half], bias, first),
                                                     bias, second);
                    to[half] = first, to[2 + half] = second;
                }
            }
            vf scale[2], zero[2];
            Form::scales_of(form.group(group), scale, zero);
            const __m512i paired = _mm512_set1_epi32(-(1 << 15) - (1 << 8));
            for (int half = 0; half < 2; ++half)
                to[half] = _mm512_sub_epi32(_mm512_mullo_epi32(products[half], paired), sums[half]);
            for (int half = 0; half < 2; ++half)
                to[2 + half] = (__m512i)scale[half], to[4 + half] = (__m512i)zero[half];
            to += 6;
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

// One panel against R rows from `row` on; sums [R, STEP]; `fetched` as for `byte_dot`.
template <int R, class Form>
void winograd_pairs(const Int24RowsOf<Form, 7> &rows, int64_t row, const PairedCodes<Form> &paired,
                    const Form &ahead, unsigned fetched, Prefetch &prefetch, float *sums) {
    const __m512i *codes = paired.codes;
    const int64_t num_groups = rows.num_groups;
    const int32_t *x[R];
    vf acc[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) x[r] = rows.quads(row + r), acc[r][0] = acc[r][1] = vf{};
    for (int64_t g = 0; g < num_groups; ++g, codes += PairedCodes<Form>::GROUP_VECTORS) {
        prefetch.fetch();
        if (fetched & 1) ahead.fetch_group(g * DOT_GROUP);
        if (fetched)
            for (int64_t eight = 0; eight < DOT_GROUP / 8; ++eight)
                if (fetched >> eight & 1) ahead.fetch_chunk(g * DOT_GROUP + eight * 8);
        __m512i upper[R][2], lowest[R][2];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            upper[r][0] = upper[r][1] = _mm512_setzero_si512();
            lowest[r][0] = lowest[r][1] = _mm512_set1_epi32(rows.pair_starts(row + r)[g]);
        }
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
            asm(""
                : "+r"(codes));  // or GCC keeps codes for both parts and has no registers for sums
            if (part > 0)
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half)
                        upper[r][half] = _mm512_slli_epi32(upper[r][half], 7);
#pragma GCC unroll 4
            for (int eight = 0; eight < DOT_GROUP / 8; ++eight) {
                __m512i y[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) y[i] = codes[4 * eight + i];
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const int32_t *at = x[r] + eight * DOT_PARTS * 2;
                    const __m512i first = _mm512_set1_epi32(at[2 * part]),
                                  second = _mm512_set1_epi32(at[2 * part + 1]);
                    const __m512i low = _mm512_set1_epi32(
                        at[4 + part]);  // of one quad beside the first part, of the other then
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half) {
                        add_dots(upper[r][half], add_bytes(first, y[2 + half]),
                                 add_bytes(second, y[half]));
                        add_dots(lowest[r][half], low, y[2 * part + half]);
                    }
                }
            }
        }
        const __m512i *ends = codes + PairedCodes<Form>::CODE_VECTORS;
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
            const vf unit = splat(rows.units(row + r)[g]);
            x[r] += 2 * DOT_PARTS * DOT_GROUP / 8;
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const __m512i whole =
                    _mm512_add_epi32(_mm512_slli_epi32(upper[r][half], 8),
                                     _mm512_add_epi32(lowest[r][half], ends[half]));
                acc[r][half] =
                    fma((vf)_mm512_cvtepi32_ps(whole), (vf)ends[2 + half] * unit, acc[r][half]);
                if (Form::HAS_ZEROS)
                    acc[r][half] =
                        fma((vf)ends[4 + half], splat(rows.sums(row + r)[g]), acc[r][half]);
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
        store(sums + r * STEP, acc[r][0]), store(sums + r * STEP + VW, acc[r][1]);
}

// Rows [first, end), in tiles of nearly equal height.
template <class Form>
void winograd_pairs_of_rows(const Int24RowsOf<Form, 7> &rows, int64_t first, int64_t end,
                            const PairedCodes<Form> &codes, const Form &ahead, Prefetch &prefetch,
                            float *sums) {
    typedef void (*Tile)(const Int24RowsOf<Form, 7> &, int64_t, const PairedCodes<Form> &,
                         const Form &, unsigned, Prefetch &, float *);
    static constexpr Tile TILES[] = {nullptr, winograd_pairs<1, Form>, winograd_pairs<2, Form>,
                                     winograd_pairs<3, Form>, winograd_pairs<4, Form>};
    const bool is_few = end - first <= DOT_FEW;
    unsigned fetched = is_few ? 15 : 1;
    for (int64_t left = (end - first + PAIR_HEIGHT - 1) / PAIR_HEIGHT; left;
         --left, fetched <<= !is_few) {
        const int64_t height = (end - first + left - 1) / left;
        TILES[height](rows, first, codes, ahead, fetched & 15, prefetch, sums);
        first += height, sums += height * STEP;
    }
}

}  // namespace
