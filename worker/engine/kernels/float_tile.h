// A tile of rows × one panel of float32 weights: one chain of fused multiply-adds over k for each output.
#pragma once

#include "linear.h"

#if VW == 16
#define MR 12
#elif VW == 8 || defined(__aarch64__)
#define MR 5
#else
#define MR 4
#endif

struct Tile {
    const float *x, *panel;
    int64_t x_stride, k;
    Output out;
};

template <int R>
static void tile(const Tile &t) {
    vf acc[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = vf{};
    const float *w = t.panel;
    for (int64_t i = 0; i < t.k; ++i, w += NR) {
        const vf left = load(w), right = load(w + VW);
        __builtin_prefetch(w + 24 * NR);
        __builtin_prefetch(w + 24 * NR + 16);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const vf x = splat(t.x[r * t.x_stride + i]);
            acc[r][0] = fma(x, left, acc[r][0]);
            acc[r][1] = fma(x, right, acc[r][1]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) finish_row(t.out, acc[r][0], acc[r][1], r);
}

typedef void (*TileFunction)(const Tile &);
static const TileFunction TILES[] = {nullptr, tile<1>, tile<2>, tile<3>, tile<4>,
#if MR > 4
                              tile<5>,
#endif
#if MR > 5
                              tile<6>, tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>,
#endif
};

// Every row against one panel, in tiles of nearly equal height.
static void all_rows(const LinearArguments &a, const float *panel, Output out) {
    const int64_t tiles = (a.m + MR - 1) / MR, base = a.m / tiles, extra = a.m % tiles;
    const float *x = a.x;
    for (int64_t index = 0; index < tiles; ++index) {
        const int64_t rows = base + (index < extra);
        TILES[rows]({x, panel, a.x_stride, a.k, out});
        x += rows * a.x_stride;
        out = below(out, rows);
    }
}
