// Members that count how often each of their units is done, for test_work_stealing.py.
#include "work_stealing.h"

struct CountArguments {
    int32_t *counts;          // [units], how often each was done
    int32_t *computed;        // how many units were computed, also those dropped
    int32_t *stalled, *gave_up;
    const int32_t *released;  // what the thread that stalls waits for, ten seconds at most
    int64_t units, grain;
    int32_t commits;
    int32_t stalls_at;  // the unit that stalls whoever computes it first; −1: none
    int32_t stalls_second;  // whoever computes it again instead, and the first only until then
    int32_t sleep_us;   // in every seventh unit
};

static void compute(const CountArguments &a, int64_t first, int64_t count) {
    __atomic_add_fetch(a.computed, (int32_t)count, __ATOMIC_SEQ_CST);
    if (a.sleep_us && first % 7 == 3) usleep(a.sleep_us);
    if (a.stalls_at < first || a.stalls_at >= first + count) return;
    const int32_t before = __atomic_fetch_add(a.stalled, 1, __ATOMIC_SEQ_CST);
    const auto wait_for = [&](const int32_t *word, int32_t least) {
        const int64_t end = now_ns() + 10000000000;
        while (__atomic_load_n(word, __ATOMIC_SEQ_CST) < least && now_ns() < end) usleep(100);
        if (__atomic_load_n(word, __ATOMIC_SEQ_CST) < least) *a.gave_up = 1;
    };
    if (a.stalls_second && before == 0) wait_for(a.stalled, 2);
    if (before == (a.stalls_second ? 1 : 0)) wait_for(a.released, 1);
}

extern "C" int64_t count_member(const CountArguments *arguments, PoolThread *thread) {
    const CountArguments &a = *arguments;
    const auto commit = [&](int64_t first, int64_t count) {
        for (int64_t i = first; i < first + count; ++i)
            __atomic_add_fetch(a.counts + i, 1, __ATOMIC_SEQ_CST);
    };
    if (a.commits)
        thread->parallel_for_commit(
            a.units, a.grain, [&](int64_t i, int64_t n, int64_t) { compute(a, i, n); }, commit);
    else
        thread->parallel_for(a.units, a.grain, [&](int64_t i, int64_t n, int64_t) {
            compute(a, i, n), commit(i, n);
        });
    return 0;
}

struct CheckArguments {
    const CountArguments *of;
    int32_t *flag;    // set when this is reached
    int32_t refuses;  // so many times it answers 1000 + the times left
};

// Answers the number of units of `of` that were not done exactly once.
extern "C" int64_t check_member(CheckArguments *arguments, PoolThread *thread) {
    return thread->once([=]() -> int64_t {
        __atomic_store_n(arguments->flag, 1, __ATOMIC_SEQ_CST);
        if (arguments->refuses) return 1000 + arguments->refuses--;
        int64_t wrong = 0;
        for (int64_t i = 0; i < arguments->of->units; ++i) wrong += arguments->of->counts[i] != 1;
        return wrong;
    });
}
