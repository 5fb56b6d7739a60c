// Linear layers with bfloat16 weights. A 32-bit lane holds two steps of k of one column. Panels are
// [n / NR][k / 2][NR] lanes.

#include "linear_half.h"

namespace {

struct Bf16 {
    static constexpr int64_t PARTS = 1, FEW = 4;
    static constexpr bool IS_FACTOR = true;
    struct Chunk {
        vu lanes[2];
    };

    static INLINE_MEMBER Chunk load(const uint16_t *panel, int64_t i) {
        Chunk c;
        // A vector at a time: a copy of both is made in smaller pieces, for which the registers
        // then wait.
        for (int half = 0; half < 2; ++half)
            memcpy(&c.lanes[half], panel + i * NR + 2 * half * VW, sizeof c.lanes[half]);
        return c;
    }
    static INLINE_MEMBER vf decode(const Chunk &chunk, int step, int half) {
        return (vf)(step ? chunk.lanes[half] & 0xffff0000u : chunk.lanes[half] << 16);
    }
};

}  // namespace

// Weights [n, k] → panels; k is even
extern "C" void tokenmill_pack(const uint16_t *weight, uint32_t *panels, int64_t n, int64_t k) {
    pack_panels<NR>(panels, n, k / 2, [=](int64_t row, int64_t i) {
        const uint16_t *pair = weight + row * k + 2 * i;
        return pair[0] | (uint32_t)pair[1] << 16;
    });
}

DECODED_LINEAR(Half<Bf16>)
