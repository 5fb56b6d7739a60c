// Rows of float32 numbers as integers in three signed bytes, with one unit for each group of 32
// numbers.
//
// Relative to the greatest number of a group they are as exact as float32 sums. Products with codes
// are sums of products of bytes (byte_dot.h), which are exact in 32 bits.
#pragma once

#include "linear.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__AVX512BW__)
#define BYTE_DOT 1

namespace {

constexpr int64_t DOT_GROUP = 32, DOT_PARTS = 3;

// OFFSET  the code that stands for 0; codes count from 0
// FITS    true   a group's sums of the three parts are joined in 32 bits
//         false  those of the upper two parts are; the lowest part's sum stays apart
//
//     whole number in units  =  highest · 2^16  +  middle · 2^8  +  lowest, each from -128 to 127
template <int OFFSET, bool FITS>
struct Int24Rows {
    static constexpr int64_t QUADS = DOT_GROUP / 4 * DOT_PARTS;
    static constexpr int MANY = 16, FEW = 4;  // groups at once

    char *memory;  // [m] rows of row_bytes(k)
    int64_t num_groups;

    static int64_t row_bytes(int64_t k) {
        return k / DOT_GROUP * (int64_t)(QUADS * sizeof(int32_t) + 5 * sizeof(float));
    }
    static Int24Rows at(char *memory, int64_t k) { return {memory, k / DOT_GROUP}; }
    INLINE_MEMBER int64_t apart() const {
        return row_bytes(num_groups * DOT_GROUP) / (int64_t)sizeof(int32_t);
    }

    // [groups][eight steps of k][parts, the highest first][2]: steps 0, 4, 1, 5, then 2, 6, 3, 7 of
    // the eight.
    INLINE_MEMBER int32_t *quads(int64_t row) const { return (int32_t *)memory + row * apart(); }
    // [groups] each: what 1 stands for; the numbers' sum; where the sums of products begin, being
    // -OFFSET times what the codes are multiplied by: of the lowest parts and of the upper ones, as
    // one number, or of all parts, in place of the lowest.
    INLINE_MEMBER float *units(int64_t row) const {
        return (float *)(quads(row) + num_groups * QUADS);
    }
    INLINE_MEMBER float *sums(int64_t row) const { return units(row) + num_groups; }
    INLINE_MEMBER int32_t *lowest_starts(int64_t row) const {
        return (int32_t *)(sums(row) + num_groups);
    }
    INLINE_MEMBER int32_t *upper_starts(int64_t row) const {
        return lowest_starts(row) + num_groups;
    }
    // The same for the highest parts alone.
    INLINE_MEMBER int32_t *highest_starts(int64_t row) const {
        return upper_starts(row) + num_groups;
    }

    // The row behind it lies `next` floats further on, and is fetched: another core has written it,
    // mostly.
    void round(const float *x, int64_t next, int64_t row) const {
        int64_t first = 0;
        for (; first + MANY <= num_groups; first += MANY)
            round_groups<MANY>(x + first * DOT_GROUP, next, row, first, MANY);
        for (; first < num_groups; first += FEW)
            round_groups<FEW>(x + first * DOT_GROUP, next, row, first,
                              num_groups - first < FEW ? (int)(num_groups - first) : FEW);
    }

  private:
    template <int BATCH>
    void round_groups(const float *x, int64_t next, int64_t row, int64_t first, int count) const {
        __m512i sizes[BATCH], sums[BATCH], wholes[BATCH], lowest[BATCH], highest[BATCH];
        for (int g = 0; g < count; ++g) {
            const float *at = x + g * DOT_GROUP;
            __builtin_prefetch(at + next), __builtin_prefetch(at + next + VW);
            const vf low = load(at), high = load(at + VW);
            sizes[g] = _mm512_max_epi32(size_of(low),
                                        size_of(high));  // all bits but signs: NaN is above all
            sums[g] = (__m512i)(low + high);
        }
        for (int g = count; g < BATCH; ++g) {
            sizes[g] = sums[g] = wholes[g] = _mm512_setzero_si512();
            if (!FITS) lowest[g] = highest[g] = _mm512_setzero_si512();
        }
        const __m512i most =
            folded<BATCH>(sizes, [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); });
        const __m512i exponent = above(most);
        const vf unit = power_of_two(_mm512_sub_epi32(exponent, _mm512_set1_epi32(23)));
        float to_whole[VW];
        store(to_whole, power_of_two(_mm512_sub_epi32(_mm512_set1_epi32(23), exponent)));

