// Finds a row's highest output (argmax.h) from the highest byte of the row's numbers, without most
// of the other products.
//
// The lower bytes make two thirds of a product's work. The length of an output's column and the
// length of the lower bytes of the row bound how far they can move it (Cauchy and Schwarz): about a
// hundredth of the two vectors' lengths. An output that stays below the row's best so far, whatever
// its lower bytes are, needs no more work. A panel with any other output is computed whole. The
// highest output is always among those, so the result equals that of all outputs, bit for bit.
//
// Threads share the best output of each row: columns of rare tokens are near each other, and below
// others.
//
// Bounding the part of a search that can be skipped is branch and bound (Land and Doig 1960).
#pragma once

#include "byte_dot.h"

#define SEARCH_HEIGHT 4     // rows of a tile, against one panel
#define SEARCH_DEPTH 8192   // steps of k at most

namespace {

template <class Form>
class ArgmaxSearch {
    typedef Int24RowsOf<Form> Rows;

  public:
    static bool takes(const LinearArguments &a) {
        return Form::HAS_LENGTHS && a.epilogue == ARGMAX && !a.bias && a.k <= SEARCH_DEPTH;
    }

    // For all rows, which are rounded.
    void open(const Rows &rows, const LinearArguments &a) {
        for (int64_t r = 0; r < a.m; ++r) {
            best_[r] = -INFINITY;
            double squares = 0.0;
            for (int64_t g = 0; g < rows.num_groups; ++g)
                squares += (double)rows.units(r)[g] * rows.units(r)[g];
            // The lower two parts of a number are at most 2^15 + 2^7. Sums of bounds and of outputs
            // are rounded: each by a 2^15th of this for each group and some, since all of a number
            // is a 256th as long again.
            moves_[r] = (float)(1.01 * UNIT * (32768 + 128) * sqrt(squares * DOT_GROUP));
        }
    }

    // What the other threads have seen of this row of kernels.
    void read_others(const LinearArguments &a, const PoolThread &thread) {
        for (int32_t part = 0; part < thread.parts; ++part) {
            const ArgmaxSeen &seen = ArgmaxSeen::of(a.y, part);
            if (part == thread.part || !seen.is_open(thread.row())) continue;
            for (int64_t r = 0; r < a.m; ++r)
                if (seen.read_best(r) > best_[r]) best_[r] = seen.read_best(r);
        }
    }

    // Sums [a.m, STEP]: what `byte_dot` gives, or -infinity for all of a row that can not hold its
    // highest output.
    void one_panel(const Rows &rows, const LinearArguments &a, const PoolThread &thread,
                   int64_t panel_number, const Ordered &codes, const Form &panel, const Form &ahead,
                   float *sums) {
        const int64_t width = a.n - panel_number * NR;
        const float *lengths = Form::lengths(a) + panel_number * NR;
        const vf moves[2] = {load(lengths), load(lengths + VW)};
        unsigned fetched = 1;
        for (int64_t row = 0; row < a.m; row += SEARCH_HEIGHT, fetched <<= 1) {
            alignas(64) float found[SEARCH_HEIGHT * NR];
            const int64_t height = a.m - row < SEARCH_HEIGHT ? a.m - row : SEARCH_HEIGHT;
            switch (height) {
                case 4: coarse<4>(rows, row, codes, panel, ahead, fetched & 15, found); break;
                case 3: coarse<3>(rows, row, codes, panel, ahead, fetched & 15, found); break;
                case 2: coarse<2>(rows, row, codes, panel, ahead, fetched & 15, found); break;
                default: coarse<1>(rows, row, codes, panel, ahead, fetched & 15, found);
            }
            for (int64_t r = 0; r < height; ++r) {
                float *to = sums + (row + r) * STEP;
                const vf move = splat(moves_[row + r]);
                const vf left = fma(moves[0], move, load(found + r * NR)),
                         right = fma(moves[1], move, load(found + r * NR + VW));
                if (!reaches(left, right, best_[row + r])) {
                    store(to, splat(-INFINITY)), store(to + VW, splat(-INFINITY));
                    continue;
                }
                byte_dot<1, 1>(rows, row + r, &codes, &panel, &panel, 0, to);
                const float highest = max_lanes(larger(load(to), load(to + VW)));
                // Padding columns do not count, nor outputs so small that their bounds are NaN.
                if (width >= NR && fabsf(highest) > TINY && highest * UNIT > best_[row + r])
                    ArgmaxSeen::of(a.y, thread.part)
                        .publish_best(row + r, best_[row + r] = highest * UNIT);
            }
        }
    }

  private:
    static constexpr float UNIT = 1.0f / 65536, TINY = 1e-20f;  // UNIT: of the highest parts
    float best_[ARGMAX_ROWS];   // that this thread knows of, times UNIT
    float moves_[ARGMAX_ROWS];  // by how much the lower parts move an output of length 1 at most,
                                // times UNIT

    // NaN reaches everything.
    static bool reaches(vf left, vf right, float best) {
        return any_lane(~((vi)(left < splat(best)) & (vi)(right < splat(best))));
    }

    // Outputs [R, NR] by the highest parts alone, times UNIT.
    template <int R>
    static void coarse(const Rows &rows, int64_t row, const Ordered &codes_of, const Form &panel,
                       const Form &ahead, unsigned fetched, float *found) {
        const int64_t num_groups = rows.num_groups;
        const int32_t *x[R];
        vf acc[R][2];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) x[r] = rows.quads(row + r), acc[r][0] = acc[r][1] = vf{};
        for (int64_t g = 0; g < num_groups; ++g) {
            if (fetched & 1) ahead.fetch_group(g * DOT_GROUP);
            __m512i parts[R][2];
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r)
                parts[r][0] = parts[r][1] = _mm512_set1_epi32(rows.highest_starts(row + r)[g]);
#pragma GCC unroll 4
            for (int eight = 0; eight < DOT_GROUP / 8; ++eight) {
                const int64_t i = g * DOT_GROUP + eight * 8;
                if (fetched >> eight & 1)
                    for (int64_t chunk = i; chunk < i + 8; chunk += Form::CHUNK)
                        ahead.fetch_chunk(chunk);
#pragma GCC unroll 2
                for (int quad = 0; quad < 2; ++quad) {
                    __m512i codes[2];
                    codes_of.quads(i, quad, codes);
#pragma GCC unroll 4
                    for (int r = 0; r < R; ++r) {
                        const __m512i bytes = _mm512_set1_epi32(x[r][eight * 2 * DOT_PARTS + quad]);
                        add_dots(parts[r][0], codes[0], bytes);
                        add_dots(parts[r][1], codes[1], bytes);
                    }
                }
            }
            vf scale[2], none[2];
            Form::scales_of(panel.group(g * DOT_GROUP), scale, none);
#pragma GCC unroll 4
            for (int r = 0; r < R; ++r) {
                const vf unit = splat(rows.units(row + r)[g]);
                x[r] += Rows::QUADS;
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half)
                    acc[r][half] = fma((vf)_mm512_cvtepi32_ps(parts[r][half]), scale[half] * unit,
                                       acc[r][half]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r)
            store(found + r * NR, acc[r][0]), store(found + r * NR + VW, acc[r][1]);
    }
};

}  // namespace
