// Linear layers in float32 over weights that are kept in a narrower form and become floats on the way.
//
// A source describes its form as a struct, one object for each panel of NR columns, then names its members with
// DECODED_LINEAR(form). Up to DIRECT rows take the weights as they come out of the registers; for more they are written
// to a scratch once and multiplied from there by the tiles of float_tile.h. The sums are the same chains either way: the
// bits of a float32 layer over the decoded weights, whatever the batch.
//
// A form has GROUP (steps of k that share something, and that k is a multiple of) and CHUNK (steps in one load), and
//     static Form at(const LinearArguments &, int64_t panel);
//     const void *start() const; static int64_t bytes(int64_t k);    its codes; those of the next panel lie behind
//     Group group(int64_t i) const;                         what the steps from i on share
//     Chunk chunk(int64_t i) const;                         the codes of the steps from i on
//     void fetch_group(int64_t i) const; void fetch_chunk(int64_t i) const;    the same, into the cache
//     static vf decode(const Group &, const Chunk &, int step, int half);      VW columns of a step
#pragma once

#include "float_tile.h"

#define BLOCK 96       // steps of k whose decoded weights stay in the first-level cache
#define BLOCK_ROWS 64  // rows up to which chains are cut for that: their sums must stay at hand too
#define DEEP 4096      // steps of k from which the second-level cache is too small for a scratch
#if VW == 16
#define DIRECT 8
#define DIRECT_SIDE 4  // rows up to which SIDE panels fit the registers
#else
#define DIRECT 2
#define DIRECT_SIDE 0
#endif

namespace {

// Into the second-level cache.
INLINE void fetch_lines(const void *from, int64_t bytes) {
#pragma GCC unroll 4
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)from + at, 0, 2);
}

// use(i, columns) with the weights of P panels at every step i of `depth`, in order, while those of `ahead` are fetched,
// where there is such.
template <int P, class Form, class Use>
INLINE void each_step(const Form *panels, const Form *ahead, Depth depth, Use use) {
    for (int64_t first = depth.first; first < depth.first + depth.count; first += Form::GROUP) {
        typename Form::Group group[P];
#pragma GCC unroll 2
        for (int q = 0; q < P; ++q) {
            group[q] = panels[q].group(first);
            if (ahead) ahead[q].fetch_group(first);
        }
        for (int64_t i = first; i < first + Form::GROUP; i += Form::CHUNK) {
            typename Form::Chunk chunk[P];
#pragma GCC unroll 2
            for (int q = 0; q < P; ++q) {
                chunk[q] = panels[q].chunk(i);
                if (ahead) ahead[q].fetch_chunk(i);
            }
#pragma GCC unroll 8
            for (int step = 0; step < Form::CHUNK; ++step) {
                vf columns[2 * P];
#pragma GCC unroll 4
                for (int v = 0; v < 2 * P; ++v) columns[v] = Form::decode(group[v / 2], chunk[v / 2], step, v % 2);
                use(i + step, columns);
            }
        }
    }
}

template <int R, int P, class Form>
void direct(const LinearArguments &a, int64_t panel, const Form *panels, const Form *ahead) {
    vf acc[R][2 * P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) acc[r][v] = vf{};
    each_step<P>(panels, ahead, {0, a.k}, [&](int64_t i, const vf *columns) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const vf x = splat(a.x[r * a.x_stride + i]);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * P; ++v) acc[r][v] = fma(x, columns[v], acc[r][v]);
        }
    });
    float sums[R * STEP];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) store(sums + r * STEP + v * VW, acc[r][v]);
    Output out[P];
    for (int q = 0; q < P; ++q) out[q] = at_panel(whole_output(a), panel + q, a.n);
    finish_rows(out, P, sums, R);
}

template <class Form>
struct Decoded {
    typedef void (*Direct)(const LinearArguments &, int64_t, const Form *, const Form *);

