// Tiles of rows × panels of float32 weights: one chain of fused multiply-adds over k for each
// output.
//
// Panels lie SIDE by SIDE, [n / NR / SIDE][k][SIDE][NR], since a tile of few rows and many columns
// loads least for what it multiplies; SIDE panels or one of them are multiplied at a time, by the
// same chains. A chain may be cut along k: its sums then wait in memory, as exact as they were.
#pragma once

#include "linear.h"

#if VW == 16
#define SIDE 2
#define MR 12
#define SIDE_MR 6
#else
#define SIDE 1
#if VW == 8
#define MR 6
#elif defined(__aarch64__)
#define MR 5
#else
#define MR 4
#endif
#define SIDE_MR MR
#endif
#define AT_ONCE (16 * SIDE_MR)  // rows of a block, where rows are many
#define OWN_NORMS 8  // times threads
#define PREFETCH_STEPS 8  // of k, between what is fetched for later
#define STEP (SIDE * NR)  // floats from one step of k to the next
#define LINE 16           // floats of a line of the caches

namespace {  // tables of templates are shared between libraries otherwise, whatever machine these
             // were compiled for

// While panels are multiplied, the next ones are fetched into the second-level cache, evenly over
// all tiles of rows: the first tile would otherwise wait for memory alone and the others for
// nothing.
struct Tile {
    const float *x, *panel;
    int64_t x_stride, k;
    float *sums;  // [rows, STEP] of the steps before, and for those behind
    bool first, last;  // last: the sums go where `out` says
    Output out[SIDE];
    const char *ahead;  // what this tile fetches: lines `ahead_stride` bytes apart
    int64_t ahead_stride, fetches;  // fetches: lines of a burst, for PREFETCH_STEPS of k
    Prefetch *prefetch;
};

// CACHED: the panels mostly are, and what comes later is little: it is fetched in bursts, beside
// which the loop is bare. Otherwise the panels come from memory, and so many lines are fetched in
// EACH_STEP.
#define EACH_STEP 2
template <int R, int P, bool CACHED>
void tile(const Tile &t) {
    vf acc[R][2 * P];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v)
            acc[r][v] = t.first ? vf{} : load(t.sums + r * STEP + v * VW);
    const float *w = t.panel;
    const char *ahead = t.ahead;
    const auto fetch = [&](int64_t lines) __attribute__((always_inline)) {
        for (int64_t f = 0; f < lines; ++f, ahead += t.ahead_stride)
            __builtin_prefetch(ahead, 0, 2);
    };
    const auto step = [&](int64_t i) __attribute__((always_inline)) {
        vf columns[2 * P];
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) {
            columns[v] = in_register(load(w + v * VW));
            if (!CACHED && v * VW % LINE == 0) __builtin_prefetch(w + 8 * STEP + v * VW);
        }
        w += STEP;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const vf x = splat(t.x[r * t.x_stride + i]);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * P; ++v) acc[r][v] = fma(x, columns[v], acc[r][v]);
        }
    };
    if (CACHED)
        for (int64_t i = 0; i < t.k;) {
            fetch(t.fetches);
            t.prefetch->fetch();
            const int64_t end = t.k - i < PREFETCH_STEPS ? t.k : i + PREFETCH_STEPS;
            for (; i < end; ++i) step(i);
        }
    else
        for (int64_t i = 0; i < t.k; ++i) {
            fetch(EACH_STEP);
            if (i % PREFETCH_STEPS == 0) t.prefetch->fetch();
            step(i);
        }
    float ends[R * STEP];
    float *sums = t.last ? ends : t.sums;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) store(sums + r * STEP + v * VW, acc[r][v]);
    if (t.last) finish_rows(t.out, P, ends, STEP, R);
}

