// Linear layers in float32 over weights in a narrower form, which are decoded to floats during the
// product.
//
// A source describes its form as a struct, one object for each panel of NR columns, then names its
// members with DECODED_LINEAR(form). Up to DIRECT rows use the weights from the registers; for more
// rows they are written to scratch once and multiplied from there by the tiles of float_tile.h. The
// sums are the same chains either way: the bits of a float32 layer over the decoded weights,
// whatever the batch.
//
// Besides what weight_form.h asks of a form, these have
//     const void *start() const;          its codes; those of the next panel lie behind
//     static int64_t bytes(int64_t k);
#pragma once

#include "amx_float.h"
#include "weight_form.h"

// BLOCK: steps of k whose decoded weights stay in the first-level cache, up to COMMIT_ROWS rows
#define BLOCK 96
#define DEEP 4096      // steps of k from which the second-level cache is too small for a scratch
#if VW == 16
#define DIRECT 8
#define DIRECT_SIDE 4  // rows up to which SIDE panels fit the registers
#else
#define DIRECT 2
#define DIRECT_SIDE 0
#endif

namespace {

template <int R, int P, class Form>
void direct(const LinearArguments &a, const Form *panels, const Form *ahead, float *sums) {
    vf acc[R][2 * P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) acc[r][v] = vf{};
    each_step<P>(panels, ahead, {0, a.k},
                 [&](int64_t i, int step, const vf *columns) __attribute__((always_inline)) {
#pragma GCC unroll 8
                     for (int r = 0; r < R; ++r) {
                         const vf x = splat(a.x[r * a.x_stride + i + step]);
#pragma GCC unroll 4
                         for (int v = 0; v < 2 * P; ++v) acc[r][v] = fma(x, columns[v], acc[r][v]);
                     }
                 });
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * P; ++v) store(sums + r * STEP + v * VW, acc[r][v]);
}

template <class Form>
struct DecodedLinear {
    typedef void (*Direct)(const LinearArguments &, const Form *, const Form *, float *);

    static void few_rows(const LinearArguments &a, int64_t count, const Form *panels,
                         const Form *ahead, float *sums) {
        static const Direct ONE_PANEL[] = {
            nullptr,
            direct<1, 1, Form>,
            direct<2, 1, Form>,
#if DIRECT > 2
            direct<3, 1, Form>,
            direct<4, 1, Form>,
            direct<5, 1, Form>,
            direct<6, 1, Form>,
            direct<7, 1, Form>,
            direct<8, 1, Form>,
#endif
        };
#if DIRECT_SIDE
        static const Direct PANELS[] = {nullptr, direct<1, 2, Form>, direct<2, 2, Form>,
                                        direct<3, 2, Form>, direct<4, 2, Form>};
        if (count == SIDE && a.m <= DIRECT_SIDE) return PANELS[a.m](a, panels, ahead, sums);
#endif
        for (int q = 0; q < count; ++q) ONE_PANEL[a.m](a, panels + q, ahead + q, sums + q * NR);
    }

    // The codes behind `ahead` are fetched by the tiles, which have the time. `is_decoded`: the
    // weights are, all of them.
    static void some_rows(const LinearArguments &a, const Columns &columns, const Form *panels,
                          const Form &ahead, int64_t num_ahead, float *sums, bool finishes,
                          float *decoded, int64_t block, bool is_decoded, Prefetch &prefetch) {
        for (int64_t first = 0; first < a.k; first += block) {
            const Depth depth{first, a.k - first < block ? a.k - first : block};
            for (int q = 0; q < columns.count && !is_decoded; ++q)
                each_step<1, Form>(
                    panels + q, nullptr, depth,
                    [&](int64_t i, int step, const vf *w) __attribute__((always_inline)) {
                        store(decoded + (i + step - first) * STEP + q * NR, w[0]);
                        store(decoded + (i + step - first) * STEP + q * NR + VW, w[1]);
                    });
            const char *codes = (const char *)ahead.start() + num_ahead * Form::bytes(first);
            all_rows<true>(a, columns, depth, decoded, sums, finishes, codes,
                           num_ahead * Form::bytes(depth.count), prefetch);
        }
    }

    static void member(const LinearArguments &a, PoolThread *thread) {
        if (AmxLinear<Form>::takes(a)) return AmxLinear<Form>::member(a, thread);
        const bool is_deep = a.k > DEEP, commits = a.m <= COMMIT_ROWS;
        const int64_t block = is_deep || (commits && a.k > BLOCK) ? BLOCK : a.k;
        const int64_t most = is_deep ? COMMIT_ROWS : AT_ONCE;
        const int64_t spare =
            is_deep && !commits ? (most + SIDE_MR) * STEP : 0;  // sums between blocks of k
        Prefetch &prefetch = read_ahead(a, thread);
        int64_t held = -1;  // the panel from which on weights are decoded, all of them
        each_columns(
            a, thread, most, (spare + block * STEP) * sizeof(float),
            [&](const LinearArguments &some, Columns mine, Columns next, float *sums, char *rest) {
                const Columns then = next.count ? next : mine;
                Form panels[SIDE], ahead[SIDE];
                for (int q = 0; q < SIDE; ++q) {
                    panels[q] = Form::at(a, mine.panel + q % mine.count);
                    ahead[q] = Form::at(a, then.panel + q % then.count);
                }
                if (a.m <= DIRECT) return few_rows(some, mine.count, panels, ahead, sums);
                float *decoded = (float *)rest + spare;
                some_rows(some, mine, panels, ahead[0], next.count,
                          sums    ? sums
                          : spare ? (float *)rest
                                  : nullptr,
                          !sums, decoded, block, !commits && block == a.k && held == mine.panel,
                          prefetch);
                held = mine.panel;
            });
    }
};

}  // namespace

#define LINEAR_MEMBERS(kernel)                                                       \
    extern "C" int tokenmill_panel_width() { return NR; }                            \
    extern "C" int64_t tokenmill_row_bytes(int64_t k) { return float_row_bytes(k); } \
    extern "C" int64_t tokenmill_linear_member(const LinearArguments *arguments,     \
                                               PoolThread *thread) {                 \
        kernel::member(*arguments, thread);                                          \
        return 0;                                                                    \
    }
#define DECODED_LINEAR(form) LINEAR_MEMBERS(DecodedLinear<form>)
