// Multiplies rows of float32 by codes of 4 or 8 bits, by dot products of bytes.
//
// A float32 chain takes one multiply-add for each weight of a vector's lanes. A number in three
// bytes takes three quarters of one, since VPDPBUSD sums the products of four bytes, and codes need
// no conversion to floats. A group's sums are joined, scaled and added in float32. The rest of the
// group's zero beside the codes' offset is multiplied by the sum of the row's numbers.
//
// A form (weight_form.h) has
//     OFFSET        its codes c, counted from 0, stand for scale · (c − OFFSET) + zero
//     FITS          a group's sum of products fits 32 bits
//     IN_PLACE      its codes lie in order; otherwise they are put in order first, where rows are
//                   more than a few
//     HAS_LENGTHS   has the lengths of its columns, for argmax_byte_dot.h, as
//         static const float *lengths(const LinearArguments &);    [n] of vectors of k weights
//     DOT_ROWS      rows up to which this is faster than matrix registers
//     void quads(int64_t i, int quad, __m512i *to) const;
//         codes of steps i, i + 4, i + 1, i + 5, or (quad 1) i + 2, …
//     static void scales_of(const Group &, vf *scale, vf *zero);
//
// A row's bits depend neither on its batch nor on the thread, but are not those of the chains in
// float_tile.h.
#pragma once

#include "decode_weights.h"
#include "int24_rows.h"

#if BYTE_DOT
#define DOT_HEIGHT 2         // rows of a tile, against one panel
// DOT_FEW: rows up to which all tiles fetch all of the panel ahead, else the first four a quarter
// each
#define DOT_FEW 8
// DOT_BYTES: of a block of whole rows, where rows are many: their sums stay near the first-level
// cache
#define DOT_BYTES (1 << 17)
// DOT_OWN_ROWS: so many more are rounded, where every thread does it for itself: that is sooner
// done than shared
#define DOT_OWN_ROWS 64

namespace {

// In assembly, since GCC moves sums to and fro around the intrinsic.
INLINE void add_dots(__m512i &sum, __m512i codes, __m512i bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(bytes));
}

template <class Form>
using Int24RowsOf = Int24Rows<Form::OFFSET, Form::FITS>;

// A panel's codes as they come.
template <class Form>
struct InPlace {
    const Form &form;
    INLINE_MEMBER void quads(int64_t i, int quad, __m512i *to) const { form.quads(i, quad, to); }
};

// … or brought into order before: [k / 8][quads][NR] lanes.
struct Ordered {
    const __m512i *codes;
    template <class Form>
    static void make(const Form &form, int64_t k, __m512i *to) {
        for (int64_t i = 0; i < k; i += 8, to += 4) form.quads(i, 0, to), form.quads(i, 1, to + 2);
    }
    INLINE_MEMBER void quads(int64_t i, int quad, __m512i *to) const {
        for (int half = 0; half < 2; ++half) to[half] = codes[i / 2 + 2 * quad + half];
    }
};

// P panels against R rows from `row` on; sums [R, STEP]. `fetched`: a bit for each eight of a
// group's steps that are fetched of the panels ahead, the first with the group's scales.
template <int R, int P, class Codes, class Form>
void byte_dot(const Int24RowsOf<Form> &rows, int64_t row, const Codes *codes_of,
              const Form *panels, const Form *ahead, unsigned fetched, float *sums) {
    constexpr int V = 2 * P;
    const int64_t num_groups = rows.num_groups;
    const int32_t *x[R];
    vf acc[R][V];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
        x[r] = rows.quads(row + r);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[r][v] = vf{};
    }
    for (int64_t g = 0; g < num_groups; ++g) {
        if (fetched & 1)
            for (int q = 0; q < P; ++q) ahead[q].fetch_group(g * DOT_GROUP);
        __m512i parts[R][V][DOT_PARTS];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) {
                parts[r][v][0] = _mm512_setzero_si512();
                parts[r][v][1] = Form::FITS ? _mm512_setzero_si512()
                                            : _mm512_set1_epi32(rows.upper_starts(row + r)[g]);
                parts[r][v][2] = _mm512_set1_epi32(rows.lowest_starts(row + r)[g]);
            }