typedef void (*TileFunction)(const Tile &);
template <bool CACHED>
struct Tiles {
    static constexpr TileFunction ONE[] = {
        nullptr,
        tile<1, 1, CACHED>,
        tile<2, 1, CACHED>,
        tile<3, 1, CACHED>,
        tile<4, 1, CACHED>,
#if MR > 4
        tile<5, 1, CACHED>,
#endif
#if MR > 5
        tile<6, 1, CACHED>,
#endif
#if MR > 6
        tile<7, 1, CACHED>,
        tile<8, 1, CACHED>,
        tile<9, 1, CACHED>,
        tile<10, 1, CACHED>,
        tile<11, 1, CACHED>,
        tile<12, 1, CACHED>,
#endif
    };
#if SIDE == 2
    static constexpr TileFunction BOTH[] = {
        nullptr,
        tile<1, 2, CACHED>,
        tile<2, 2, CACHED>,
        tile<3, 2, CACHED>,
        tile<4, 2, CACHED>,
        tile<5, 2, CACHED>,
        tile<6, 2, CACHED>,
    };
#endif
};

// Panels [panel, panel + count), what a thread multiplies at a time: SIDE of them, or one that has
// no other beside it.
struct Columns {
    int64_t panel, count;
};

// Where the rows of `columns` go.
INLINE void outputs(const LinearArguments &a, Columns columns, Output *out) {
    for (int64_t q = 0; q < columns.count; ++q)
        out[q] = at_panel(whole_output(a), columns.panel + q, a.n);
}

// Steps [first, first + count) of k.
struct Depth {
    int64_t first, count;
};

// Every row against `columns` over some steps of k, whose weights begin at `weights`, in tiles of
// nearly equal height, while `ahead_bytes` from `ahead` on are fetched. `sums` [m, STEP] hold what
// steps of k before and behind share; `finishes`: those of the last steps become outputs.
template <bool CACHED>
void all_rows(const LinearArguments &a, Columns columns, Depth depth, const float *weights,
              float *sums, bool finishes, const void *ahead, int64_t ahead_bytes,
              Prefetch &prefetch) {
    const bool both = columns.count > 1;
    const int64_t height = both ? SIDE_MR : MR, tiles = (a.m + height - 1) / height;
    const int64_t base = a.m / tiles, extra = a.m % tiles;
    const int64_t lines = (ahead_bytes + 63) / 64,
                  times = (depth.count + PREFETCH_STEPS - 1) / PREFETCH_STEPS,
                  fetches = (lines + tiles * times - 1) / (tiles * times),
                  of_tile = CACHED ? fetches * times : EACH_STEP * depth.count,
                  apart = of_tile ? (ahead_bytes + tiles * of_tile - 1) / (tiles * of_tile) : 0;
    Tile t{a.x + depth.first,
           weights,
           a.x_stride,
           depth.count,
           sums,
           depth.first == 0,
           finishes && depth.first + depth.count == a.k,
           {},
           (const char *)ahead,
           apart,
           fetches,
           &prefetch};
    outputs(a, columns, t.out);
    for (int64_t index = 0; index < tiles; ++index) {
        const int64_t rows = base + (index < extra);
#if SIDE == 2
        (both ? Tiles<CACHED>::BOTH : Tiles<CACHED>::ONE)[rows](t);
#else
        Tiles<CACHED>::ONE[rows](t);
#endif
        t.x += rows * a.x_stride;
        if (sums) t.sums += rows * STEP;
        t.ahead += of_tile * apart;
        for (int q = 0; q < columns.count; ++q) t.out[q] = below(t.out[q], rows);
    }
}

INLINE LinearArguments rows_of(LinearArguments a, int64_t first, int64_t most) {
    a.m = a.m - first < most ? a.m - first : most;
    a.x += first * a.x_stride, a.y += first * a.y_stride;
    if (a.residual) a.residual += first * a.y_stride;
    return a;
}

// Rows of a block: whole tiles of HEIGHT, about `most`; up to COMMIT_ROWS all of them.
template <int HEIGHT>
INLINE int64_t block_height(int64_t m, int64_t most) {
    if (m <= COMMIT_ROWS) return m;
    const int64_t parts = m > most ? (m + most - 1) / most : 2, even = (m + parts - 1) / parts;
    return (even + HEIGHT - 1) / HEIGHT * HEIGHT;
}
template <int HEIGHT>
INLINE int64_t sum_floats(int64_t m, int64_t most) {
    const int64_t height = block_height<HEIGHT>(m, most);
    return (height < COMMIT_ROWS ? COMMIT_ROWS : height) * STEP;
}

