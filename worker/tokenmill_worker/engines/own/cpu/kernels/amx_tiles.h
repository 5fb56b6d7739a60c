// Products of split rows and right factors in the matrix registers: a panel of NR columns against a
// tile of rows, or two.
//
// A float32 number is the sum of three bfloat16 numbers, each rounding what the ones before leave
// (8 + 8 + 8 bits). Of the nine products of their parts the six largest are added up; the rest is
// below 2^-25 of the whole. With sums in float32 the result is as exact as a chain of float32
// multiply-adds, having fewer sums to round (Henry, Tang and Heinecke 2019, "Leveraging the
// bfloat16 artificial intelligence datatype for higher-precision computations"). Weights that are
// bfloat16 or half precision themselves have one part or two and leave out products, all of which
// would be zero.
//
// Codes with a scale by groups of AMX_DEPTH steps are one part each: a group's sums are scaled when
// it is multiplied, and its zero is multiplied by the sum of the row's numbers there.
//
// A row's bits depend neither on its batch nor on the thread, but are not those of the chains in
// float_tile.h.
#pragma once

#include "amx_parts.h"

#if AMX

namespace {

// One panel against a tile of rows or TWO, whose heights the registers are shaped for. Sums of rows
// lie STEP floats apart, or `stride` where there is one.
template <class Form, bool TWO, bool HAS_STRIDE = false>
struct AmxTiles {
    typedef Factors<Form> Made;
    static constexpr bool IS_CODED = Form::PARTS == 0;

    const SplitRows &rows;
    const Form &panel, &ahead;
    uint32_t *lanes;  // the panel's right factors in the blocks of this depth, in turns where these
                      // are not `kept`
    int64_t first, last;  // blocks of this depth
    int64_t kept;  // all bits set: all blocks, for the tiles behind these; else AHEAD: in turns
    TileShapes &shapes;
    const int64_t stride = STEP;
    Prefetch *const prefetch = nullptr;  // of a linear layer

    INLINE_MEMBER int64_t apart() const { return HAS_STRIDE ? stride : STEP; }
    INLINE_MEMBER void load_rows(int64_t block, int part, int64_t row, int64_t second) const {
        _tile_loadd(4, rows.tile(block, part, row), AMX_DEPTH * sizeof(bf16));
        if (TWO) _tile_loadd(5, rows.tile(block, part, second), AMX_DEPTH * sizeof(bf16));
    }
    static INLINE_MEMBER void load_columns(const uint32_t *at) {
        _tile_loadd(6, at, NR * sizeof(uint32_t));
        _tile_loadd(7, at + VW, NR * sizeof(uint32_t));
    }
    static INLINE_MEMBER void product() {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (!TWO) return;
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    static INLINE_MEMBER void load_sums(const float *from, int64_t stride, int64_t high) {
        _tile_loadd(0, from, stride * sizeof(float));
        _tile_loadd(1, from + VW, stride * sizeof(float));
        if (!TWO) return;
        _tile_loadd(2, from + high * stride, stride * sizeof(float));
        _tile_loadd(3, from + high * stride + VW, stride * sizeof(float));
    }
    static INLINE_MEMBER void store_sums(float *to, int64_t stride, int64_t high) {
        _tile_stored(0, to, stride * sizeof(float));
        _tile_stored(1, to + VW, stride * sizeof(float));
        if (!TWO) return;
        _tile_stored(2, to + high * stride, stride * sizeof(float));
        _tile_stored(3, to + high * stride + VW, stride * sizeof(float));
    }
    // The sums of the block before leave each register right before it takes the first product of
    // this one: all of them at once would have to wait for the last product.
    static INLINE_MEMBER void next_product(float *to, int64_t high) {
#define NEXT(sum, row, column, at)                \
    _tile_stored(sum, at, NR * sizeof(float));    \
    _tile_zero(sum);                              \
    _tile_dpbf16ps(sum, row, column);
        NEXT(0, 4, 6, to)
        NEXT(1, 4, 7, to + VW)
        if (!TWO) return;
        NEXT(2, 5, 6, to + high * NR)
        NEXT(3, 5, 7, to + high * NR + VW)
#undef NEXT
    }

    // The products of one block, the smaller ones first and in one order whatever the form, with
    // between(0), …, between(3) among them.
    template <class Between>
    INLINE_MEMBER void block_of(int64_t block, const uint32_t *at, int64_t row, int64_t second,
                                Between between) const {
        if (Form::PARTS > 1) {
            load_rows(block, 0, row, second);
            if (Form::PARTS > 2) load_columns(at + 2 * PART_LANES), product();
            between(0);
            load_columns(at + PART_LANES), product();
            between(1);
            load_rows(block, 1, row, second), product();
            between(2);
            load_columns(at), product();
            between(3);
            load_rows(block, 2, row, second), product();
        } else {
            load_columns(at);
            between(0);
            load_rows(block, 1, row, second), product();
            between(1);
            load_rows(block, 2, row, second), product();
            between(2), between(3);
        }
        load_rows(block, 0, row, second), product();
    }

    // The products of one block of codes; `before` gets the sums of the one before it.
    template <class Between>
    INLINE_MEMBER void codes_of(int64_t block, const uint32_t *at, int64_t row, int64_t second,
                                float *before, Between between) const {
        load_columns(at);
        load_rows(block, 2, row, second), next_product(before, second - row);
        between(0), between(1);
        load_rows(block, 1, row, second), product();
        between(2);
        load_rows(block, 0, row, second), product();
        between(3);
    }

    // sums += scale · ends + zero · the rows' own sums, for rows [from, to) of those from `row` on
    INLINE_MEMBER void scale(int64_t block, const float *ends, int64_t row, int64_t from,
                             int64_t to, float *sums) const {
        vf scales[2], zeros[2];
        Form::scales_of(panel.group(block * AMX_DEPTH), scales, zeros);
        const float *of_row = rows.sum(block, row);
        sums += from * apart(), ends += from * NR;
#pragma GCC unroll 4
        for (int64_t r = from; r < to; ++r, sums += apart(), ends += NR) {
            const vf own = Form::HAS_ZEROS ? splat(of_row[r]) : vf{};
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                vf sum = fma(load(ends + half * VW), scales[half], load(sums + half * VW));
                if (Form::HAS_ZEROS) sum = fma(own, zeros[half], sum);
                store(sums + half * VW, sum);
            }
        }
    }

