// Few rows against 4-bit weights, by dot products of bytes: what one sequence's step, or a few ones', waits for.
//
// The float32 chains of decoded.h take four instructions for 16 weights and are slower than the memory; these take one and
// a half. A row's numbers become integers of 24 bits and a power of two for each group of the weights' own: as exact,
// beside the greatest of the group, as float32 sums are. Three signed bytes make up each integer, the codes are unsigned
// bytes as they are, and sums of their products are exact in 32 bits. A group's sum is put together, scaled and added in
// float32. Codes count from -8 on there, as in linear_int4.cpp for the matrix registers; what that leaves of the group's
// zero is multiplied by the sum of the row's numbers.
//
// A row's bits depend neither on its batch nor on the thread, but are not those of the chains in float_tile.h. So it is used
// only where the matrix registers are, whose bits for many rows are others already (amx_tiles.h).
#pragma once

#include "decoded.h"

#if AMX && defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define INT4_DOTS 1

namespace {

// Rows [m] of k numbers, in groups of 32 steps.
struct WholeRows {
    static constexpr int64_t GROUP = 32, PARTS = 3, QUADS = GROUP / 4 * PARTS;
    struct Group {
        float unit, sum;       // what 1 stands for; the numbers' sum
        int32_t start[PARTS];  // -8 times the sum of each part: where sums of products with codes from -8 on begin
    };
    int32_t *quads;  // [m][k / GROUP][GROUP / 8][PARTS, the highest first][2]: steps 0, 4, 1, 5, then 2, 6, 3, 7 of eight
    Group *groups;   // [m][k / GROUP]
    int64_t num_groups;

    static int64_t bytes(int64_t m, int64_t k) {
        return m * k / GROUP * (int64_t)(QUADS * sizeof(int32_t) + sizeof(Group)) + 64;  // stores are of whole vectors
    }
    static WholeRows at(char *memory, int64_t m, int64_t k) {
        Group *groups = (Group *)memory;
        return {(int32_t *)(groups + m * k / GROUP), groups, k / GROUP};
    }

    void round(const float *x, int64_t row) const {
        Group *group = groups + row * num_groups;
        int32_t *to = quads + row * num_groups * QUADS;
        for (int64_t g = 0; g < num_groups; ++g, x += GROUP) {
            const vf halves[2] = {load(x), load(x + VW)}, sum = halves[0] + halves[1];
            const __m512i sizes = _mm512_max_epi32(size_of(halves[0]), size_of(halves[1]));
            const int32_t most = _mm512_reduce_max_epi32(sizes);  // of all bits but signs: the greatest, NaN above all
            const int exponent = above(most);
            __m512i by_part = _mm512_setzero_si512();
            for (const vf half : halves) {
                const __m512i whole = _mm512_cvtps_epi32((__m512)(half * splat(power_of_two(23 - exponent))));
                // The bytes of a number so much greater are its parts, but for the sign of the lower two.
                const __m512i bytes = _mm512_xor_si512(_mm512_add_epi32(whole, _mm512_set1_epi32(0x8080)), _mm512_set1_epi32(0x8080));
                const __m512i in_order = _mm512_permutexvar_epi8(_mm512_load_si512(PLACES), bytes);
                by_part = _mm512_dpbusd_epi32(by_part, _mm512_set1_epi8(1), in_order);
                _mm512_storeu_si512(to, in_order);
                to += QUADS / 2;
            }
            int32_t sums[16];
            _mm512_storeu_si512(sums, by_part);
            // A group that is not finite must not come out finite.
            group[g] = {most < 0x7f800000 ? power_of_two(exponent - 23) : NAN, sum_lanes(sum), {}};
            for (int part = 0; part < PARTS; ++part)
                for (int of = 0; of < 2; ++of) group[g].start[part] -= 8 * (sums[2 * part + of] + sums[2 * PARTS + 2 * part + of]);
        }
    }

