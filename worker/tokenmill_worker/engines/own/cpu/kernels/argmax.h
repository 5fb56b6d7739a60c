// Finds the highest output of each row of a head whose other outputs are not needed: the logits of
// 32 rows are megabytes, which would be stored and read again for one token each.
//
// Each thread keeps the highest outputs that it computed, by lanes, in its own memory; draw.cpp
// joins the threads' results.
#pragma once

#include "work_stealing.h"
#include "vectors.h"

#define ARGMAX_ROWS 64  // at most

// One row: by lanes the highest value (NaN once one is NaN) and the first vector that held it.
struct Argmax {
    vf value;
    vi vector;

    // Take two vectors of outputs; `left` has the number `at`.
    INLINE_MEMBER void see(vf left, vf right, int32_t at) {
        if (!reaches(left) && !reaches(right)) return;  // most do not
        take(left, at);
        take(right, at + 1);
    }

  private:
    INLINE_MEMBER bool reaches(vf seen) const {
#if VW == 16
        return _mm512_cmp_ps_mask((__m512)seen, (__m512)value, _CMP_NLT_UQ) != 0;
#else
        return any_lane(~(vi)(seen < value));
#endif
    }
    INLINE_MEMBER void take(vf seen, int32_t at) {
        const vi which = at + vi{};
        const vi is_new =
            (vi)(seen > value) | (vi)(seen != seen) | ((vi)(seen == value) & (vi)(which < vector));
        value = select(is_new, seen, value);
        vector = is_new ? which : vector;
    }
};

// Result of one thread. It counts only if it was opened in this row of kernels: a late thread may
// have computed nothing.
struct ArgmaxSeen {
    alignas(64) int64_t row;
    alignas(64) float best[ARGMAX_ROWS];  // an output of each row, read by other threads
                                          // (argmax_byte_dot.h)
    alignas(64) Argmax rows[ARGMAX_ROWS];

    static ArgmaxSeen &of(void *memory, int32_t part) { return ((ArgmaxSeen *)memory)[part]; }

    void open(int64_t count, int64_t number) {
        for (int64_t r = 0; r < count; ++r)
            rows[r] = {splat(-INFINITY), INT32_MAX - vi{}}, publish_best(r, -INFINITY);
        __atomic_store_n(&row, number, __ATOMIC_RELEASE);
    }
    void publish_best(int64_t r, float output) {
        __atomic_store(&best[r], &output, __ATOMIC_RELAXED);
    }
    float read_best(int64_t r) const {
        float output;
        __atomic_load(&best[r], &output, __ATOMIC_RELAXED);
        return output;
    }
    bool is_open(int64_t number) const { return __atomic_load_n(&row, __ATOMIC_ACQUIRE) == number; }
};
