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

// While a panel is multiplied, the next one is fetched into the second-level cache, evenly over all tiles of rows: the
// first tile would otherwise wait for memory alone and the others for nothing.
struct Tile {
    const float *x, *panel;
    int64_t x_stride, k;
    Output out;
    const char *ahead;   // what this tile fetches, `ahead_stride` bytes for each step of k
    int64_t ahead_stride;
};

// ALONE: the only tile of its panel, which has more to fetch and comes to a panel that is only on its way.
template <int R, bool ALONE>
static void tile(const Tile &t) {
    vf acc[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = vf{};
    const float *w = t.panel;
    const char *ahead = t.ahead;
    for (int64_t i = 0; i < t.k; ++i, w += NR) {
        const vf left = load(w), right = load(w + VW);
        __builtin_prefetch(ahead, 0, 2);
        if (ALONE) {
            __builtin_prefetch(ahead + 64, 0, 2);
            __builtin_prefetch(w + 8 * NR);
            __builtin_prefetch(w + 8 * NR + 16);
        }
        ahead += t.ahead_stride;
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
#define HEIGHT(R) {tile<R, false>, tile<R, true>}
static const TileFunction TILES[][2] = {{nullptr, nullptr}, HEIGHT(1), HEIGHT(2), HEIGHT(3), HEIGHT(4),
#if MR > 4
                                 HEIGHT(5),
#endif
#if MR > 5
                                 HEIGHT(6), HEIGHT(7), HEIGHT(8), HEIGHT(9), HEIGHT(10), HEIGHT(11), HEIGHT(12),
#endif
};

// Every row against one panel, in tiles of nearly equal height, while `ahead_bytes` from `ahead` on are fetched.
static void all_rows(const LinearArguments &a, const float *panel, Output out, const void *ahead, int64_t ahead_bytes) {
    const int64_t tiles = (a.m + MR - 1) / MR, base = a.m / tiles, extra = a.m % tiles;
    const int64_t stride = (ahead_bytes + tiles * a.k - 1) / (tiles * a.k);
    const float *x = a.x;
    for (int64_t index = 0; index < tiles; ++index) {
        const int64_t rows = base + (index < extra);
        TILES[rows][tiles == 1]({x, panel, a.x_stride, a.k, out, (const char *)ahead + index * a.k * stride, stride});
        x += rows * a.x_stride;
        out = below(out, rows);
    }
}
