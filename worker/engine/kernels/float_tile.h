// Tiles of rows × panels of float32 weights: one chain of fused multiply-adds over k for each output.
//
// Panels lie SIDE by SIDE, [n / NR / SIDE][k][SIDE][NR], since a tile of few rows and many columns loads least for what
// it multiplies; SIDE panels or one of them are multiplied at a time, by the same chains.
#pragma once

#include "linear.h"

#if VW == 16
#define SIDE 2
#define MR 12
#define SIDE_MR 6
#else
#define SIDE 1
#if VW == 8 || defined(__aarch64__)
#define MR 5
#else
#define MR 4
#endif
#define SIDE_MR MR
#endif
#define STEP (SIDE * NR)  // floats from one step of k to the next

// While panels are multiplied, the next ones are fetched into the second-level cache, evenly over all tiles of rows: the
// first tile would otherwise wait for memory alone and the others for nothing.
struct Tile {
    const float *x, *panel;
    int64_t x_stride, k;
    Output out[SIDE];
    const char *ahead;    // what this tile fetches: two lines for each step of k, `ahead_stride` bytes apart
    int64_t ahead_stride;
};

template <int R, int P>
static void tile(const Tile &t) {
    vf acc[R][2 * P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) acc[r][v] = vf{};
    const float *w = t.panel;
    const char *ahead = t.ahead;
    for (int64_t i = 0; i < t.k; ++i, w += STEP) {
        vf columns[2 * P];
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) {
            columns[v] = load(w + v * VW);
            __builtin_prefetch(w + 8 * STEP + v * VW);
        }
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + t.ahead_stride, 0, 2);
        ahead += 2 * t.ahead_stride;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const vf x = splat(t.x[r * t.x_stride + i]);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * P; ++v) acc[r][v] = fma(x, columns[v], acc[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int q = 0; q < P; ++q) finish_row(t.out[q], acc[r][2 * q], acc[r][2 * q + 1], r);
}

typedef void (*TileFunction)(const Tile &);
static const TileFunction ONE[] = {nullptr, tile<1, 1>, tile<2, 1>, tile<3, 1>, tile<4, 1>,
#if MR > 4
                            tile<5, 1>,
#endif
#if MR > 5
                            tile<6, 1>, tile<7, 1>, tile<8, 1>, tile<9, 1>, tile<10, 1>, tile<11, 1>, tile<12, 1>,
#endif
};
#if SIDE == 2
static const TileFunction BOTH[] = {nullptr, tile<1, 2>, tile<2, 2>, tile<3, 2>, tile<4, 2>, tile<5, 2>, tile<6, 2>};
#endif

// Panels [panel, panel + count), what a thread multiplies at a time: SIDE of them, and single ones at the end, so that
// threads have equal shares.
struct Columns {
    int64_t panel, count;
};
struct Turns {
    int64_t panels, sides;

    Turns(int64_t n, int parts) : panels((n + NR - 1) / NR) {
        sides = (panels - (parts < panels ? parts : panels)) / SIDE;
    }
    int64_t count() const { return sides + panels - sides * SIDE; }
    Columns operator[](int64_t i) const {
        return i < sides ? Columns{i * SIDE, SIDE} : Columns{sides * SIDE + i - sides, 1};
    }
};

// Every row against `columns`, whose weights begin at `weights`, in tiles of nearly equal height, while `ahead_bytes`
// from `ahead` on are fetched.
static void all_rows(const LinearArguments &a, Columns columns, const float *weights, const void *ahead,
                     int64_t ahead_bytes) {
    const bool both = columns.count > 1;
    const int64_t height = both ? SIDE_MR : MR, tiles = (a.m + height - 1) / height;
    const int64_t base = a.m / tiles, extra = a.m % tiles, lines = 2 * tiles * a.k;
    Tile t{a.x, weights, a.x_stride, a.k, {}, (const char *)ahead, (ahead_bytes + lines - 1) / lines};
    for (int q = 0; q < columns.count; ++q) t.out[q] = at_panel(whole_output(a), columns.panel + q, a.n);
    for (int64_t index = 0; index < tiles; ++index) {
        const int64_t rows = base + (index < extra);
#if SIDE == 2
        (both ? BOTH : ONE)[rows](t);
#else
        ONE[rows](t);
#endif
        t.x += rows * a.x_stride;
        t.ahead += 2 * a.k * t.ahead_stride;
        for (int q = 0; q < columns.count; ++q) t.out[q] = below(t.out[q], rows);
    }
}