    INLINE_MEMBER void make_piece(int64_t block, int piece, uint32_t *at) const {
        const int64_t step = block * AMX_DEPTH + piece * PIECE;
        if constexpr (!Form::IS_FACTOR) return Made::make(panel, ahead, step, at);
        for (int64_t i = step; i < step + PIECE; i += Form::CHUNK) ahead.fetch_chunk(i);
    }

    // Rows [row, row + high) and [row + high, row + high + low) into `sums`. IS_MADE: the factors
    // are.
    template <bool IS_MADE>
    void multiply(int64_t row, int64_t high, int64_t low, float *sums) const {
        alignas(64) float ends[2][2 * AMX_ROWS * NR];
        const int64_t second = row + high, count = high + (TWO ? low : 0);
        const auto at = [&](int64_t block) __attribute__((always_inline)) {
            if constexpr (Form::IS_FACTOR) return (uint32_t *)panel.start() + block * Made::BLOCK;
            return lanes + ((block - first) & kept) * Made::BLOCK;
        };
        shapes.set(high, TWO ? low : 1);
        store_first();
        if constexpr (!IS_CODED) {
            if (first) load_sums(sums, apart(), high);
        } else if (!first) {
            for (int64_t r = 0; r < count; ++r)
                store(sums + r * apart(), vf{}), store(sums + r * apart() + VW, vf{});
        }
        for (int64_t block = first; block < first + AHEAD && block < last && !IS_MADE; ++block)
            for (int piece = 0; piece < 4; ++piece) make_piece(block, piece, at(block));
        for (int64_t block = first; block < last; ++block) {
            store_first();
            const auto between = [&](int piece) __attribute__((always_inline)) {
                if constexpr (!HAS_STRIDE)
                    if (piece == 0)
                        prefetch
                            ->fetch();  // twice as often, its lines are in the way of the rows' own
                if (!IS_MADE && block + AHEAD < last)
                    make_piece(block + AHEAD, piece, at(block + AHEAD));
                if constexpr (IS_CODED)
                    if (block > first + 1)
                        scale(block - 2, ends[block % 2], row, count * piece / 4,
                              count * (piece + 1) / 4, sums);
            };
            if constexpr (IS_CODED)
                codes_of(block, at(block), row, second, ends[(block + 1) % 2], between);
            else
                block_of(block, at(block), row, second, between);
        }
        if constexpr (IS_CODED) {
            if (last - first > 1) scale(last - 2, ends[last % 2], row, 0, count, sums);
            store_sums(ends[(last + 1) % 2], NR, high);
            scale(last - 1, ends[(last + 1) % 2], row, 0, count, sums);
        } else {
            store_sums(sums, apart(), high);
        }
    }
};

}  // namespace

#endif
