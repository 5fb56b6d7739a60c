// Linear layers over weights packed once, with what stands next to them in a decoder fused in.
//
// A weight [n, k] is packed into panels of NR columns, [n / NR][k][NR], so that a product streams it
// from memory once and in order. Each output is one chain of fused multiply-adds over k: a row's result
// depends neither on how many rows are in the batch nor on the thread that computes it, bit for bit.

#include "float_tile.h"

// Row r lies at (r / inner) · stride + (r % inner) · k: heads of a token lie together, tokens apart.
struct NormArguments {
    const float *x, *weight, *residual;  // residual: added to the normalised row, or null
    float *y;                            // may be x or residual
    int64_t x_stride, y_stride, residual_stride, m, k, inner;
    float eps, offset;  // Gemma scales by 1 + weight
    int32_t num_threads;
};

namespace {

// Panels of one row: four at a time, since one chain of additions per column would wait on its own latency.
void one_row(const LinearArguments &a, const Output &whole, int64_t first, int64_t last) {
    const float *weight = (const float *)a.weight;
    const int64_t panel_size = a.k * NR;
    int64_t p = first;
    for (; p + 4 <= last && (p + 4) * NR <= a.n; p += 4) {
        vf acc[4][2];
        for (int q = 0; q < 4; ++q) acc[q][0] = acc[q][1] = vf{};
        const float *w = weight + p * panel_size;
        for (int64_t i = 0; i < a.k; ++i, w += NR) {
            const vf x = splat(a.x[i]);
#pragma GCC unroll 4
            for (int q = 0; q < 4; ++q) {
                const float *column = w + q * panel_size;
                __builtin_prefetch(column + 32 * NR);
                __builtin_prefetch(column + 32 * NR + 16);
                acc[q][0] = fma(x, load(column), acc[q][0]);
                acc[q][1] = fma(x, load(column + VW), acc[q][1]);
            }
        }
        for (int q = 0; q < 4; ++q) finish_row(at_panel(whole, p + q, a.n), acc[q][0], acc[q][1], 0);
    }
    for (; p < last; ++p) all_rows(a, weight + p * panel_size, at_panel(whole, p, a.n), weight + p * panel_size, 0);
}

void normalise(const NormArguments &a, int64_t row) {
    const int64_t outer = row / a.inner, within = row % a.inner * a.k;
    const float *x = a.x + outer * a.x_stride + within;
    float *y = a.y + outer * a.y_stride + within;
    vf sums[4] = {vf{}, vf{}, vf{}, vf{}};
    int64_t i = 0;
    for (; i + 4 * VW <= a.k; i += 4 * VW)
        for (int q = 0; q < 4; ++q) {
            const vf v = load(x + i + q * VW);
            sums[q] = fma(v, v, sums[q]);
        }
    const vf all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = 0.0f;
    for (int j = 0; j < VW; ++j) sum += all[j];
    for (; i < a.k; ++i) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)a.k + a.eps);
    const float *residual = a.residual ? a.residual + outer * a.residual_stride + within : nullptr;
    for (int64_t j = 0; j < a.k; ++j) {
        const float value = x[j] * scale * (a.weight[j] + a.offset);
        y[j] = residual ? value + residual[j] : value;
    }
}

}  // namespace

extern "C" int tokenmill_panel_width() { return NR; }

// weight [n, k] with a row stride → panels; columns past n are zero
extern "C" void tokenmill_pack(const float *weight, float *packed, int64_t n, int64_t k, int64_t stride) {
    const int64_t panels = (n + NR - 1) / NR;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; ++p)
        for (int64_t i = 0; i < k; ++i)
            for (int64_t j = 0; j < NR; ++j) {
                const int64_t row = p * NR + j;
                packed[(p * k + i) * NR + j] = row < n ? weight[row * stride + i] : 0.0f;
            }
}

// y = epilogue(x · weightᵀ + bias). Gated epilogues want panels of VW gate columns beside VW up columns.
extern "C" int64_t tokenmill_linear_member(const LinearArguments *arguments, const Team *team) {
    const LinearArguments &a = *arguments;
    const Output whole = whole_output(a);
    const Share mine = share((a.n + NR - 1) / NR, team->part, team->parts);
    if (a.m == 1) return one_row(a, whole, mine.first, mine.last), 0;
    const int64_t size = a.k * NR;
    const float *panel = (const float *)a.weight + mine.first * size;
    for (int64_t p = mine.first; p < mine.last; ++p, panel += size)
        all_rows(a, panel, at_panel(whole, p, a.n), panel + size, p + 1 < mine.last ? size * sizeof(float) : 0);
    return 0;
}

extern "C" void tokenmill_linear(const LinearArguments *arguments) {
    alone(arguments->num_threads, [=](const Team &team) { return tokenmill_linear_member(arguments, &team); });
}

// y = x / rms(x) · (offset + weight) (+ residual), row by row
extern "C" int64_t tokenmill_rms_norm_member(const NormArguments *arguments, const Team *team) {
    const Share mine = share(arguments->m, team->part, team->parts);
    for (int64_t row = mine.first; row < mine.last; ++row) normalise(*arguments, row);
    return 0;
}

extern "C" void tokenmill_rms_norm(const NormArguments *arguments) {
    const int threads = arguments->m * arguments->k >= 16384 ? arguments->num_threads : 1;
    alone(threads, [=](const Team &team) { return tokenmill_rms_norm_member(arguments, &team); });
}
