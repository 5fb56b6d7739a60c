// Linear layers over weights packed once, fused with the operations next to them in a decoder.
//
// A weight [n, k] is packed into panels of NR columns, so that a product streams it from memory
// once and in order (float_tile.h). Each output is one chain of fused multiply-adds over k: a row's
// result depends neither on how many rows are in the batch nor on the thread that computes it, bit
// for bit.

#include "amx_float.h"

// Row r lies at (r / inner) · stride + (r % inner) · k: heads of a token lie together, tokens
// apart.
struct NormArguments {
    const float *x, *residual;  // residual: added to the normalised row, or null
    float *y;                   // may be x or residual
    int64_t x_stride, y_stride, residual_stride, m, k, inner;
    Norm norm;
};

namespace {

struct Float {
    static constexpr int64_t GROUP = 2, CHUNK = 2, PARTS = 3, FEW = 48;
    static constexpr bool IS_FACTOR = false;
    struct Group {};
    struct Chunk {
        const float *weights;
    };
    const float *weights;

    static Float at(const LinearArguments &a, int64_t p) {
        return {(const float *)a.weight + p / SIDE * a.k * STEP + p % SIDE * NR};
    }
    INLINE_MEMBER Group group(int64_t) const { return {}; }
    INLINE_MEMBER Chunk chunk(int64_t i) const { return {weights + i * STEP}; }
    INLINE_MEMBER void fetch_group(int64_t) const {}
    INLINE_MEMBER void fetch_chunk(int64_t i) const {
        for (int step = 0; step < CHUNK; ++step)
            fetch_lines(weights + (i + step) * STEP, NR * sizeof(float));
    }
    INLINE_MEMBER static vf decode(const Group &, const Chunk &chunk, int step, int half) {
        return load(chunk.weights + step * STEP + half * VW);
    }
};

}  // namespace

extern "C" int tokenmill_has_amx() { return may_use_amx(); }

extern "C" int tokenmill_panel_width() { return NR; }

extern "C" int64_t tokenmill_row_bytes(int64_t k) { return float_row_bytes(k); }

extern "C" int64_t tokenmill_packed_floats(int64_t n, int64_t k) {
    return (n + STEP - 1) / STEP * STEP * k;
}

// weight [n, k] with a row stride → panels; columns past n are zero
extern "C" void tokenmill_pack(const float *weight, float *packed, int64_t n, int64_t k,
                               int64_t stride) {
    pack_panels<STEP>(packed, n, k,
                      [=](int64_t row, int64_t i) { return weight[row * stride + i]; });
}

// y = epilogue(x · weightᵀ + bias). Gated epilogues want panels of VW gate columns beside VW up
// columns.
extern "C" int64_t tokenmill_linear_member(const LinearArguments *arguments, PoolThread *thread) {
    const LinearArguments &a = *arguments;
    if (AmxLinear<Float>::takes(a)) return AmxLinear<Float>::member(a, thread), 0;
    const auto weights = [&](const Columns &c) {
        return (const float *)a.weight + c.panel / SIDE * a.k * STEP + c.panel % SIDE * NR;
    };
    Prefetch &prefetch = read_ahead(a, thread);
    each_columns(a, thread, AT_ONCE, 0,
                 [&](const LinearArguments &some, Columns mine, Columns next, float *sums, char *) {
                     const auto multiply = a.m > 2 * SIDE_MR ? all_rows<true> : all_rows<false>;
                     multiply(some, mine, {0, a.k}, weights(mine), sums, !sums, weights(next),
                              next.count * NR * a.k * sizeof(float), prefetch);
                 });
    return 0;
}

extern "C" int64_t tokenmill_rms_norm_member(const NormArguments *arguments, PoolThread *thread) {
    const NormArguments &a = *arguments;
    thread->parallel_for(a.m, 8, [&](int64_t first, int64_t count, int64_t) {
        for (int64_t row = first; row < first + count; ++row) {
            const int64_t outer = row / a.inner, within = row % a.inner * a.k;
            normalise(a.norm, a.x + outer * a.x_stride + within, 0,
                      a.residual ? a.residual + outer * a.residual_stride + within : nullptr, a.k,
                      a.y + outer * a.y_stride + within);
        }
    });
    return 0;
}
