// Linear layers with float16 weights. Panels are [n / NR][k][NR] half floats.

#include "linear_half.h"

namespace {

struct F16 {
    static constexpr int64_t PARTS = 2, FEW = 8;
    static constexpr bool IS_FACTOR = false;
    struct Chunk {
        const f16 *weights;
    };

    static INLINE_MEMBER Chunk load(const uint16_t *panel, int64_t i) {
        return {(const f16 *)panel + i * NR};
    }
    static INLINE_MEMBER vf decode(const Chunk &chunk, int step, int half) {
        return ::load(chunk.weights + step * NR + half * VW);
    }
};

}  // namespace

// Weights [n, k] → panels; k is even
extern "C" void tokenmill_pack(const uint16_t *weight, uint16_t *panels, int64_t n, int64_t k) {
    pack_panels<NR>(panels, n, k, [=](int64_t row, int64_t i) { return weight[row * k + i]; });
}

DECODED_LINEAR(Half<F16>)