        int32_t *to = quads(row) + first * QUADS;
        for (int g = 0; g < count; ++g, to += QUADS) {
            const bool is_last = first + g + 1 == num_groups;
            wholes[g] = lowest[g] = highest[g] = _mm512_setzero_si512();
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const vf scaled = load(x + g * DOT_GROUP + half * VW) * splat(to_whole[g]);
                const __m512i whole = _mm512_cvtps_epi32((__m512)scaled);
                const __m512i bytes = parts_of(whole);
                wholes[g] = _mm512_add_epi32(wholes[g], whole);
                if (!FITS) {
                    lowest[g] = _mm512_dpbusd_epi32(lowest[g], _mm512_set1_epi32(1), bytes);
                    highest[g] = _mm512_dpbusd_epi32(highest[g], _mm512_set1_epi32(1 << 16), bytes);
                }
                const __m512i in_order = _mm512_permutexvar_epi8(_mm512_load_si512(PLACES), bytes);
                // Vectors overlap; the row that follows may be there already.
                if (is_last && half)
                    _mm512_mask_storeu_epi32(to + QUADS / 2, 0xfff, in_order);
                else
                    _mm512_storeu_si512(to + half * QUADS / 2, in_order);
            }
        }
        const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
        const __m512i all = folded<BATCH>(wholes, add), offset = _mm512_set1_epi32(-OFFSET);
        const __mmask16 is_infinite = _mm512_cmpge_epi32_mask(most, _mm512_set1_epi32(0x7f800000));
        const __mmask16 some = (__mmask16)((1u << count) - 1);
        // A group that is not finite must not come out finite.
        _mm512_mask_storeu_ps(units(row) + first, some,
                              _mm512_mask_blend_ps(is_infinite, (__m512)unit, (__m512)splat(NAN)));
        _mm512_mask_storeu_ps(this->sums(row) + first, some,
                              (__m512)folded<BATCH>(sums, [](__m512i a, __m512i b) {
                                  return (__m512i)((vf)a + (vf)b);
                              }));
        const __m512i low = FITS ? all : folded<BATCH>(lowest, add);
        _mm512_mask_storeu_epi32(lowest_starts(row) + first, some, _mm512_mullo_epi32(low, offset));
        if (FITS) return;
        const __m512i upper = _mm512_srai_epi32(_mm512_sub_epi32(all, low), 8);
        _mm512_mask_storeu_epi32(upper_starts(row) + first, some,
                                 _mm512_mullo_epi32(upper, offset));
        _mm512_mask_storeu_epi32(highest_starts(row) + first, some,
                                 _mm512_mullo_epi32(folded<BATCH>(highest, add), offset));
    }

    static INLINE_MEMBER __m512i size_of(vf x) { return (__m512i)((vi)x & 0x7fffffff); }
    // Numbers up to those of `bits` are below 2^exponent by more than a 256th of it, or their
    // highest part would be no byte.
    static INLINE_MEMBER __m512i above(__m512i bits) {
        const __m512i exponent =
            _mm512_srai_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x20000)), 23);
        return _mm512_max_epi32(_mm512_sub_epi32(exponent, _mm512_set1_epi32(126)),
                                _mm512_set1_epi32(-100));
    }
    static INLINE_MEMBER vf power_of_two(__m512i exponent) {
        return (vf)_mm512_slli_epi32(_mm512_add_epi32(exponent, _mm512_set1_epi32(127)), 23);
    }

    // The bytes of a number so much greater are its parts, but for the sign of the lower two.
    static INLINE_MEMBER __m512i parts_of(__m512i whole) {
        return _mm512_xor_si512(_mm512_add_epi32(whole, _mm512_set1_epi32(0x8080)),
                                _mm512_set1_epi32(0x8080));
    }

    // All lanes of each vector as one, by halves: of vector g in lane g.
    template <int COUNT, class Fold>
    static INLINE_MEMBER __m512i folded(const __m512i *vectors, Fold fold) {
        __m512i by_two[COUNT / 2], by_four[COUNT / 4];
#pragma GCC unroll 8
        for (int i = 0; i < COUNT / 2; ++i) {
            const __m512i a = vectors[i], b = vectors[i + COUNT / 2];
            by_two[i] = fold(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        }
#pragma GCC unroll 4
        for (int i = 0; i < COUNT / 4; ++i) {
            const __m512i a = by_two[i], b = by_two[i + COUNT / 4];
            by_four[i] = fold(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        }
        if (COUNT == FEW) {
            const __m512i by_eight = by_lanes(by_four[0], by_four[0], fold);
            return _mm512_permutexvar_epi32(_mm512_load_si512(FOLDED_FEW),
                                            by_lanes(by_eight, by_eight, fold));
        }
        const __m512i first = by_lanes(by_four[0], by_four[COUNT / 8], fold);
        const __m512i second = by_lanes(by_four[COUNT / 16], by_four[3 * COUNT / 16], fold);
        return _mm512_permutexvar_epi32(_mm512_load_si512(FOLDED), by_lanes(first, second, fold));
    }
    template <class Fold>
    static INLINE_MEMBER __m512i by_lanes(__m512i a, __m512i b, Fold fold) {
        return fold(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
    }
    alignas(64) static constexpr int32_t FOLDED_FEW[16] = {0, 2, 1, 3};
    alignas(64) static constexpr int32_t FOLDED[16] = {0, 8, 4, 12, 2, 10, 6, 14,
                                                       1, 9, 5, 13, 3, 11, 7, 15};
#define STEPS(first, byte)                                                                        \
    (first) * 4 + byte, (first) * 4 + 16 + byte, (first) * 4 + 4 + byte, (first) * 4 + 20 + byte, \
        (first) * 4 + 8 + byte, (first) * 4 + 24 + byte, (first) * 4 + 12 + byte,                 \
        (first) * 4 + 28 + byte
    alignas(64) static constexpr uint8_t PLACES[64] = {STEPS(0, 2), STEPS(0, 1), STEPS(0, 0),
                                                       STEPS(8, 2), STEPS(8, 1), STEPS(8, 0)};
#undef STEPS
};

}  // namespace

#else
#define BYTE_DOT 0
#endif
