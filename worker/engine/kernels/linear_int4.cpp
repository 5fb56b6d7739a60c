// Linear layers with 4-bit weights and float32 activations: w = scale · code + zero, by groups of 32 along k.
//
// A 32-bit lane holds eight codes of one column, so that one load feeds eight steps of k; they become floats
// in registers, or, for many rows, once per panel in a scratch that stays in the cache. The sums are the
// chains of float_tile.h over the decoded weights: the same bits either way, whatever the batch.
// Panels are [n / NR][k / 8][NR], scales [n / NR][k / 32][2][NR] half floats (scales, then zeros).

#include "float_tile.h"

#define GROUP 32
#define CODES 8  // in one lane

#if VW == 16
#define DIRECT 8  // rows up to which codes are decoded in registers
#else
#define DIRECT 2
#endif

namespace {

INLINE vf decode(vi codes, int step) {
    const vi shifted = (vi)((vu)codes >> (4 * step));
#if VW == 16
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return (vf)_mm512_permutexvar_ps((__m512i)shifted, table);  // the low four bits choose
#else
    return __builtin_convertvector(shifted & 15, vf);
#endif
}

INLINE vi lanes_at(const uint32_t *p) {
    vi v;
    memcpy(&v, p, sizeof v);
    return v;
}

struct Panel {
    const uint32_t *codes;
    const f16 *scales;
};
INLINE Panel panel_at(const LinearArguments &a, int64_t p) {
    return {(const uint32_t *)a.weight + p * (a.k / CODES) * NR, (const f16 *)a.scale + p * (a.k / GROUP) * 2 * NR};
}

// Calls use(i, left, right) with the decoded weights of every step i of k, in order.
template <class Use>
INLINE void each_step(const Panel &panel, int64_t k, Use use) {
    const uint32_t *codes = panel.codes;
    const f16 *scales = panel.scales;
    for (int64_t group = 0; group < k; group += GROUP, scales += 2 * NR) {
        const vf s0 = load(scales), s1 = load(scales + VW), z0 = load(scales + NR), z1 = load(scales + NR + VW);
        __builtin_prefetch(scales + 16 * NR);
        for (int64_t i = group; i < group + GROUP; i += CODES, codes += NR) {
            const vi left = lanes_at(codes), right = lanes_at(codes + VW);
            __builtin_prefetch(codes + 24 * NR);
            __builtin_prefetch(codes + 24 * NR + 16);
#pragma GCC unroll 8
            for (int step = 0; step < CODES; ++step)
                use(i + step, fma(decode(left, step), s0, z0), fma(decode(right, step), s1, z1));
        }
    }
}

template <int R>
void direct(const LinearArguments &a, const Panel &panel, const Output &out) {
    vf acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = vf{};
    each_step(panel, a.k, [&](int64_t i, vf left, vf right) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const vf x = splat(a.x[r * a.x_stride + i]);
            acc[r][0] = fma(x, left, acc[r][0]);
            acc[r][1] = fma(x, right, acc[r][1]);
        }
    });
    for (int r = 0; r < R; ++r) finish_row(out, acc[r][0], acc[r][1], r);
}

typedef void (*DirectFunction)(const LinearArguments &, const Panel &, const Output &);
const DirectFunction DIRECT_ROWS[] = {nullptr, direct<1>, direct<2>,
#if DIRECT > 2
                                      direct<3>, direct<4>, direct<5>, direct<6>, direct<7>, direct<8>,
#endif
};

void few_rows(const LinearArguments &a, const Columns &columns) {
    for (int64_t p = columns.panel; p < columns.panel + columns.count; ++p)
        DIRECT_ROWS[a.m](a, panel_at(a, p), at_panel(whole_output(a), p, a.n));
}

void many_rows(const LinearArguments &a, const Columns &columns, const Columns *next, float *scratch) {
    for (int q = 0; q < columns.count; ++q)
        each_step(panel_at(a, columns.panel + q), a.k, [&](int64_t i, vf left, vf right) __attribute__((always_inline)) {
            store(scratch + i * STEP + q * NR, left);
            store(scratch + i * STEP + q * NR + VW, right);
        });
    const Columns &then = next ? *next : columns;
    all_rows(a, columns, scratch, panel_at(a, then.panel).codes,
             next ? next->count * (a.k / CODES) * NR * sizeof(uint32_t) : 0);
}

}  // namespace

extern "C" int tokenmill_panel_width() { return NR; }

// Bytes that each thread takes of the workspace.
extern "C" int64_t tokenmill_thread_bytes(int64_t k) { return k * STEP * 4; }

// Codes [n, k], 0 to 15, and scales and zeros [n, k / 32] as half floats → panels; k is a multiple of 32
extern "C" void tokenmill_pack(const uint8_t *codes, const uint16_t *scale, const uint16_t *zero, uint32_t *panels,
                               uint16_t *scales, int64_t n, int64_t k) {
    const int64_t count = (n + NR - 1) / NR, groups = k / GROUP;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < count; ++p)
        for (int64_t j = 0; j < NR; ++j) {
            const int64_t row = p * NR + j;
            const bool exists = row < n;
            for (int64_t i = 0; i < k / CODES; ++i) {
                uint32_t lane = 0;
                for (int c = 0; exists && c < CODES; ++c) lane |= (uint32_t)codes[row * k + i * CODES + c] << (4 * c);
                panels[(p * (k / CODES) + i) * NR + j] = lane;
            }
            for (int64_t g = 0; g < groups; ++g) {
                uint16_t *to = scales + (p * groups + g) * 2 * NR + j;
                to[0] = exists ? scale[row * groups + g] : 0;
                to[NR] = exists ? zero[row * groups + g] : 0;
            }
        }
}

// y = epilogue(x · weightᵀ + bias)
extern "C" int64_t tokenmill_linear_member(const LinearArguments *arguments, const Team *team) {
    const LinearArguments &a = *arguments;
    float *scratch = (float *)(a.workspace + team->part * tokenmill_thread_bytes(a.k));
    const Turns turns(a.n, team->parts);
    for (int64_t turn = team->take(1), next; turn < turns.count(); turn = next) {
        next = team->take(1);
        const Columns mine = turns[turn], then = turns[next];
        if (a.m <= DIRECT) few_rows(a, mine);
        else many_rows(a, mine, next < turns.count() ? &then : nullptr, scratch);
    }
    return 0;
}

extern "C" void tokenmill_linear(const LinearArguments *arguments) {
    alone(arguments->num_threads, [=](const Team &team) { return tokenmill_linear_member(arguments, &team); });
}
