// Threads that run a row of kernels together: each takes its part of every kernel and waits for the others between
// two, so that a row of kernels opens one parallel region and not one each.
//
// A wait spins shortly, since the others are as good as there when every thread has a core; then it sleeps in the
// kernel, which leaves the core to a thread that was pushed off its own. OpenMP's own waiting offers one or the other.
#pragma once

#include <stdint.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

extern "C" int omp_get_thread_num(void);
extern "C" int omp_get_num_threads(void);

#define SPIN_NS 100000

struct Gate {
    alignas(64) int32_t arrived;
    alignas(64) int32_t generation;
    int32_t sleepers;
    alignas(64) int64_t number;  // what member 0 tells the others; they read it after the next wait
    alignas(64) int64_t taken;   // turns of the kernel that is running
};

struct Team {
    Gate *gate;
    int32_t part, parts;

    void wait() const;

    // The next `count` turns: the first of them. Counted from 0 after every wait. A thread that lost its core leaves
    // its turns to the others.
    int64_t take(int64_t count) const { return __atomic_fetch_add(&gate->taken, count, __ATOMIC_RELAXED); }
};

static inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline void Team::wait() const {
    Gate &g = *gate;
    if (parts == 1) {
        g.taken = 0;
        return;
    }
    const int32_t seen = __atomic_load_n(&g.generation, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&g.arrived, 1, __ATOMIC_ACQ_REL) == parts) {
        __atomic_store_n(&g.arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&g.taken, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&g.generation, seen + 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
        if (__atomic_load_n(&g.sleepers, __ATOMIC_SEQ_CST))
            syscall(SYS_futex, &g.generation, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
        return;
    }
    for (int64_t end = 0;;) {
        for (int i = 0; i < 32; ++i, relax())
            if (__atomic_load_n(&g.generation, __ATOMIC_ACQUIRE) != seen) return;
        const int64_t now = now_ns();
        if (!end) end = now + SPIN_NS;
        if (now > end) break;
    }
#ifdef __linux__
    __atomic_add_fetch(&g.sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&g.generation, __ATOMIC_SEQ_CST) == seen)
        syscall(SYS_futex, &g.generation, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    __atomic_sub_fetch(&g.sleepers, 1, __ATOMIC_SEQ_CST);
#else
    while (__atomic_load_n(&g.generation, __ATOMIC_ACQUIRE) == seen) sched_yield();
#endif
}

// Indices [first, last) of one of `parts` equal shares.
struct Share {
    int64_t first, last;
};
static inline Share share(int64_t count, int part, int parts) { return {count * part / parts, count * (part + 1) / parts}; }

// A kernel by itself: `member(team)` on every thread of a new region; what member 0 answers.
template <class Member>
static int64_t alone(int threads, Member member) {
    Gate gate{};
    int64_t answer = 0;
#pragma omp parallel num_threads(threads)
    {
        const Team team{&gate, omp_get_thread_num(), omp_get_num_threads()};
        const int64_t mine = member(team);
        if (team.part == 0) answer = mine;
    }
    return answer;
}
