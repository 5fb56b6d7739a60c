// Runs phases of units on a pool of threads, so that no thread delays the others.
//
// Each thread starts with an equal range of a phase's units. A thread that has finished its range
// steals the back half of another thread's range. A phase ends when all units are done, even if a
// thread never ran: an I/O process or another guest of the machine may hold its core, and other
// threads then do its share. If such a thread has begun a unit, a waiting thread computes that unit
// again, where the kernel computes into scratch and stores at the end. The first result is stored,
// the second is dropped.
//
// Code outside of phases runs in every thread, in a late one after the phase is over. It may read
// only what stays the same during the whole row of kernels, and counts, which a late thread never
// uses.
//
// Stealing from the back of a range: Blumofe and Leiserson 1999; ranges as in Intel's TBB.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

#include "prefetch.h"

#define SPIN_NS 100000      // a waiting thread polls this long before it sleeps
// RECOMPUTE_AFTER_NS: time beyond a unit's own before another thread computes it again
#define RECOMPUTE_AFTER_NS 10000

// Units [first, end) of a phase, as one word that can be compared and exchanged: fewer than 2^16
// phases, 2^24 units.
struct Range {
    int64_t phase, first, end;

    static Range of(uint64_t word) {
        return {(int64_t)(word >> 48), (int64_t)(word >> 24 & 0xffffff),
                (int64_t)(word & 0xffffff)};
    }
    uint64_t word() const { return (uint64_t)phase << 48 | (uint64_t)first << 24 | (uint64_t)end; }
};

struct alignas(128) WorkerSlot {
    uint64_t units;  // a Range: units left to do
    uint64_t done;   // phase << 48 | number of units done
};

struct Barrier {
    alignas(64) int32_t phase;  // number of finished phases
    int32_t sleepers;
    int32_t answered;           // the phase that stopped the row, 0: none
    int64_t answer;
    int64_t row;                // its number, never 0 and never another's
    WorkerSlot *slots;
};

// Memory of one thread, kept from row to row.
struct Scratch {
    char *bytes = nullptr;
    int64_t size = 0;
    Prefetch prefetch;

