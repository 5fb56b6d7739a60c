// Arguments of paged attention, and a prefetch of what it reads while the products before it are
// computed.
//
// In a step of many decodes, attention reads its keys and values from memory once and waits for
// them. Products before it leave memory idle: their rows and weights come from the caches. So a
// product that knows the next attention fetches a few lines for it beside every few of its own
// steps, each thread for its share of the sequences. Lines that the second-level cache cannot hold
// stay in the third.
#pragma once

#include <stdint.h>

struct AttendArguments {
    const float *query;  // [num_tokens, num_heads, head_dim]; a head's dimensions lie together
    float *out;          // the same shape, contiguous
    const void *cache;   // the layer's view: keys of block b at b · block_stride; values
                         // value_offset further
    const int32_t *query_start, *seq_lens, *block_table;
    const float *sinks;  // [num_heads] or null
    const float *key_scales, *value_scales;  // [num_kv_heads] each, or null: no scales
    char *workspace;
    int64_t workspace_bytes, query_stride, query_head_stride, block_stride, value_offset,
        table_stride;
    int32_t num_tokens, num_seqs, num_heads, num_kv_heads, head_dim, block_size;
    int32_t window;      // 0: none
    int32_t is_chunked;  // the window is the query's chunk of so many tokens
    int32_t kv_type;     // 0: float32, 1: bfloat16, 2: float16, 3: E4M3, 4: E5M2
    int32_t uses_amx;    // where a unit has more than a few rows
    float scale, softcap;  // softcap 0: none
    mutable struct Plan *plan;  // of the row that runs
};

// The first position that the query at `position` sees.
inline int32_t first_visible(const AttendArguments &a, int32_t position) {
    if (!a.window || position < a.window) return 0;
    return position - (a.is_chunked ? position % a.window : a.window - 1);
}

// Prefetch of one thread.
class Prefetch {
  public:
    // Continue with what `a` reads in this row of kernels; null: fetch nothing.
    void open(const AttendArguments *a, int64_t row, int32_t part, int32_t parts) {
        if (a == of_ && row == row_) return;
        of_ = a, row_ = row;
        at_ = end_ = values_ = nullptr;
        bytes_left_ = a ? MOST_BYTES : 0;
        if (!a) return;
        static const int64_t BYTES[] = {4, 2, 2, 1, 1};
        item_ = BYTES[a->kv_type];
        first_ = (int32_t)((int64_t)a->num_seqs * part / parts),
        end_seq_ = (int32_t)((int64_t)a->num_seqs * (part + 1) / parts);
        seq_ = first_ - 1, block_ = num_blocks_ = 0;
    }

    // Fetch the next few lines into the second-level cache.
    __attribute__((always_inline)) void fetch() {
        if (at_ >= end_ && ((bytes_left_ <= 0 && !values_) || !next())) return;
#pragma GCC unroll 4
        for (int i = 0; i < LINES; ++i) __builtin_prefetch(at_ + 64 * i, 0, 2);
        at_ += 64 * LINES;
    }

  private:
    static constexpr int LINES = 4;
    static constexpr int64_t MOST_BYTES = 1 << 22;  // for one attention; the first that it reads

    const AttendArguments *of_ = nullptr;
    const char *at_ = nullptr, *end_ = nullptr,
               *values_ = nullptr;  // values_: of the block whose keys these are
    int64_t row_ = 0, bytes_left_ = 0, item_ = 0;
    int32_t first_ = 0, end_seq_ = 0, seq_ = 0, block_ = 0, num_blocks_ = 0;

    // Go on to the values of this block or the keys of the next. Blocks shared with the previous
    // sequence are skipped.
    __attribute__((noinline)) bool next() {
        const AttendArguments &a = *of_;
        const int64_t bytes = (int64_t)a.num_kv_heads * a.block_size * a.head_dim * item_;
        if (values_) {
            at_ = values_, end_ = values_ + bytes, values_ = nullptr;
            return true;
        }
        for (;; ++block_) {
            while (block_ >= num_blocks_) {
                if (++seq_ >= end_seq_) {
                    bytes_left_ = 0;
                    return false;
                }
                const int32_t length = a.seq_lens[seq_];
                num_blocks_ = (length + a.block_size - 1) / a.block_size;
                block_ = first_visible(a, length - 1) / a.block_size;
            }
            const int32_t *id = a.block_table + seq_ * a.table_stride + block_;
            if (seq_ > first_ && *id == *(id - a.table_stride)) continue;
            at_ = (const char *)a.cache + *id * a.block_stride * item_, end_ = at_ + bytes;
            values_ = at_ + a.value_offset * item_;
            bytes_left_ -= 2 * bytes;
            ++block_;
            return true;
        }
    }
};
