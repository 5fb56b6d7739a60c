// Computes a tile of paged attention in the matrix registers, for units of many rows. Their
// queries, and later the weights of their keys, are split rows; keys and values become right
// factors, once for all rows of the unit.
//
// The arithmetic is as exact as that of attention_tile.h but rounds differently. The number of rows
// of its unit decides which one a row gets. Storage in half precision has fewer parts and fewer
// products (amx_tiles.h).
#pragma once

#include "amx_tiles.h"
#include "attention_plan.h"

#if AMX
#define AMX_KEYS AMX_DEPTH  // keys of a panel of scores, and of a block of weights
#define AMX_UNIT_ROWS 384    // for which the factors of a tile are made once

namespace {

inline bool takes_amx(const AttendArguments &a) {
    return a.uses_amx && a.head_dim % AMX_DEPTH == 0 && a.block_size % STRIP == 0 && may_use_amx();
}

template <class T>
constexpr int PARTS_OF = 3;
template <>
constexpr int PARTS_OF<bf16> = 1;
template <>
constexpr int PARTS_OF<f16> = 2;
template <>
constexpr int PARTS_OF<f8> = 1;
template <>
constexpr int PARTS_OF<f8e5> = 1;

// Right factors that are made.
template <class T>
struct Ready {
    static constexpr int64_t GROUP = PIECE, CHUNK = PIECE, PARTS = PARTS_OF<T>;
    static constexpr bool IS_FACTOR = true, HAS_ZEROS = false;
    const uint32_t *lanes;

    INLINE_MEMBER const void *start() const { return lanes; }
    void fetch_chunk(int64_t) const {}
};

// One thread's memory for tiles of one shape, and its registers.
template <class T>
class AmxAttention {
  public:
    // From so many rows on it pays to make the factors.
    static bool takes(const AttendArguments &a, int64_t rows) {
        return rows > (PARTS_OF<T> > 2 ? 96 : 24) && takes_amx(a);
    }

    // Of the memory, for units of up to `rows` rows.
    static int64_t bytes(const AttendArguments &a, int64_t rows) {
        const int64_t queries = rows * a.head_dim * 3 * sizeof(bf16),
                      weights = SEEN_ROWS * TILE * 3 * sizeof(bf16);
        return queries + weights + SEEN_ROWS * TILE * sizeof(float) +
               2 * factors(a.head_dim) * sizeof(uint32_t);
    }

    AmxAttention(const AttendArguments &a, int64_t rows, char *memory)
        : dim_(a.head_dim),
          softcap_(a.softcap),
          keys_((uint32_t *)memory),
          values_(keys_ + factors(dim_)),
          scores_((float *)(values_ + factors(dim_))),
          weights_((bf16 *)(scores_ + SEEN_ROWS * TILE)),
          queries_(weights_ + SEEN_ROWS * TILE * 3) {}

    // The unit's queries, [rows, head_dim], from now on.
    void take_queries(const float *queries, int64_t rows) {
        split_ = {queries_, nullptr, rows, dim_};
        for (int64_t r = 0; r < rows; ++r)
            split_.template split<false>(queries + r * dim_, r + 1 < rows ? dim_ : 0, dim_, r);
    }

    // max[rows], sum[rows] and values[rows][dim] of one tile of keys, for strips that lie at
    // keys[s] and values[s]; see(r, count): what rows [r, r + count) see.
    template <class See>
    void compute(const T *const *keys, const T *const *values, int first, int last, See see,
                 float *max, float *sum, float *out) {
        make_keys(keys, first / STRIP, (last + STRIP - 1) / STRIP);
        make_values(values, first, last);
        for (int64_t r = 0; r < split_.m; r += SEEN_ROWS) {
            const int count = (int)(r + SEEN_ROWS < split_.m ? SEEN_ROWS : split_.m - r);
            const Seen seen = see((int)r, count);
            const int panel = seen.begin() / AMX_KEYS, end = (seen.end() + AMX_KEYS - 1) / AMX_KEYS;
            const bool is_seen = seen.end() > seen.begin();
            for (int p = panel; is_seen && p < end; ++p)
                product(split_, r, keys_ + p * blocks() * Tiles::Made::BLOCK, blocks(),
                        scores_ + p * AMX_KEYS, TILE);
            store_first();
            for (int i = 0; i < count; ++i) {
                float *row = scores_ + i * TILE;
                max[r + i] = cap_and_hide(row, seen, i, softcap_);
                sum[r + i] = weigh(row, seen, max + r + i);
            }
            if (!is_seen) continue;
            const SplitRows weights{weights_, nullptr, count, (end - panel) * AMX_KEYS};
            for (int i = 0; i < count; ++i) {
                float *row = scores_ + i * TILE;
                if (seen.begin() > panel * AMX_KEYS) clear(row + panel * AMX_KEYS);
                if (seen.end() < end * AMX_KEYS) clear(row + seen.end());
                weights.template split<false>(row + panel * AMX_KEYS, TILE, weights.k, i);
            }
            for (int c = 0; c < blocks(); ++c)
                product(weights, 0, values_ + (c * (TILE / AMX_KEYS) + panel) * Tiles::Made::BLOCK,
                        end - panel, out + r * dim_ + c * NR, dim_);
        }
    }

