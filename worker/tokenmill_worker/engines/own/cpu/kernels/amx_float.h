// Linear layers in the matrix registers, for weights of any form: rows in blocks, each panel of
// columns against all of a block.
#pragma once

#include "amx_tiles.h"

#if AMX
// AMX_BYTES: of the parts of a block of rows, where rows are many: half the second-level cache
#define AMX_BYTES (1 << 20)
// AMX_OWN_ROWS: times threads: up to so many every thread splits for itself, which is sooner done
// than shared
#define AMX_OWN_ROWS 128
#define AMX_DEEP 2048        // steps of k whose parts stay in the second-level cache beside them

namespace {

template <class Form>
struct AmxLinear {
    static bool takes(const LinearArguments &a) {
        return a.uses_amx && a.m > Form::FEW && amx_row_bytes(a.k);
    }

    // Rows [first_row, end_row), the first of a tile.
    static void one_panel(const SplitRows &rows, int64_t first_row, int64_t end_row,
                          const Form &panel, const Form &ahead, uint32_t *lanes, float *sums,
                          TileShapes &shapes, Prefetch &prefetch) {
        const int64_t blocks = rows.k / AMX_DEPTH, deep = AMX_DEEP / AMX_DEPTH;
        const int64_t kept = end_row - first_row > 2 * AMX_ROWS ? -1 : AHEAD;
        for (int64_t first = 0; first < blocks; first += deep) {
            const int64_t last = first + deep < blocks ? first + deep : blocks;
            const AmxTiles<Form, true> two{rows, panel, ahead,  lanes, first,
                                           last, kept,  shapes, STEP,  &prefetch};
            const AmxTiles<Form, false> one{rows, panel, ahead,  lanes, first,
                                            last, kept,  shapes, STEP,  &prefetch};
            for (int64_t row = first_row; row < end_row; row += 2 * AMX_ROWS) {
                float *to = sums + (row - first_row) * STEP;
                const int64_t high = rows.height(row), low = rows.height(row + AMX_ROWS);
                if (low)
                    row > first_row ? two.template multiply<true>(row, high, low, to)
                                    : two.template multiply<false>(row, high, low, to);
                else
                    row > first_row ? one.template multiply<true>(row, high, low, to)
                                    : one.template multiply<false>(row, high, low, to);
            }
        }
    }

    static void member(const LinearArguments &a, PoolThread *thread) {
        const bool is_own = a.m <= COMMIT_ROWS && a.m * thread->parts <= AMX_OWN_ROWS;
        const int64_t own = is_own ? a.m * amx_row_bytes(a.k) / (int64_t)sizeof(float) : 0,
                      one_row = (a.k + 15) & ~(int64_t)15;
        const int64_t lanes_of_panel =
            (a.k < AMX_DEEP ? a.k : AMX_DEEP) / AMX_DEPTH * Factors<Form>::BLOCK;
        const int64_t fit = AMX_BYTES / amx_row_bytes(a.k),
                      most = fit < COMMIT_ROWS ? COMMIT_ROWS : fit;
        const int64_t rest_floats = lanes_of_panel + one_row + own;
        // Sums, then right factors, a row behind its norm, and rows of one's own.
        const int64_t num_sums = sum_floats<2 * AMX_ROWS>(a.m, most);
        float *lanes =
            (float *)thread->scratch((num_sums + rest_floats) * sizeof(float)) + num_sums;
        float *room = lanes + lanes_of_panel;
        const SplitRows rows = SplitRows::at(is_own ? (char *)(room + one_row) : a.workspace, a);
        const auto split = [&](int64_t first, int64_t count, int64_t) {
            for (int64_t r = first; r < first + count; ++r) {
                const bool goes_on = r + 1 < first + count;
                const float *x = input_row(a, r, goes_on, room);
                rows.template split<Form::PARTS == 0>(x, goes_on && x != room ? a.x_stride : 0, a.k,
                                                      r);
            }
        };
        if (is_own)
            split(0, a.m, -1);
        else
            thread->parallel_for(a.m, 4, split);
        LinearArguments behind = a;
        behind.norm.weight = nullptr;
        TileShapes shapes;
        Prefetch &prefetch = read_ahead(a, thread);
        each_columns<2 * AMX_ROWS, true>(
            behind, thread, most, rest_floats * sizeof(float),
            [&](const LinearArguments &some, Columns mine, Columns next, float *sums, char *rest) {
                const Columns then = next.count ? next : mine;
                const int64_t row = some.m == a.m ? 0 : (some.x - a.x) / a.x_stride;
                for (int64_t q = 0; q < mine.count; ++q)
                    one_panel(rows, row, row + some.m, Form::at(a, mine.panel + q),
                              Form::at(a, then.panel + q % then.count), (uint32_t *)rest,
                              sums + q * NR, shapes, prefetch);
            });
    }
};

}  // namespace

#else

template <class Form>
struct AmxLinear {
    static bool takes(const LinearArguments &) { return false; }
    static void member(const LinearArguments &, PoolThread *) {}
};

#endif
