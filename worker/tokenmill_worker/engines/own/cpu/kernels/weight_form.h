// The interface of a weight form, and its weights decoded to floats step by step.
//
// A form is a struct, one object for each panel of NR columns. It has GROUP (steps of k that share
// data; k is a multiple of it), CHUNK (steps in one load), the members that amx_float.h needs, and
//     static Form at(const LinearArguments &, int64_t panel);
//     Group group(int64_t i) const;                         data shared by the steps from i on
//     Chunk chunk(int64_t i) const;                         the codes of the steps from i on
//     void fetch_group(int64_t i) const;                    the same, into the cache
//     void fetch_chunk(int64_t i) const;
//     static vf decode(const Group &, const Chunk &, int step, int half);    VW columns of a step
#pragma once

#include "float_tile.h"

namespace {

// Into the second-level cache.
INLINE void fetch_lines(const void *from, int64_t bytes) {
#pragma GCC unroll 4
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)from + at, 0, 2);
}

// use(i, step, columns) with the weights of P panels at every step i + step of `depth`, in order,
// while those of `ahead` are fetched, where there is such.
template <int P, class Form, class Use>
INLINE void each_step(const Form *panels, const Form *ahead, Depth depth, Use use) {
    for (int64_t first = depth.first; first < depth.first + depth.count; first += Form::GROUP) {
        typename Form::Group group[P];
#pragma GCC unroll 2
        for (int q = 0; q < P; ++q) {
            group[q] = panels[q].group(first);
            if (ahead) ahead[q].fetch_group(first);
        }
        for (int64_t i = first; i < first + Form::GROUP; i += Form::CHUNK) {
            typename Form::Chunk chunk[P];
#pragma GCC unroll 2
            for (int q = 0; q < P; ++q) {
                chunk[q] = panels[q].chunk(i);
                if (ahead) ahead[q].fetch_chunk(i);
            }
#pragma GCC unroll 8
            for (int step = 0; step < Form::CHUNK; ++step) {
                vf columns[2 * P];
#pragma GCC unroll 4
                for (int v = 0; v < 2 * P; ++v)
                    columns[v] = Form::decode(group[v / 2], chunk[v / 2], step, v % 2);
                use(i, step, columns);
            }
        }
    }
}

}  // namespace