  private:
    typedef AmxTiles<Ready<T>, true, true> Tiles;

    const int64_t dim_;
    const float softcap_;
    uint32_t *const keys_, *const values_;  // [panel of AMX_KEYS][dim / AMX_DEPTH][BLOCK], [panel
                                            // of NR][AMX_KEYS][BLOCK]
    float *const scores_;                   // [SEEN_ROWS][TILE]
    bf16 *const weights_, *const queries_;
    SplitRows split_{};
    TileShapes shapes_;

    static int64_t factors(int64_t dim) { return TILE * dim * PARTS_OF<T> / 2; }
    int64_t blocks() const { return dim_ / AMX_DEPTH; }

    static void clear(float *strip) {
        for (int i = 0; i < STRIP; i += VW) store(strip + i, vf{});
    }

    // Rows [row, row + SEEN_ROWS), as far as there are, × `blocks` right factors.
    void product(const SplitRows &rows, int64_t row, const uint32_t *factors, int64_t blocks,
                 float *to, int64_t stride) {
        const Ready<T> ready{factors};
        const int64_t high = rows.height(row), low = rows.height(row + AMX_ROWS);
        if (low)
            Tiles{rows, ready, ready, nullptr, 0, blocks, -1, shapes_, stride}
                .template multiply<true>(row, high, low, to);
        else
            AmxTiles<Ready<T>, false, true>{rows,   ready, ready,   nullptr, 0,
                                            blocks, -1,    shapes_, stride}
                .template multiply<true>(row, high, low, to);
    }

    static INLINE_MEMBER void store_pairs(uint32_t *block, int pair, int half, vf even, vf odd) {
        each_part<PARTS_OF<T>>(even, odd, [&](int part, vu a, vu b) __attribute__((always_inline)) {
            store_pair(block + part * PART_LANES + pair * NR + half * VW, a, b);
        });
    }

    void make_keys(const T *const *strips, int first, int last) {
        for (int s = first; s < last; ++s) {
            uint32_t *to = keys_ + s / 2 * blocks() * Tiles::Made::BLOCK;
            const T *from = strips[s];
            for (int64_t b = 0; b < blocks(); ++b, to += Tiles::Made::BLOCK)
                for (int pair = 0; pair < AMX_DEPTH / 2; ++pair, from += 2 * STRIP)
                    store_pairs(to, pair, s % 2, load(from), load(from + STRIP));
        }
    }

    // Values of keys that no query sees become zero.
    void make_values(const T *const *strips, int first, int last) {
        const int end = (last + AMX_KEYS - 1) / AMX_KEYS * AMX_KEYS;
        for (int k = first / AMX_KEYS * AMX_KEYS; k < end; k += 2) {
            uint32_t *to = values_ + k / AMX_KEYS * Tiles::Made::BLOCK;
            const bool has_even = k >= first && k < last, has_odd = k + 1 >= first && k + 1 < last;
            const T *from = has_even || has_odd ? strips[k / STRIP] + k % STRIP * dim_ : nullptr;
            for (int64_t c = 0; c < blocks(); ++c, to += TILE / AMX_KEYS * Tiles::Made::BLOCK)
                for (int half = 0; half < 2; ++half) {
                    const int64_t column = c * NR + half * VW;
                    store_pairs(to, k % AMX_KEYS / 2, half, has_even ? load(from + column) : vf{},
                                has_odd ? load(from + dim_ + column) : vf{});
                }
        }
    }
};

}  // namespace

#else
#define AMX_UNIT_ROWS UNIT_ROWS

inline bool takes_amx(const AttendArguments &) { return false; }

template <class T>
class AmxAttention {
  public:
    static bool takes(const AttendArguments &, int64_t) { return false; }
    static int64_t bytes(const AttendArguments &, int64_t) { return 0; }
    AmxAttention(const AttendArguments &, int64_t, char *) {}
    void take_queries(const float *, int64_t) {}
    template <class See>
    void compute(const T *const *, const T *const *, int, int, See, float *, float *, float *) {}
};

#endif
