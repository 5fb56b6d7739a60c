// Kernel calls in a row, so that a whole decoder layer costs its caller one call.

#include <stdint.h>

struct Call {
    void *function;
    const void *arguments;
    int64_t answers;  // 1: the function returns 0, or a number that stops the row
};

// Runs calls [first, count). Returns count, or the index of the call that answered, with its number in `answer`.
extern "C" int64_t tokenmill_run(const Call *calls, int64_t first, int64_t count, int64_t *answer) {
    for (int64_t i = first; i < count; ++i) {
        if (!calls[i].answers) {
            ((void (*)(const void *))calls[i].function)(calls[i].arguments);
            continue;
        }
        *answer = ((int64_t(*)(const void *))calls[i].function)(calls[i].arguments);
        if (*answer) return i;
    }
    return count;
}