  private:
    static INLINE_MEMBER __m512i size_of(vf x) { return (__m512i)((vi)x & 0x7fffffff); }
    // Numbers up to that of `bits` are below 2^exponent by more than a 256th of it, or their highest part would be no byte.
    static INLINE_MEMBER int above(int32_t bits) {
        const int exponent = ((bits + 0x20000) >> 23) - 126;
        return exponent > -100 ? exponent : -100;
    }
    static INLINE_MEMBER float power_of_two(int exponent) {
        const int32_t bits = (exponent + 127) << 23;
        float value;
        memcpy(&value, &bits, sizeof value);
        return value;
    }
#define STEPS(first, byte)                                                                                              \
    (first) * 4 + byte, (first) * 4 + 16 + byte, (first) * 4 + 4 + byte, (first) * 4 + 20 + byte, (first) * 4 + 8 + byte, \
        (first) * 4 + 24 + byte, (first) * 4 + 12 + byte, (first) * 4 + 28 + byte
    alignas(64) static constexpr uint8_t PLACES[64] = {STEPS(0, 2), STEPS(0, 1), STEPS(0, 0), STEPS(8, 2), STEPS(8, 1), STEPS(8, 0)};
#undef STEPS
};

// P panels against R rows from `row` on; sums [R, STEP].
template <int R, int P, class Form>
void dots(const WholeRows &rows, int64_t row, const Form *panels, const Form *ahead, float *sums) {
    const __m512i nibbles = _mm512_set1_epi8(15);
    vf acc[R][2 * P];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) acc[r][v] = vf{};
    const int32_t *x = rows.quads + row * rows.num_groups * rows.QUADS;
    const int64_t apart = rows.num_groups * rows.QUADS;
    for (int64_t g = 0; g < rows.num_groups; ++g) {
        const WholeRows::Group *group = rows.groups + row * rows.num_groups + g;
        __m512i parts[R][2 * P][rows.PARTS];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < 2 * P; ++v)
#pragma GCC unroll 3
                for (int p = 0; p < rows.PARTS; ++p) parts[r][v][p] = _mm512_set1_epi32(group[r * rows.num_groups].start[p]);
        for (int64_t i = g * rows.GROUP; i < (g + 1) * rows.GROUP; i += Form::CHUNK, x += rows.PARTS * 2) {
#pragma GCC unroll 2
            for (int q = 0; q < P; ++q) {
                const auto chunk = panels[q].chunk(i);
                ahead[q].fetch_chunk(i);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const __m512i codes = (__m512i)chunk.lanes[half];
                    const __m512i first = _mm512_and_si512(codes, nibbles), second = _mm512_and_si512(_mm512_srli_epi32(codes, 4), nibbles);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r)
#pragma GCC unroll 3
                        for (int p = 0; p < rows.PARTS; ++p) {
                            __m512i &sum = parts[r][2 * q + half][p];
                            sum = _mm512_dpbusd_epi32(sum, first, _mm512_set1_epi32(x[r * apart + 2 * p]));
                            sum = _mm512_dpbusd_epi32(sum, second, _mm512_set1_epi32(x[r * apart + 2 * p + 1]));
                        }
                }
            }
        }
#pragma GCC unroll 2
        for (int q = 0; q < P; ++q) {
            const auto of = panels[q].group(g * rows.GROUP);
            ahead[q].fetch_group(g * rows.GROUP);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const vf zero = fma(splat(8.0f), of.scale[half], of.zero[half]);
#pragma GCC unroll 4
                for (int r = 0; r < R; ++r) {
                    const WholeRows::Group &own = group[r * rows.num_groups];
                    const __m512i *part = parts[r][2 * q + half];
                    const vf upper = (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(part[0], 8), part[1]));  // exact
                    const vf whole = fma(upper, splat(256.0f), (vf)_mm512_cvtepi32_ps(part[2]));
                    vf &sum = acc[r][2 * q + half];
                    sum = fma(whole, of.scale[half] * splat(own.unit), sum);
                    sum = fma(zero, splat(own.sum), sum);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) store(sums + r * STEP + v * VW, acc[r][v]);
}

template <class Form>
void dots_of_panel(const WholeRows &rows, int64_t m, const Form &panel, const Form &ahead, float *sums) {
    int64_t row = 0;
    for (; m - row >= 2; row += 2) dots<2, 1>(rows, row, &panel, &ahead, sums + row * STEP);
    if (row < m) dots<1, 1>(rows, row, &panel, &ahead, sums + row * STEP);
}

// Few rows of a form whose chunks are eight codes in a lane, as Int4's.
template <class Form>
struct DotRows {
    static bool takes(const LinearArguments &a) { return a.uses_amx && a.m <= Form::FEW && may_use_amx(); }

    static void member(const LinearArguments &a, Team *team) {
        bool is_round = false;
        each_columns(a, team, DIRECT, WholeRows::bytes(a.m, a.k),
                     [&](const LinearArguments &behind, Columns mine, Columns next, float *sums, char *rest) {
            const WholeRows rows = WholeRows::at(rest, a.m, a.k);
            for (int64_t r = 0; r < a.m && !is_round; ++r) rows.round(behind.x + r * behind.x_stride, r);
            is_round = true;
            const Columns then = next.count ? next : mine;
            Form panels[SIDE], ahead[SIDE];
            for (int q = 0; q < SIDE; ++q) {
                panels[q] = Form::at(a, mine.panel + q % mine.count);
                ahead[q] = Form::at(a, then.panel + q % then.count);
            }
            if (a.m == 1 && mine.count == SIDE) return dots<1, SIDE>(rows, 0, panels, ahead, sums);
            for (int q = 0; q < mine.count; ++q) dots_of_panel(rows, a.m, panels[q], ahead[q], sums + q * NR);
        });
    }
};

}  // namespace

#else
#define INT4_DOTS 0
#endif
