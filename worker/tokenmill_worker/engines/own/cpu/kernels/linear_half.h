// Linear layers with weights of half the width and float32 activations: half the memory traffic of
// float32, and the same bits wherever the weights were that narrow before they became float32.
//
// Panels hold two bytes for each weight and no scales. A codec says how they lie in a panel: PARTS,
// FEW and IS_FACTOR as amx_float.h needs them, Chunk, load(panel, i) for the steps i and i + 1,
// decode(chunk, step, half).
#pragma once

#include "decode_weights.h"

namespace {

template <class Codec>
struct Half {
    static constexpr int64_t GROUP = 2, CHUNK = 2, PARTS = Codec::PARTS, FEW = Codec::FEW;
    static constexpr bool IS_FACTOR = Codec::IS_FACTOR;
    struct Group {};
    typedef typename Codec::Chunk Chunk;
    const uint16_t *panel;

    static Half at(const LinearArguments &a, int64_t p) {
        return {(const uint16_t *)a.weight + p * a.k * NR};
    }
    INLINE_MEMBER const void *start() const { return panel; }
    static int64_t bytes(int64_t k) { return k * NR * sizeof(uint16_t); }
    INLINE_MEMBER Group group(int64_t) const { return {}; }
    INLINE_MEMBER Chunk chunk(int64_t i) const { return Codec::load(panel, i); }
    INLINE_MEMBER void fetch_group(int64_t) const {}
    INLINE_MEMBER void fetch_chunk(int64_t i) const {
        fetch_lines(panel + i * NR, CHUNK * NR * sizeof(uint16_t));
    }
    INLINE_MEMBER static vf decode(const Group &, const Chunk &chunk, int step, int half) {
        return Codec::decode(chunk, step, half);
    }
};

}  // namespace
