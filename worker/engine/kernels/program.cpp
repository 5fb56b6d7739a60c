// Kernel calls in a row by one team of threads, so that many decoder layers cost their caller one call.

#include <string.h>

#include "team.h"

// Row from_rows[i] of `from` becomes row to_rows[i] of `to`; null: row i.
struct RowArguments {
    const float *from;
    float *to;
    const int64_t *from_rows, *to_rows;
    int64_t count, width;
};

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

extern "C" int64_t tokenmill_move_rows_member(const RowArguments *arguments, const Team *team) {
    const RowArguments &a = *arguments;
    const Share mine = share(a.count, team->part, team->parts);
    for (int64_t i = mine.first; i < mine.last; ++i)
        memcpy(a.to + (a.to_rows ? a.to_rows[i] : i) * a.width, a.from + (a.from_rows ? a.from_rows[i] : i) * a.width,
               a.width * sizeof(float));
    return 0;
}
