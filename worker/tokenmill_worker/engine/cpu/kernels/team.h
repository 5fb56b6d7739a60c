// Threads that run a row of kernels together, phase after phase, and none of which the others depend on.
//
// A phase is a number of units. Each thread begins with an equal share; who is through with his own takes the back half
// of what another has left. A phase ends when its units are done, not when its threads are: one that has no core,
// because an I/O process or the machine's other guests have it, finds its share done by others when it comes. A unit
// that it was working on meanwhile is computed again by somebody who would otherwise wait, where the kernel computes
// beside its output and hands in at the end: who is through with it first hands in, and what comes second is dropped.
//
// Whatever a kernel does outside of its phases every thread does for itself, late ones when it is long over: only what
// stays the same during the whole row may be looked at there, and counts, which a late thread never uses.
//
// Taking from the back of another's range is work stealing (Blumofe and Leiserson 1999; ranges as in Intel's TBB).
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

#include "reading.h"

#define SPIN_NS 100000      // a wait looks so long before it sleeps
#define PATIENCE_NS 10000   // beyond what a unit takes, before one that is being worked on is computed again

// Units [first, end) of a phase, as one word that can be compared and exchanged: fewer than 2^16 phases, 2^24 units.
struct Range {
    int64_t phase, first, end;

    static Range of(uint64_t word) {
        return {(int64_t)(word >> 48), (int64_t)(word >> 24 & 0xffffff), (int64_t)(word & 0xffffff)};
    }
    uint64_t word() const { return (uint64_t)phase << 48 | (uint64_t)first << 24 | (uint64_t)end; }
};

struct alignas(128) Hand {
    uint64_t units;  // a Range: what a thread has yet to do
    uint64_t done;   // phase << 48 | units that it has done
};

struct Gate {
    alignas(64) int32_t phase;  // so many are over
    int32_t sleepers;
    int32_t answered;           // the phase that stopped the row, 0: none
    int64_t answer;
    int64_t row;                // its number, never 0 and never another's
    Hand *hands;
};

// Memory of one thread, which stays its own from row to row.
struct Scratch {
    char *bytes = nullptr;
    int64_t size = 0;
    Reading reading;

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

// While *word is `seen`.
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

class Team {
  public:
    const int32_t part, parts;

    Team(Gate *gate, int32_t part, int32_t parts, Scratch *scratch)
        : part(part), parts(parts), gate_(gate), scratch_(scratch) {}

    // work(first, count, next) for all of `count` units, up to `grain` at a time and none across a multiple of it;
    // `next`: what this thread will probably do then, or −1.
    template <class Work>
    void each(int64_t count, int64_t grain, Work work) {
        run<false>(count, grain, work, [](int64_t, int64_t) {});
    }

    // The same for work that writes nothing but this thread's scratch, and hand_in(first, count), which is called at
    // once after it or never.
    template <class Work, class HandIn>
    void each_handed_in(int64_t count, int64_t grain, Work work, HandIn hand_in) {
        run<true>(count, grain, work, hand_in);
    }

    // Where the thread `of` begins in a phase of `count` units.
    int64_t first_of(int64_t count, int32_t of) const { return (count * of + parts - 1) / parts; }

    int64_t row() const { return gate_->row; }

