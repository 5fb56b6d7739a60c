// RMS norm of a row: x / rms(x) · (offset + weight) (+ residual). Gemma scales by 1 + weight.
#pragma once

#include "vectors.h"

struct Norm {
    const float *weight;  // [k], or null: no norm
    float eps, offset;
};

// All kernels use this one function, so that a row's bits are the same everywhere. y may be x or
// the residual. The row that comes after it lies `next` floats further on, and is fetched: another
// core has written it, mostly.
static __attribute__((noinline, unused)) void normalise(const Norm &norm, const float *x,
                                                        int64_t next, const float *residual,
                                                        int64_t k, float *y) {
    vf sums[4] = {vf{}, vf{}, vf{}, vf{}};
    int64_t i = 0;
    for (; i + 4 * VW <= k; i += 4 * VW)
        for (int q = 0; q < 4; ++q) {
            const vf v = load(x + i + q * VW);
            __builtin_prefetch(x + next + i + q * VW);
            sums[q] = fma(v, v, sums[q]);
        }
    const vf all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = 0.0f;
    for (int j = 0; j < VW; ++j) sum += all[j];
    for (; i < k; ++i) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)k + norm.eps);
    for (int64_t j = 0; j < k; ++j) {
        const float value = x[j] * scale * (norm.weight[j] + norm.offset);
        y[j] = residual ? value + residual[j] : value;
    }
}
