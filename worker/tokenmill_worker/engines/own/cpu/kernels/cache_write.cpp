// Stores a step's keys and values in their blocks, alone or together with the rotary embedding.
//
// The layout is that of attention.cpp: keys in strips [head_dim][16 tokens], values
// [token][head_dim].

#include "work_stealing.h"
#include "vectors.h"

#define AT_ONCE 4  // tokens
#define MOST_DIMENSIONS 1024

struct WriteArguments {
    const float *query, *key,
        *value;  // [num_tokens, heads, head_dim], each with strides of its own; query may be null
    const float *cos, *sin;            // [num_tokens, rotary_dim], or null: no rotation
    float
        *rotated;  // [num_tokens, num_heads, head_dim]: the rotated queries; may be `query` itself
    void *cache;
    const int64_t *slots;
    const float *key_scales, *value_scales;  // [num_kv_heads] each, or null: no scales
    int64_t query_stride, query_head_stride, key_stride, key_head_stride, value_stride,
        value_head_stride, cos_stride;
    int64_t rotated_stride;
    int64_t block_stride, value_offset;
    int32_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
    int32_t kv_type;  // 0: float32, 1: bfloat16, 2: float16, 3: E4M3, 4: E5M2
};

namespace {

// Half-rotation: dimension i is paired with i + rotary_dim / 2; dimensions from rotary_dim on are
// kept. `to` may be `from`.
INLINE void rotate(const float *from, const float *cos, const float *sin, int rotary_dim,
                   int head_dim, float *to) {
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
    if (to != from)
        memcpy(to + rotary_dim, from + rotary_dim, sizeof(float) * (head_dim - rotary_dim));
}

// A head's keys or values, divided by their scale if there is one.
template <class T>
INLINE void put_head(T *to, const float *from, int dim, const float *scale) {
    if (scale)
        for (int d = 0; d < dim; ++d) put(to + d, from[d] / *scale);
    else
        for (int d = 0; d < dim; ++d) put(to + d, from[d]);
}

// One token: computed in scratch, then committed to the cache.
template <class T>
struct TokenWriter {
    const WriteArguments &a;
    T *keys, *values;  // [num_kv_heads, head_dim]
    float *queries;    // [num_heads, head_dim]

    static int64_t bytes(const WriteArguments &a) {
        return (2 * a.num_kv_heads * (int64_t)sizeof(T) + a.num_heads * (int64_t)sizeof(float)) *
                   a.head_dim +
               2 * VW * sizeof(float);
    }

    TokenWriter(const WriteArguments &arguments, char *memory)
        : a(arguments), keys((T *)memory), values(keys + a.num_kv_heads * a.head_dim),
          queries((float *)(values + a.num_kv_heads * a.head_dim)) {}

    bool turns_queries() const { return a.cos && a.query; }

    void make(int64_t token) const {
        const int dim = a.head_dim;
        const float *cos = a.cos + token * a.cos_stride, *sin = a.sin + token * a.cos_stride;
        for (int head = 0; head < a.num_kv_heads; ++head) {
            const float *key = a.key + token * a.key_stride + head * a.key_head_stride;
            const float *value = a.value + token * a.value_stride + head * a.value_head_stride;
            float rotated[MOST_DIMENSIONS];
            if (a.cos) rotate(key, cos, sin, a.rotary_dim, dim, rotated), key = rotated;
            const bool has_scales = a.key_scales;
            put_head(keys + head * dim, key, dim, has_scales ? a.key_scales + head : nullptr);
            put_head(values + head * dim, value, dim, has_scales ? a.value_scales + head : nullptr);
        }
        for (int head = 0; turns_queries() && head < a.num_heads; ++head)
            rotate(a.query + token * a.query_stride + head * a.query_head_stride, cos, sin,
                   a.rotary_dim, dim, queries + head * dim);
    }

    void commit(int64_t token) const {
        const int dim = a.head_dim, tokens = a.block_size % STRIP == 0 ? STRIP : a.block_size;
        const int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
        T *base = (T *)a.cache + block * a.block_stride;
        for (int head = 0; head < a.num_kv_heads; ++head) {
            T *strip =
                base + (head * a.block_size + offset / tokens * tokens) * dim + offset % tokens;
            for (int d = 0; d < dim; ++d) strip[(int64_t)d * tokens] = keys[head * dim + d];
            memcpy(base + a.value_offset + (head * a.block_size + offset) * dim,
                   values + head * dim, dim * sizeof(T));
        }
        if (turns_queries())
            memcpy(a.rotated + token * a.rotated_stride, queries,
                   sizeof(float) * a.num_heads * dim);
    }
};

template <class T>
void write(const WriteArguments &a, PoolThread *thread) {
    char *scratch = thread->scratch(AT_ONCE * TokenWriter<T>::bytes(a));
    const auto writer = [&](int64_t token) {
        return TokenWriter<T>(a, scratch + token % AT_ONCE * TokenWriter<T>::bytes(a));
    };
    thread->parallel_for_commit(
        a.num_tokens, AT_ONCE,
        [&](int64_t first, int64_t count, int64_t) {
            for (int64_t token = first; token < first + count; ++token) writer(token).make(token);
        },
        [&](int64_t first, int64_t count) {
            for (int64_t token = first; token < first + count; ++token) writer(token).commit(token);
        });
}

}  // namespace

extern "C" int64_t tokenmill_write_member(const WriteArguments *arguments, PoolThread *thread) {
    switch (arguments->kv_type) {
        case 0: write<float>(*arguments, thread); break;
        case 1: write<bf16>(*arguments, thread); break;
        case 2: write<f16>(*arguments, thread); break;
        case 3: write<f8>(*arguments, thread); break;
        default: write<f8e5>(*arguments, thread);
    }
    return 0;
}