// What rows behind their norm take that every thread makes for itself, which is sooner done than
// shared where they are few.
INLINE int64_t own_floats(const LinearArguments &a, const PoolThread &thread) {
    return a.norm.weight && a.m * thread.parts <= OWN_NORMS ? a.m * a.k : 0;
}
// All rows behind their norm, from now on without one: each thread's own in `room`, or, without it,
// in the workspace.
INLINE LinearArguments behind_norm(LinearArguments a, PoolThread *thread, float *room) {
    if (!a.norm.weight) return a;
    float *rows = room ? room : (float *)a.workspace;
    const auto make = [&](int64_t first, int64_t count, int64_t) {
        for (int64_t r = first; r < first + count; ++r)
            input_row(a, r, r + 1 < first + count, rows + r * a.k);
    };
    if (room)
        make(0, a.m, -1);
    else
        thread->parallel_for(a.m, 8, make);
    a.x = rows, a.x_stride = a.k, a.norm.weight = nullptr;
    return a;
}

// A linear layer's phase: multiply(some, columns, next, sums, rest) for all of its columns and,
// beyond COMMIT_ROWS, for blocks of its rows, so that threads come to the end together. `some`: the
// layer of these rows; `next`: the columns behind, of count 0 where there are none or these go on.
// It leaves sums [rows, STEP], but is given none for blocks and stores its outputs itself unless it
// LEAVES_SUMS there too; then a block of rows meets all columns before the next one, else columns
// meet all blocks. `rest`: `bytes` of this thread's scratch.
template <int HEIGHT = SIDE_MR, bool LEAVES_SUMS = false, class Multiply>
void each_columns(const LinearArguments &arguments, PoolThread *thread, int64_t most, int64_t bytes,
                  Multiply multiply) {
    const int64_t m = arguments.m, panels = num_panels(arguments.n),
                  own = own_floats(arguments, *thread);
    const int64_t height = block_height<HEIGHT>(m, most), blocks = (m + height - 1) / height;
    const int64_t num_sums = LEAVES_SUMS ? sum_floats<HEIGHT>(m, most) : COMMIT_ROWS * STEP;
    float *sums = (float *)thread->scratch((num_sums + own) * sizeof(float) + bytes);
    char *rest = (char *)(sums + num_sums);
    const LinearArguments a =
        of_thread(behind_norm(arguments, thread, own ? (float *)(rest + bytes) : nullptr), thread);
    const auto finish = [&](const LinearArguments &some, Columns columns) {
        Output out[SIDE];
        outputs(some, columns, out);
        finish_rows(out, columns.count, sums, STEP, some.m);
    };
    if (m > COMMIT_ROWS) {
        const int64_t sides = (panels + SIDE - 1) / SIDE;
        const auto side_of = [&](int64_t unit) {
            return LEAVES_SUMS ? unit % sides : unit / blocks;
        };
        const auto columns_of = [&](int64_t unit) {
            const int64_t panel = side_of(unit) * SIDE;
            return Columns{panel, panels - panel < SIDE ? panels - panel : SIDE};
        };
        const auto rows = [&](int64_t unit) {
            return rows_of(a, (LEAVES_SUMS ? unit / sides : unit % blocks) * height, height);
        };
        const auto work = [&](int64_t unit, int64_t, int64_t next) {
            const bool stays = next < 0 || side_of(next) == side_of(unit);
            multiply(rows(unit), columns_of(unit), stays ? Columns{} : columns_of(next),
                     LEAVES_SUMS ? sums : nullptr, rest);
        };
        if (LEAVES_SUMS)
            thread->parallel_for_commit(sides * blocks, 1, work, [&](int64_t unit, int64_t) {
                finish(rows(unit), columns_of(unit));
            });
        else
            thread->parallel_for(sides * blocks, 1, work);
        return;
    }
    const auto work = [&](int64_t first, int64_t count,
                          int64_t next) __attribute__((always_inline)) {
        const int64_t behind = next % SIDE ? 1 : panels - next < SIDE ? panels - next : SIDE;
        multiply(a, Columns{first, count}, next < 0 ? Columns{} : Columns{next, behind}, sums,
                 rest);
    };
    thread->parallel_for_commit(panels, SIDE, work,
                                [&](int64_t first, int64_t count) { finish(a, {first, count}); });
}

}  // namespace
