// Linear layers with half-precision weights and float32 activations: half the memory traffic of float32, and the same
// bits wherever the weights were half precision before they became float32.
//
// Panels are [n / NR][k][NR] half floats; there are no scales.

#include "decode_weights.h"

namespace {

struct F16 {
    static constexpr int64_t GROUP = 2, CHUNK = 2, PARTS = 2, FEW = 8;
    static constexpr bool IS_FACTOR = false;
    struct Group {};
    struct Chunk {
        const f16 *weights;
    };
    const f16 *weights;

    static F16 at(const LinearArguments &a, int64_t p) { return {(const f16 *)a.weight + p * a.k * NR}; }
    INLINE_MEMBER const void *start() const { return weights; }
    static int64_t bytes(int64_t k) { return k * NR * sizeof(f16); }
    INLINE_MEMBER Group group(int64_t) const { return {}; }
    INLINE_MEMBER Chunk chunk(int64_t i) const { return {weights + i * NR}; }
    INLINE_MEMBER void fetch_group(int64_t) const {}
    INLINE_MEMBER void fetch_chunk(int64_t i) const { fetch_lines(weights + i * NR, CHUNK * NR * sizeof(f16)); }
    INLINE_MEMBER static vf decode(const Group &, const Chunk &chunk, int step, int half) {
        return load(chunk.weights + step * NR + half * VW);
    }
};

}  // namespace

// Weights [n, k] → panels; k is even
extern "C" void tokenmill_pack(const uint16_t *weight, uint16_t *panels, int64_t n, int64_t k) {
    const int64_t count = (n + NR - 1) / NR;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < count; ++p)
        for (int64_t i = 0; i < k; ++i)
            for (int64_t j = 0; j < NR; ++j) {
                const int64_t row = p * NR + j;
                panels[(p * k + i) * NR + j] = row < n ? weight[row * k + i] : 0;
            }
}

DECODED_LINEAR(F16)