    ~Scratch() { free(bytes); }
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

// Sleep while *word equals `seen`.
static inline void sleep_on(int32_t *word, int32_t seen) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
#else
    if (__atomic_load_n(word, __ATOMIC_SEQ_CST) == seen) sched_yield();
#endif
}
static inline void wake_all(int32_t *word) {
#ifdef __linux__
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

class PoolThread {
  public:
    const int32_t part, parts;

    PoolThread(Barrier *barrier, int32_t part, int32_t parts, Scratch *scratch)
        : part(part), parts(parts), barrier_(barrier), scratch_(scratch) {}

    // work(first, count, next) for all of `count` units, up to `grain` at a time and none across a
    // multiple of it; `next`: what this thread will probably do then, or −1.
    template <class Work>
    void parallel_for(int64_t count, int64_t grain, Work work) {
        run<false>(count, grain, work, [](int64_t, int64_t) {});
    }

    // The same for work that writes nothing but this thread's scratch, and commit(first, count),
    // which is called at once after it or never.
    template <class Work, class Commit>
    void parallel_for_commit(int64_t count, int64_t grain, Work work, Commit commit) {
        run<true>(count, grain, work, commit);
    }

    // Where the thread `of` begins in a phase of `count` units.
    int64_t first_of(int64_t count, int32_t of) const { return (count * of + parts - 1) / parts; }

    int64_t row() const { return barrier_->row; }

    // What `ask` answers, called once; other than 0 it must end the row.
    template <class Ask>
    int64_t once(Ask ask) {
        parallel_for(1, 1, [&](int64_t, int64_t, int64_t) {
            const int64_t answer = ask();
            if (!answer) return;
            barrier_->answer = answer;
            __atomic_store_n(&barrier_->answered, phase_, __ATOMIC_RELEASE);
        });
        return __atomic_load_n(&barrier_->answered, __ATOMIC_ACQUIRE) == phase_ ? barrier_->answer
                                                                                : 0;
    }

    // This thread's own memory, aligned to 64 bytes. What was in it is lost when it grows.
    char *scratch(int64_t bytes) {
        if (scratch_->size < bytes) {
            free(scratch_->bytes);
            scratch_->size = (bytes + 4095) & ~(int64_t)4095;
            scratch_->bytes = (char *)aligned_alloc(64, scratch_->size);
        }
        return scratch_->bytes;
    }

    // Return the prefetch of what `attention`, a later kernel of this row, reads; null: it fetches
    // nothing.
    Prefetch &prefetch(const AttendArguments *attention) {
        scratch_->prefetch.open(attention, barrier_->row, part, parts);
        return scratch_->prefetch;
    }

  private:
    Barrier *const barrier_;
    Scratch *const scratch_;
    int32_t phase_ = 0;

    template <bool COMMITS, class Work, class Commit>
    void run(int64_t count, int64_t grain, Work work, Commit commit) {
        ++phase_;
        if (parts == 1) {
            for (int64_t first = 0, size; first < count; first += size) {
                size = chunk_size(first, count, grain);
                work(first, size, first + size < count ? first + size : -1);
                commit(first, size);
            }
            return;
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);  // `count` was read before
        if (is_over()) return;
        WorkerSlot &slot = barrier_->slots[part];
        uint64_t word = __atomic_load_n(&slot.units, __ATOMIC_ACQUIRE);
        if (Range::of(word).phase < phase_)  // otherwise another thread has stolen from this range
            __atomic_compare_exchange_n(&slot.units, &word, share(count, part).word(), false,
                                        __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
        const int64_t started = now_ns();
        int64_t done = 0;
        WorkerSlot *from = &slot;  // whose unit it is
        do {
            for (;;) {
                word = __atomic_load_n(&from->units, __ATOMIC_ACQUIRE);
                const Range left = Range::of(word);
                if (left.phase != phase_) return;
                if (left.first == left.end) {
                    if (from == &slot && take_free<COMMITS>(count, grain)) continue;
                    break;
                }
                const int64_t size = chunk_size(left.first, left.end, grain),
                              behind = left.first + size;
                if (!COMMITS && !take(*from, word, {phase_, behind, left.end})) continue;
                work(left.first, size, behind < left.end && from == &slot ? behind : -1);
                if (!COMMITS || is_first(*from, left.first, size)) {
                    commit(left.first, size);
                    done += size;
                    __atomic_store_n(&slot.done, (uint64_t)phase_ << 48 | (uint64_t)done,
                                     __ATOMIC_RELEASE);
                }
                if (from != &slot) break;
            }
        } while (
            (from = wait<COMMITS>(count, done ? (now_ns() - started) * grain / done : SPIN_NS)));
    }

    static int64_t chunk_size(int64_t first, int64_t end, int64_t grain) {
        const int64_t size = grain - first % grain;
        return size < end - first ? size : end - first;
    }

    Range share(int64_t count, int32_t of) const {
        return {phase_, first_of(count, of), first_of(count, of + 1)};
    }

    bool is_over() const { return __atomic_load_n(&barrier_->phase, __ATOMIC_ACQUIRE) >= phase_; }

    static bool take(WorkerSlot &from, uint64_t &word, Range left) {
        return __atomic_compare_exchange_n(&from.units, &word, left.word(), false, __ATOMIC_ACQ_REL,
                                           __ATOMIC_ACQUIRE);
    }

    // Remove finished units from the slot. Return false if another thread that computed them
    // removed them first.
    bool is_first(WorkerSlot &slot, int64_t first, int64_t size) const {
        uint64_t word = __atomic_load_n(&slot.units, __ATOMIC_ACQUIRE);
        for (;;) {
            const Range now = Range::of(word);
            if (now.phase != phase_ || now.first != first || now.first == now.end) return false;
            if (take(slot, word, {phase_, first + size, now.end})) return true;
        }
    }

    // Steal the back half of the units that another thread has not begun.
    template <bool COMMITS>
    bool take_free(int64_t count, int64_t grain) {
        for (int32_t other = 1; other < parts; ++other) {
            const int32_t from = (part + other) % parts;
            WorkerSlot &slot = barrier_->slots[from];
            uint64_t word = __atomic_load_n(&slot.units, __ATOMIC_ACQUIRE);
            for (;;) {
                Range left = Range::of(word);
                if (left.phase > phase_) return false;
                const bool has_come = left.phase == phase_;
                if (!has_come) left = share(count, from);
                int64_t begun = left.first;
                if (COMMITS && has_come && left.first < left.end)
                    begun += chunk_size(left.first, left.end, grain);
                if (begun == left.end) break;
                int64_t middle = begun + (left.end - begun) / 2;
                if (middle - middle % grain >= begun) middle -= middle % grain;
                if (!take(slot, word, {phase_, left.first, middle})) continue;
                __atomic_store_n(&barrier_->slots[part].units,
                                 Range{phase_, middle, left.end}.word(), __ATOMIC_RELEASE);
                return true;
            }
        }
        return false;
    }

    // Return a slot whose unit another thread is computing, or null.
    WorkerSlot *begun() const {
        for (int32_t other = 1; other < parts; ++other) {
            WorkerSlot &slot = barrier_->slots[(part + other) % parts];
            const Range left = Range::of(__atomic_load_n(&slot.units, __ATOMIC_ACQUIRE));
            if (left.phase == phase_ && left.first != left.end) return &slot;
        }
        return nullptr;
    }

    bool all_done(int64_t count) const {
        int64_t done = 0;
        for (int32_t of = 0; of < parts; ++of) {
            const uint64_t word = __atomic_load_n(&barrier_->slots[of].done, __ATOMIC_ACQUIRE);
            if ((int64_t)(word >> 48) == phase_) done += word & 0xffffff;
        }
        return done == count;
    }

    // Wait for the end of the phase. Return null then, or a slot whose unit takes long and is to be
    // computed again.
    template <bool COMMITS>
    WorkerSlot *wait(int64_t count, int64_t unit_ns) {
        for (int64_t started = 0;;) {
            for (int i = 0; i < 32; ++i, relax()) {
                if (is_over()) return nullptr;
                if (all_done(count)) {
                    end_phase();
                    return nullptr;
                }
            }
            const int64_t now = now_ns();
            if (!started) started = now;
            if (COMMITS && now - started > unit_ns + RECOMPUTE_AFTER_NS)
                if (WorkerSlot *slot = begun()) return slot;
            if (now - started > unit_ns + SPIN_NS) break;
        }
        __atomic_add_fetch(&barrier_->sleepers, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&barrier_->phase, __ATOMIC_SEQ_CST) < phase_)
            sleep_on(&barrier_->phase, phase_ - 1);
        __atomic_sub_fetch(&barrier_->sleepers, 1, __ATOMIC_SEQ_CST);
        return nullptr;
    }

    void end_phase() {
        int32_t before = phase_ - 1;
        if (__atomic_compare_exchange_n(&barrier_->phase, &before, phase_, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST) &&
            __atomic_load_n(&barrier_->sleepers, __ATOMIC_SEQ_CST))
            wake_all(&barrier_->phase);
    }
};

// A kernel's part of one thread: its phases. 0, or a number that stops the row.
typedef int64_t (*Member)(const void *arguments, PoolThread *thread);