#pragma GCC unroll 1
        for (int eight = 0; eight < DOT_GROUP / 8; ++eight) {
            const int64_t i = g * DOT_GROUP + eight * 8;
            if (fetched >> eight & 1)
#pragma GCC unroll 2
                for (int q = 0; q < P; ++q)
#pragma GCC unroll 4
                    for (int64_t chunk = i; chunk < i + 8; chunk += Form::CHUNK)
                        ahead[q].fetch_chunk(chunk);
#pragma GCC unroll 2
            for (int quad = 0; quad < 2; ++quad) {
                __m512i codes[V];
#pragma GCC unroll 2
                for (int q = 0; q < P; ++q) codes_of[q].quads(i, quad, codes + 2 * q);
#pragma GCC unroll 3
                for (int part = 0; part < DOT_PARTS; ++part)
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) {
                        const __m512i bytes = _mm512_set1_epi32(x[r][2 * part + quad]);
#pragma GCC unroll 4
                        for (int v = 0; v < V; ++v) add_dots(parts[r][v][part], codes[v], bytes);
                    }
            }
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) x[r] += 2 * DOT_PARTS;
        }
#pragma GCC unroll 2
        for (int q = 0; q < P; ++q) {
            vf scale[2], zero[2];
            Form::scales_of(panels[q].group(g * DOT_GROUP), scale, zero);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const vf unit = splat(rows.units(row + r)[g]);
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    const __m512i *part = parts[r][2 * q + half];
                    const __m512i upper =
                        _mm512_add_epi32(_mm512_slli_epi32(part[0], 8), part[1]);
                    vf whole;
                    if (Form::FITS)
                        whole = (vf)_mm512_cvtepi32_ps(
                            _mm512_add_epi32(_mm512_slli_epi32(upper, 8), part[2]));
                    else
                        whole = fma((vf)_mm512_cvtepi32_ps(upper), splat(256.0f),
                                    (vf)_mm512_cvtepi32_ps(part[2]));
                    vf &sum = acc[r][2 * q + half];
                    sum = fma(whole, scale[half] * unit, sum);
                    if (Form::HAS_ZEROS) sum = fma(zero[half], splat(rows.sums(row + r)[g]), sum);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store(sums + r * STEP + v * VW, acc[r][v]);
}

}  // namespace

#include "argmax_byte_dot.h"

namespace {

template <class Form>
struct ByteDotLinear {
    static int64_t most_rows() { return may_use_amx() ? Form::DOT_ROWS : INT64_MAX; }
    static bool takes(const LinearArguments &a) { return a.uses_amx && a.m <= most_rows(); }

    // Rows [first, end).
    template <class Rows, class Codes>
    static void one_panel(const Rows &rows, int64_t first, int64_t end, const Codes &codes,
                          const Form &panel, const Form &ahead, float *sums) {
        const bool is_few = end - first <= DOT_FEW;
        unsigned fetched = is_few ? 15 : 1;
        for (; end - first >= DOT_HEIGHT;
             first += DOT_HEIGHT, sums += DOT_HEIGHT * STEP, fetched <<= !is_few)
            byte_dot<DOT_HEIGHT, 1>(rows, first, &codes, &panel, &ahead, fetched & 15, sums);
        if (first < end) byte_dot<1, 1>(rows, first, &codes, &panel, &ahead, fetched & 15, sums);
    }