    static void few_rows(const LinearArguments &a, const Columns &columns, const Form *panels, const Form *ahead) {
        static const Direct ONE_PANEL[] = {nullptr, direct<1, 1, Form>, direct<2, 1, Form>,
#if DIRECT > 2
                                           direct<3, 1, Form>, direct<4, 1, Form>, direct<5, 1, Form>,
                                           direct<6, 1, Form>, direct<7, 1, Form>, direct<8, 1, Form>,
#endif
        };
#if DIRECT_SIDE
        static const Direct PANELS[] = {nullptr, direct<1, 2, Form>, direct<2, 2, Form>, direct<3, 2, Form>, direct<4, 2, Form>};
        if (columns.count == SIDE && a.m <= DIRECT_SIDE) return PANELS[a.m](a, columns.panel, panels, ahead);
#endif
        for (int q = 0; q < columns.count; ++q) ONE_PANEL[a.m](a, columns.panel + q, panels + q, ahead + q);
    }

    // The codes behind `ahead` are fetched by the tiles, which have the time.
    static void some_rows(const LinearArguments &a, const Columns &columns, const Form *panels, const Form &ahead,
                          int64_t num_ahead, bool near, float *scratch) {
        const int64_t block = near && a.k > BLOCK ? BLOCK : a.k;
        float *sums = scratch + block * STEP;
        for (int64_t first = 0; first < a.k; first += block) {
            const Depth depth{first, a.k - first < block ? a.k - first : block};
            for (int q = 0; q < columns.count; ++q)
                each_step<1, Form>(panels + q, nullptr, depth, [&](int64_t i, const vf *w) __attribute__((always_inline)) {
                    store(scratch + (i - first) * STEP + q * NR, w[0]);
                    store(scratch + (i - first) * STEP + q * NR + VW, w[1]);
                });
            const char *codes = (const char *)ahead.start() + num_ahead * Form::bytes(first);
            const auto multiply = block < a.k ? all_rows<true> : all_rows<false>;
            multiply(a, columns, depth, scratch, sums, codes, num_ahead * Form::bytes(depth.count));
        }
    }

    static void many_rows(const LinearArguments &a, const Columns &columns, const Form *panels, const Form &ahead,
                          int64_t num_ahead, float *scratch) {
        const bool near = a.m <= BLOCK_ROWS || a.k > DEEP;
        const int64_t height = near ? BLOCK_ROWS : a.m;
        for (int64_t row = 0; row < a.m; row += height, num_ahead = 0) {
            LinearArguments some = a;
            some.m = a.m - row < height ? a.m - row : height;
            some.x += row * a.x_stride, some.y += row * a.y_stride;
            if (a.residual) some.residual += row * a.y_stride;
            some_rows(some, columns, panels, ahead, num_ahead, near, scratch);
        }
    }

    static void member(const LinearArguments &a, const Team &team) {
        float *scratch = (float *)(a.workspace + team.part * thread_bytes(a.k));
        const Turns turns(a.n, team.parts);
        for (int64_t turn = team.take(1), next; turn < turns.count(); turn = next) {
            next = team.take(1);  // early, to know what to fetch meanwhile
            const bool ends = next >= turns.count();
            const Columns mine = turns[turn], then = turns[ends ? turn : next];
            Form panels[SIDE], ahead[SIDE];
            for (int q = 0; q < SIDE; ++q) {
                panels[q] = Form::at(a, mine.panel + q % mine.count);
                ahead[q] = Form::at(a, then.panel + q % then.count);
            }
            if (a.m <= DIRECT) few_rows(a, mine, panels, ahead);
            else many_rows(a, mine, panels, ahead[0], ends ? 0 : then.count, scratch);
        }
    }

    static int64_t thread_bytes(int64_t k) {
        return ((k > DEEP ? BLOCK : k) + BLOCK_ROWS) * STEP * (int64_t)sizeof(float);
    }
};

}  // namespace

#define DECODED_LINEAR(form)                                                                                    \
    extern "C" int tokenmill_panel_width() { return NR; }                                                       \
    /* Bytes that each thread takes of the workspace. */                                                        \
    extern "C" int64_t tokenmill_thread_bytes(int64_t k) { return Decoded<form>::thread_bytes(k); }             \
    extern "C" int64_t tokenmill_linear_member(const LinearArguments *arguments, const Team *team) {            \
        Decoded<form>::member(*arguments, *team);                                                               \
        return 0;                                                                                               \
    }                                                                                                           \
    extern "C" void tokenmill_linear(const LinearArguments *arguments) {                                        \
        alone(arguments->num_threads, [=](const Team &team) { return tokenmill_linear_member(arguments, &team); }); \
    }
