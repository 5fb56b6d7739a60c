// Storing a step's keys and values in their blocks, alone or together with the rotary embedding.
//
// The layout is the one that attention.cpp reads: keys in strips [head_dim][16 tokens], values [token][head_dim].

#include "team.h"
#include "vectors.h"

struct WriteArguments {
    const float *query, *key, *value;  // [num_tokens, heads, head_dim], each with strides of its own; query may be null
    const float *cos, *sin;            // [num_tokens, rotary_dim], or null: no rotation
    float *rotated;                    // [num_tokens, num_heads, head_dim]: the rotated queries; may be `query` itself
    void *cache;
    const int64_t *slots;
    int64_t query_stride, query_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, cos_stride;
    int64_t rotated_stride;
    int64_t block_stride, value_offset;
    int32_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
    int32_t kv_type;  // 0: float32, 1: bfloat16, 2: float16, 3: 8 bits
};

namespace {

// Half-rotation: dimension i is paired with i + rotary_dim / 2; dimensions from rotary_dim on are kept. `to` may be `from`.
INLINE void rotate(const float *from, const float *cos, const float *sin, int rotary_dim, int head_dim, float *to) {
    const int half = rotary_dim / 2;
    int i = 0;
    for (; i + VW <= half; i += VW) {
        const vf low = load(from + i), high = load(from + i + half);
        store(to + i, fma(low, load(cos + i), -(high * load(sin + i))));
        store(to + i + half, fma(high, load(cos + i + half), low * load(sin + i + half)));
    }
    for (; i < half; ++i) {
        const float low = from[i], high = from[i + half];
        to[i] = low * cos[i] - high * sin[i];
        to[i + half] = high * cos[i + half] + low * sin[i + half];
    }
    if (to != from) memcpy(to + rotary_dim, from + rotary_dim, sizeof(float) * (head_dim - rotary_dim));
}

template <class T>
void write_token(const WriteArguments &a, int token) {
    float rotated[1024];
    T narrow[1024];
    const int64_t slot = a.slots[token], block = slot / a.block_size;
    const int offset = (int)(slot % a.block_size), dim = a.head_dim;
    const int tokens = a.block_size % STRIP == 0 ? STRIP : a.block_size;
    T *base = (T *)a.cache + block * a.block_stride;
    for (int head = 0; head < a.num_kv_heads; ++head) {
        const float *from = a.key + token * a.key_stride + head * a.key_head_stride;
        const float *value = a.value + token * a.value_stride + head * a.value_head_stride;
        T *strip = base + ((int64_t)head * a.block_size + (int64_t)(offset / tokens) * tokens) * dim + offset % tokens;
        T *row = base + a.value_offset + ((int64_t)head * a.block_size + offset) * dim;
        if (a.cos) {
            rotate(from, a.cos + token * a.cos_stride, a.sin + token * a.cos_stride, a.rotary_dim, dim, rotated);
            from = rotated;
        }
        for (int d = 0; d < dim; ++d) put(narrow + d, from[d]);
        for (int d = 0; d < dim; ++d) strip[(int64_t)d * tokens] = narrow[d];
        for (int d = 0; d < dim; ++d) put(row + d, value[d]);
    }
}

template <class T>
void write_some(const WriteArguments &a, int64_t first, int64_t count) {
    for (int token = (int)first; token < first + count; ++token) {
        write_token<T>(a, token);
        if (a.cos && a.query)
            for (int head = 0; head < a.num_heads; ++head)
                rotate(a.query + token * a.query_stride + head * a.query_head_stride, a.cos + token * a.cos_stride,
                       a.sin + token * a.cos_stride, a.rotary_dim, a.head_dim,
                       a.rotated + token * a.rotated_stride + (int64_t)head * a.head_dim);
    }
}

}  // namespace

extern "C" int64_t tokenmill_write_member(const WriteArguments *arguments, Team *team) {
    const auto write = arguments->kv_type == 0   ? write_some<float>
                       : arguments->kv_type == 1 ? write_some<bf16>
                       : arguments->kv_type == 2 ? write_some<f16>
                                                 : write_some<f8>;
    team->each(arguments->num_tokens, 4,
               [=](int64_t first, int64_t count, int64_t) { write(*arguments, first, count); });
    return 0;
}
