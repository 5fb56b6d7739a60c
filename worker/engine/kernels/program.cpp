// Kernel calls in a row by one team of threads, so that many decoder layers cost their caller one call.

#include "team.h"

// A kernel's share of one member. 0, or (the same for every member) a number that stops the row.
typedef int64_t (*Member)(const void *arguments, const Team *team);

struct Call {
    Member member;
    const void *arguments;
};

// Runs calls [first, count). Returns count, or the index of the call that answered, with its number in `answer`.
extern "C" int64_t tokenmill_run(const Call *calls, int64_t first, int64_t count, int64_t num_threads, int64_t *answer) {
    int64_t stopped = count;
    *answer = alone((int)num_threads, [&](const Team &team) -> int64_t {
        for (int64_t i = first; i < count; ++i) {
            const int64_t number = calls[i].member(calls[i].arguments, &team);
            if (number) {
                if (team.part == 0) stopped = i;
                return number;
            }
            team.wait();
        }
        return 0;
    });
    return stopped;
}