    static void member(const LinearArguments &a, PoolThread *thread) {
        typedef Int24RowsOf<Form> Rows;
        const int64_t one_row = (a.k + 15) & ~(int64_t)15;
        const int64_t fit = DOT_BYTES / Rows::row_bytes(a.k),
                      most = fit < COMMIT_ROWS ? COMMIT_ROWS : fit;
        const int64_t height = block_height<DOT_HEIGHT>(a.m, most),
                      blocks = (a.m + height - 1) / height;
        const bool is_own =
            blocks > 1 ? blocks >= thread->parts : a.m * (thread->parts - 1) <= DOT_OWN_ROWS;
        const int64_t own = is_own ? height * Rows::row_bytes(a.k) / (int64_t)sizeof(float) : 0;
        const int64_t lanes = Form::IN_PLACE ? 0 : a.k / 4 * NR;
        // Sums, then a panel's codes in order, a row behind its norm, and a block of rows of one's
        // own.
        const int64_t num_sums = sum_floats<DOT_HEIGHT>(a.m, most);
        float *room = (float *)thread->scratch((num_sums + lanes + one_row + own) * sizeof(float)) +
                      num_sums + lanes;
        __m512i *ordered = (__m512i *)(room - lanes);
        const Rows rows = Rows::at(is_own ? (char *)(room + one_row) : a.workspace, a.k);
        int64_t held = -1;  // the block that is rounded, by its first row
        const auto round = [&](int64_t first, int64_t count, int64_t) {
            for (int64_t r = first; r < first + count; ++r) {
                const bool goes_on = r + 1 < first + count;
                const float *x = input_row(a, r, goes_on, room);
                rows.round(x, goes_on && x != room ? a.x_stride : 0, is_own ? r - first : r);
            }
        };
        if (!is_own)
            thread->parallel_for(a.m, 4, round);
        else if (blocks == 1)
            round(held = 0, a.m, -1);
        LinearArguments behind = a;
        behind.norm.weight = nullptr;
        const bool searches = ArgmaxSearch<Form>::takes(a);
        ArgmaxSearch<Form> search;
        if constexpr (Form::HAS_LENGTHS)
            if (searches) search.open(rows, a);
        each_columns<DOT_HEIGHT, true>(
            behind, thread, most, (lanes + one_row + own) * sizeof(float),
            [&](const LinearArguments &some, Columns mine, Columns next, float *sums, char *) {
                const Columns then = next.count ? next : mine;
                Form panels[SIDE], ahead[SIDE];
                for (int q = 0; q < SIDE; ++q) {
                    panels[q] = Form::at(a, mine.panel + q % mine.count);
                    ahead[q] = Form::at(a, then.panel + q % then.count);
                }
                if constexpr (Form::HAS_LENGTHS)
                    if (searches) search.read_others(a, *thread);
                if (a.m == 1 && mine.count == SIDE) {
                    const InPlace<Form> both[SIDE] = {{panels[0]}, {panels[1]}};
                    return byte_dot<1, SIDE>(rows, 0, both, panels, ahead, 15, sums);
                }
                const int64_t block = some.m == a.m ? 0 : (some.x - a.x) / a.x_stride,
                              row = is_own ? 0 : block;
                if (is_own && held != block) round(held = block, some.m, -1);
                for (int64_t q = 0; q < mine.count; ++q) {
                    if (Form::IN_PLACE || some.m <= DOT_FEW / 2) {
                        one_panel(rows, row, row + some.m, InPlace<Form>{panels[q]}, panels[q],
                                  ahead[q], sums + q * NR);
                        continue;
                    }
                    Ordered::make(panels[q], a.k, ordered);
                    if constexpr (Form::HAS_LENGTHS)
                        if (searches) {
                            search.one_panel(rows, a, *thread, mine.panel + q, Ordered{ordered},
                                             panels[q], ahead[q], sums + q * NR);
                            continue;
                        }
                    one_panel(rows, row, row + some.m, Ordered{ordered}, panels[q], ahead[q],
                              sums + q * NR);
                }
            });
    }
};

}  // namespace

#else

template <class Form>
struct ByteDotLinear {
    static int64_t most_rows() { return 0; }
    static bool takes(const LinearArguments &) { return false; }
    static void member(const LinearArguments &, PoolThread *) {}
};

#endif

namespace {

template <class Form>
struct Coded {
    static void member(const LinearArguments &a, PoolThread *thread) {
        ByteDotLinear<Form>::takes(a) ? ByteDotLinear<Form>::member(a, thread)
                                      : DecodedLinear<Form>::member(a, thread);
    }
};

}  // namespace

// In place of DECODED_LINEAR (decode_weights.h). `tokenmill_dot_rows`: up to so many rows are
// multiplied as bytes.
#define CODED_LINEAR(form)      \
    LINEAR_MEMBERS(Coded<form>) \
    extern "C" int64_t tokenmill_dot_rows() { return ByteDotLinear<form>::most_rows(); }
