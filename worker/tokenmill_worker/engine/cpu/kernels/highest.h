// The highest output of each row, for a head whose other outputs nobody asks for: logits of 32 rows are megabytes, which
// would be stored and read again for a token each.
//
// Each thread keeps what it has seen by lanes, in memory of its own; draw.cpp finds the highest of them all.
#pragma once

#include "team.h"
#include "vectors.h"

#define HIGHEST_ROWS 64  // at most

// Of one row: by lanes the highest value, or NaN once there is one, and the vector that it was in, the first of equal ones.
struct Highest {
    vf value;
    vi vector;

    // Two vectors of outputs, of which `left` is the number `at`.
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
        const vi is_new = (vi)(seen > value) | (vi)(seen != seen) | ((vi)(seen == value) & (vi)(which < vector));
        value = select(is_new, seen, value);
        vector = is_new ? which : vector;
    }
};

// What one thread has seen. Only what was opened in a row of kernels counts in it: a thread may not have come at all.
struct HighestSeen {
    alignas(64) int64_t row;
    alignas(64) float best[HIGHEST_ROWS];  // where threads tell each other (highest_dots.h): an output of each row
    alignas(64) Highest rows[HIGHEST_ROWS];

    static HighestSeen &of(void *memory, int32_t part) { return ((HighestSeen *)memory)[part]; }

    void open(int64_t count, int64_t number) {
        for (int64_t r = 0; r < count; ++r) rows[r] = {splat(-INFINITY), INT32_MAX - vi{}}, tell(r, -INFINITY);
        __atomic_store_n(&row, number, __ATOMIC_RELEASE);
    }
    void tell(int64_t r, float output) { __atomic_store(&best[r], &output, __ATOMIC_RELAXED); }
    float told(int64_t r) const {
        float output;
        __atomic_load(&best[r], &output, __ATOMIC_RELAXED);
        return output;
    }
    bool is_open(int64_t number) const { return __atomic_load_n(&row, __ATOMIC_ACQUIRE) == number; }
};
