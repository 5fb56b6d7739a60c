// Linear layers with bfloat16 weights and float32 activations: half the memory traffic of float32, and the same bits
// wherever the weights were bfloat16 before they became float32.
//
// A 32-bit lane holds two steps of k of one column. Panels are [n / NR][k / 2][NR] lanes; there are no scales.

#include "decode_weights.h"

namespace {

struct Bf16 {
    static constexpr int64_t GROUP = 2, CHUNK = 2, PARTS = 1, FEW = 4;
    static constexpr bool IS_FACTOR = true;
    struct Group {};
    struct Chunk {
        vu lanes[2];
    };
    const uint32_t *lanes;

    static Bf16 at(const LinearArguments &a, int64_t p) { return {(const uint32_t *)a.weight + p * (a.k / CHUNK) * NR}; }
    INLINE_MEMBER const void *start() const { return lanes; }
    static int64_t bytes(int64_t k) { return k / CHUNK * NR * sizeof(uint32_t); }
    INLINE_MEMBER Group group(int64_t) const { return {}; }
    INLINE_MEMBER Chunk chunk(int64_t i) const {
        Chunk c;
        // A vector at a time: a copy of both is made in smaller pieces, for which the registers then wait.
        for (int half = 0; half < 2; ++half) memcpy(&c.lanes[half], lanes + i / CHUNK * NR + half * VW, sizeof c.lanes[half]);
        return c;
    }
    INLINE_MEMBER void fetch_group(int64_t) const {}
    INLINE_MEMBER void fetch_chunk(int64_t i) const { fetch_lines(lanes + i / CHUNK * NR, NR * sizeof(uint32_t)); }
    INLINE_MEMBER static vf decode(const Group &, const Chunk &chunk, int step, int half) {
        return (vf)(step ? chunk.lanes[half] & 0xffff0000u : chunk.lanes[half] << 16);
    }
};

}  // namespace

// Weights [n, k] → panels; k is even
extern "C" void tokenmill_pack(const uint16_t *weight, uint32_t *panels, int64_t n, int64_t k) {
    const int64_t count = (n + NR - 1) / NR;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < count; ++p)
        for (int64_t i = 0; i < k; i += 2)
            for (int64_t j = 0; j < NR; ++j) {
                const int64_t row = p * NR + j;
                const uint16_t *pair = weight + row * k + i;
                panels[(p * k + i) / 2 * NR + j] = row < n ? pair[0] | (uint32_t)pair[1] << 16 : 0;
            }
}

DECODED_LINEAR(Bf16)