    // What `ask` answers, called once; other than 0 it must end the row.
    template <class Ask>
    int64_t once(Ask ask) {
        each(1, 1, [&](int64_t, int64_t, int64_t) {
            const int64_t answer = ask();
            if (!answer) return;
            gate_->answer = answer;
            __atomic_store_n(&gate_->answered, phase_, __ATOMIC_RELEASE);
        });
        return __atomic_load_n(&gate_->answered, __ATOMIC_ACQUIRE) == phase_ ? gate_->answer : 0;
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

    // Of what `attention`, which comes later in this row, reads; null: nothing.
    Reading &reading(const AttendArguments *attention) {
        scratch_->reading.open(attention, gate_->row, part, parts);
        return scratch_->reading;
    }

  private:
    Gate *const gate_;
    Scratch *const scratch_;
    int32_t phase_ = 0;

    template <bool HANDED_IN, class Work, class HandIn>
    void run(int64_t count, int64_t grain, Work work, HandIn hand_in) {
        ++phase_;
        if (parts == 1) {
            for (int64_t first = 0, size; first < count; first += size) {
                size = at_once(first, count, grain);
                work(first, size, first + size < count ? first + size : -1);
                hand_in(first, size);
            }
            return;
        }
        __atomic_thread_fence(__ATOMIC_ACQUIRE);  // `count` was read before
        if (is_over()) return;
        Hand &hand = gate_->hands[part];
        uint64_t word = __atomic_load_n(&hand.units, __ATOMIC_ACQUIRE);
        if (Range::of(word).phase < phase_)  // else somebody was here before, and left the rest
            __atomic_compare_exchange_n(&hand.units, &word, share(count, part).word(), false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED);
        const int64_t started = now_ns();
        int64_t done = 0;
        Hand *from = &hand;  // whose unit it is
        do {
            for (;;) {
                word = __atomic_load_n(&from->units, __ATOMIC_ACQUIRE);
                const Range left = Range::of(word);
                if (left.phase != phase_) return;
                if (left.first == left.end) {
                    if (from == &hand && take_free<HANDED_IN>(count, grain)) continue;
                    break;
                }
                const int64_t size = at_once(left.first, left.end, grain), behind = left.first + size;
                if (!HANDED_IN && !take(*from, word, {phase_, behind, left.end})) continue;
                work(left.first, size, behind < left.end && from == &hand ? behind : -1);
                if (!HANDED_IN || is_first(*from, left.first, size)) {
                    hand_in(left.first, size);
                    done += size;
                    __atomic_store_n(&hand.done, (uint64_t)phase_ << 48 | (uint64_t)done, __ATOMIC_RELEASE);
                }
                if (from != &hand) break;
            }
        } while ((from = wait<HANDED_IN>(count, done ? (now_ns() - started) * grain / done : SPIN_NS)));
    }

    static int64_t at_once(int64_t first, int64_t end, int64_t grain) {
        const int64_t size = grain - first % grain;
        return size < end - first ? size : end - first;
    }

    Range share(int64_t count, int32_t of) const { return {phase_, first_of(count, of), first_of(count, of + 1)}; }

    bool is_over() const { return __atomic_load_n(&gate_->phase, __ATOMIC_ACQUIRE) >= phase_; }

    static bool take(Hand &from, uint64_t &word, Range left) {
        return __atomic_compare_exchange_n(&from.units, &word, left.word(), false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }

    // Takes the units that were worked on out of the hand, unless somebody else who computed them has.
    bool is_first(Hand &hand, int64_t first, int64_t size) const {
        uint64_t word = __atomic_load_n(&hand.units, __ATOMIC_ACQUIRE);
        for (;;) {
            const Range now = Range::of(word);
            if (now.phase != phase_ || now.first != first || now.first == now.end) return false;
            if (take(hand, word, {phase_, first + size, now.end})) return true;
        }
    }

    // Into this thread's empty hand: the back half of what another has not begun.
    template <bool HANDED_IN>
    bool take_free(int64_t count, int64_t grain) {
        for (int32_t other = 1; other < parts; ++other) {
            const int32_t from = (part + other) % parts;
            Hand &hand = gate_->hands[from];
            uint64_t word = __atomic_load_n(&hand.units, __ATOMIC_ACQUIRE);
            for (;;) {
                Range left = Range::of(word);
                if (left.phase > phase_) return false;
                const bool has_come = left.phase == phase_;
                if (!has_come) left = share(count, from);
                int64_t begun = left.first;
                if (HANDED_IN && has_come && left.first < left.end) begun += at_once(left.first, left.end, grain);
                if (begun == left.end) break;
                int64_t middle = begun + (left.end - begun) / 2;
                if (middle - middle % grain >= begun) middle -= middle % grain;
                if (!take(hand, word, {phase_, left.first, middle})) continue;
                __atomic_store_n(&gate_->hands[part].units, Range{phase_, middle, left.end}.word(), __ATOMIC_RELEASE);
                return true;
            }
        }
        return false;
    }

    // What another is working on.
    Hand *begun() const {
        for (int32_t other = 1; other < parts; ++other) {
            Hand &hand = gate_->hands[(part + other) % parts];
            const Range left = Range::of(__atomic_load_n(&hand.units, __ATOMIC_ACQUIRE));
            if (left.phase == phase_ && left.first != left.end) return &hand;
        }
        return nullptr;
    }

    bool all_done(int64_t count) const {
        int64_t done = 0;
        for (int32_t of = 0; of < parts; ++of) {
            const uint64_t word = __atomic_load_n(&gate_->hands[of].done, __ATOMIC_ACQUIRE);
            if ((int64_t)(word >> 48) == phase_) done += word & 0xffffff;
        }
        return done == count;
    }

    // Null: the phase is over. Else whose unit takes long: it is to be computed again, and who is through first hands in.
    template <bool HANDED_IN>
    Hand *wait(int64_t count, int64_t unit_ns) {
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
            if (HANDED_IN && now - started > unit_ns + PATIENCE_NS)
                if (Hand *hand = begun()) return hand;
            if (now - started > unit_ns + SPIN_NS) break;
        }
        __atomic_add_fetch(&gate_->sleepers, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(&gate_->phase, __ATOMIC_SEQ_CST) < phase_) sleep_on(&gate_->phase, phase_ - 1);
        __atomic_sub_fetch(&gate_->sleepers, 1, __ATOMIC_SEQ_CST);
        return nullptr;
    }

    void end_phase() {
        int32_t before = phase_ - 1;
        if (__atomic_compare_exchange_n(&gate_->phase, &before, phase_, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST) &&
            __atomic_load_n(&gate_->sleepers, __ATOMIC_SEQ_CST))
            wake_all(&gate_->phase);
    }
};

// A kernel's part of one thread: its phases. 0, or a number that stops the row.
typedef int64_t (*Member)(const void *arguments, Team *team);
