// Runs a row of kernel calls on a pool of threads, so that many decoder layers are one call. All
// kernels get their threads here.
//
// Each calling thread has its own helpers. A helper joins a row when it gets a core and leaves it
// at the end. No thread waits for a helper to join (work_stealing.h), so a row starts at once while
// helpers sleep.

#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "work_stealing.h"

// LOOK_NS: a helper polls this long for the next row before it sleeps: from layers to the head, not
// a whole gap
#define LOOK_NS 200000

struct Call {
    Member member;
    const void *arguments;
};

namespace {

// What a thread brings upon itself: blocked, it would end the process without a word from any
// handler.
const int FAULTS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP};

struct Row {
    const Call *calls;
    int64_t first, count;
    int32_t parts;
    int64_t stopped, answer;  // set by part 0

    void run(Barrier *barrier, int32_t part, Scratch *scratch) {
        PoolThread thread(barrier, part, parts, scratch);
        for (int64_t i = first; i < count; ++i) {
            const int64_t number = calls[i].member(calls[i].arguments, &thread);
            if (!number) continue;
            if (part == 0) stopped = i, answer = number;
            return;
        }
    }
};

int32_t num_forks = 0;  // a forked process has none of its parent's threads

void count_fork() { ++num_forks; }

class ThreadPool {
  public:
    ThreadPool() {
        static const int registered = pthread_atfork(nullptr, nullptr, count_fork);
        (void)registered;
    }

    ~ThreadPool() {
        if (born_ != num_forks) return;
        __atomic_store_n(&is_ending_, true, __ATOMIC_SEQ_CST);
        open_or_close();
        for (int32_t i = 0; i < size_; ++i)
            pthread_join(helpers_[i]->thread, nullptr), delete helpers_[i];
        free(barrier_.slots);
        free(helpers_);
    }

    void run(Row &row) {
        if (born_ != num_forks) born_ = num_forks, size_ = inside_ = sleepers_ = 0;
        if (row.parts > 1) row.parts = grown_to(row.parts);
        static int64_t num_rows = 0;
        barrier_.row = __atomic_add_fetch(&num_rows, 1, __ATOMIC_RELAXED);
        barrier_.phase = barrier_.answered = 0;
        if (row.parts == 1) return row.run(&barrier_, 0, &scratch_);
        memset((void *)barrier_.slots, 0, sizeof(WorkerSlot) * row.parts);
        row_ = &row;
        open_or_close();
        row.run(&barrier_, 0, &scratch_);
        open_or_close();
        for (int i = 0; __atomic_load_n(&inside_, __ATOMIC_SEQ_CST); relax())
            if (++i > 4096) sched_yield();
    }

  private:
    struct Helper {
        ThreadPool *pool;
        int32_t part;
        pthread_t thread;
        Scratch scratch;
    };

    Barrier barrier_{};
    Row *row_ = nullptr;
    Scratch scratch_;
    Helper **helpers_ = nullptr;
    int32_t size_ = 0, born_ = num_forks;
    bool is_ending_ = false;
    alignas(64) int32_t turn_ = 0;  // odd: a row is open
    int32_t sleepers_ = 0;
    alignas(64) int32_t inside_ = 0;

    // How many threads there are at most, the caller among them.
    int32_t grown_to(int32_t parts) {
        if (parts <= size_ + 1) return parts;
        barrier_.slots = (WorkerSlot *)realloc_aligned(barrier_.slots, sizeof(WorkerSlot) * parts);
        helpers_ = (Helper **)realloc(helpers_, sizeof(Helper *) * (parts - 1));
        sigset_t all, before;
        sigfillset(&all);
        for (int fault : FAULTS) sigdelset(&all, fault);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the process's own threads
        for (; size_ < parts - 1; ++size_) {
            Helper *helper = new Helper{this, size_ + 1, {}, {}};
            if (pthread_create(&helper->thread, nullptr, help, helper)) {
                delete helper;
                break;
            }
            helpers_[size_] = helper;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return size_ + 1;
    }

    static void *realloc_aligned(void *old, int64_t bytes) {
        free(old);
        return aligned_alloc(alignof(WorkerSlot), bytes);
    }

    void open_or_close() {
        __atomic_add_fetch(&turn_, 1, __ATOMIC_SEQ_CST);
        if ((turn_ & 1 || is_ending_) && __atomic_load_n(&sleepers_, __ATOMIC_SEQ_CST))
            wake_all(&turn_);
    }

    static void *help(void *argument) {
        Helper &me = *(Helper *)argument;
        ThreadPool &pool = *me.pool;
        for (int32_t seen = 0;;) {
            const int32_t turn = pool.next_turn(seen);
            if (__atomic_load_n(&pool.is_ending_, __ATOMIC_SEQ_CST)) return nullptr;
            __atomic_add_fetch(&pool.inside_, 1, __ATOMIC_SEQ_CST);
            if (__atomic_load_n(&pool.turn_, __ATOMIC_SEQ_CST) == turn &&
                me.part < pool.row_->parts)
                pool.row_->run(&pool.barrier_, me.part, &me.scratch);
            __atomic_sub_fetch(&pool.inside_, 1, __ATOMIC_SEQ_CST);
            seen = turn;
        }
    }

    // An odd turn other than `seen`, or any at the end. Looks for it for a while, then sleeps.
    int32_t next_turn(int32_t seen) {
        int32_t turn;
        const auto has_come = [&] {
            turn = __atomic_load_n(&turn_, __ATOMIC_SEQ_CST);
            return __atomic_load_n(&is_ending_, __ATOMIC_SEQ_CST) || (turn & 1 && turn != seen);
        };
        for (int64_t end = now_ns() + LOOK_NS; now_ns() < end;)
            for (int i = 0; i < 32; ++i, relax())
                if (has_come()) return turn;
        __atomic_add_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
        while (!has_come()) sleep_on(&turn_, turn);
        __atomic_sub_fetch(&sleepers_, 1, __ATOMIC_SEQ_CST);
        return turn;
    }
};

}  // namespace

// Runs calls [first, count). Returns count, or the index of the call that answered, with its number
// in `answer`.
extern "C" int64_t tokenmill_run(const Call *calls, int64_t first, int64_t count,
                                 int64_t num_threads, int64_t *answer) {
    static thread_local ThreadPool pool;
    Row row{calls, first, count, (int32_t)num_threads, count, 0};
    pool.run(row);
    *answer = row.answer;
    return row.stopped;
}

// Row from_rows[i] of `from` becomes row to_rows[i] of `to`; null: row i. `limit`, where it is not
// 0, is the number of rows of `from`: answers -1 and moves nothing where one beyond it is asked
// for.
struct RowArguments {
    const float *from;
    float *to;
    const int64_t *from_rows, *to_rows;
    int64_t count, width, limit;
};

extern "C" int64_t tokenmill_move_rows_member(const RowArguments *arguments, PoolThread *thread) {
    const RowArguments &a = *arguments;
    if (a.limit)
        for (int64_t i = 0; i < a.count; ++i)
            if ((uint64_t)a.from_rows[i] >= (uint64_t)a.limit) return -1;
    thread->parallel_for(a.count, 16, [&](int64_t first, int64_t count, int64_t) {
        for (int64_t i = first; i < first + count; ++i)
            memcpy(a.to + (a.to_rows ? a.to_rows[i] : i) * a.width,
                   a.from + (a.from_rows ? a.from_rows[i] : i) * a.width, a.width * sizeof(float));
    });
    return 0;
}
