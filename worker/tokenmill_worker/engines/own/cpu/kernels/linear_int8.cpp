// Linear layers with 8-bit weights (a scale per output) and 8-bit activations (a scale and a zero
// per row).
//
// Each row is rounded to the 256 steps between its least and its largest value: x = scale · q +
// zero. The sums of q · w over k are exact in 32-bit integers, scales and zeros are applied at the
// end, so a row's result depends on nothing but the row. Weights are stored plus 128, so that the
// unsigned operand of the dot product is the one that stays in registers; 128 times the sum of the
// row's q is taken off again. Panels are [n / NR][k / 4][NR columns][4 bytes], `scale` [n /
// NR][2][NR]: scales, then sums of the weights.

#include "amx.h"
#include "int8_rows.h"

#if VW == 16
#define MR 12
#else
#define MR 4
#endif

// OWN_ROWS: times threads: up to so many every thread rounds for itself, which is sooner done than
// shared
#define OWN_ROWS 16
#define AMX_FEW 11   // rows that dot products of vectors take

namespace {

// ── tiles ──

// What the end of a panel's sums needs.
struct ColumnScales {
    vf scale[2], sum[2];

    INLINE_MEMBER explicit ColumnScales(const float *from)
        : scale{load(from), load(from + VW)}, sum{load(from + NR), load(from + NR + VW)} {}

    INLINE_MEMBER void store_row(const Row &row, vi left, vi right, float *to) const {
        const vi offset = row.offset - vi{};
        const vf own = splat(row.scale), zero = splat(row.zero);
        store(to, fma(zero, sum[0], __builtin_convertvector(left - offset, vf) * scale[0] * own));
        store(to + VW,
              fma(zero, sum[1], __builtin_convertvector(right - offset, vf) * scale[1] * own));
    }
};

struct Tile {
    const Quad *x;
    const u8 *panel;
    const float *scales;  // of the panel's columns, then their weights' sums
    const Row *rows;
    int64_t stride;
    float *sums;          // [rows, NR]
    const u8 *ahead;      // what this tile fetches: `ahead_stride` bytes for each step of k (as in
                          // float_tile.h)
    int64_t ahead_stride;
};

template <int R>
void tile(const Tile &t) {
    constexpr int CHAINS = R == 1   ? 4
                           : R == 2 ? 2
                                    : 1;  // integer sums may be split: they are exact
    vi acc[CHAINS][R][2];
    for (int c = 0; c < CHAINS; ++c)
        for (int r = 0; r < R; ++r) acc[c][r][0] = acc[c][r][1] = vi{};
    const u8 *w = t.panel, *ahead = t.ahead;
    int64_t i = 0;
    for (; i + CHAINS <= t.stride; i += CHAINS) {
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; ++c, w += NR * DEPTH) {
            const Columns left = columns(w), right = columns(w + VW * DEPTH);
            __builtin_prefetch(w + 8 * NR * DEPTH);
            __builtin_prefetch(w + 8 * NR * DEPTH + 64);
            __builtin_prefetch(ahead, 0, 2);
            __builtin_prefetch(ahead + 64, 0, 2);
            ahead += t.ahead_stride;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const Quad x = t.x[r * t.stride + i + c];
                acc[c][r][0] = dot(acc[c][r][0], left, x);
                acc[c][r][1] = dot(acc[c][r][1], right, x);
            }
        }
    }
    for (; i < t.stride; ++i, w += NR * DEPTH)
        for (int r = 0; r < R; ++r) {
            const Quad x = t.x[r * t.stride + i];
            acc[0][r][0] = dot(acc[0][r][0], columns(w), x);
            acc[0][r][1] = dot(acc[0][r][1], columns(w + VW * DEPTH), x);
        }
    const ColumnScales scales(t.scales);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        for (int c = 1; c < CHAINS; ++c) acc[0][r][0] += acc[c][r][0], acc[0][r][1] += acc[c][r][1];
        scales.store_row(t.rows[r], acc[0][r][0], acc[0][r][1], t.sums + r * NR);
    }
}

// Weights that are fetched while something else is done, spread over it: loads wait behind lines
// that come in bursts.
struct Fetch {
    const u8 *next, *const end;

    INLINE_MEMBER int64_t left() const { return (end - next + 63) / 64; }
    INLINE_MEMBER void lines(int64_t count) {
        for (; count > 0 && next < end; --count, next += 64) __builtin_prefetch(next, 0, 2);
    }
};

typedef void (*TileFunction)(const Tile &);
const TileFunction TILES[] = {
    nullptr, tile<1>, tile<2>, tile<3>, tile<4>,
#if MR > 4
    tile<5>, tile<6>, tile<7>, tile<8>, tile<9>, tile<10>, tile<11>, tile<12>,
#endif
};

INLINE void finish(const LinearArguments &a, int64_t p, int64_t first_row, const float *sums,
                   int64_t rows) {
    const Output out = below(at_panel(whole_output(a), p, a.n), first_row);
    finish_rows(&out, 1, sums, NR, rows);
}

#if AMX
#define AMX_ROWS 16                          // of a register
#define AMX_QUADS 16                         // of k in one product of registers
#define AMX_BYTES (AMX_QUADS * NR * DEPTH)   // of a panel's weights there

// Up to two tiles of rows, as in tile(). Three quarters of what it fetches go among the products.
template <bool TWO>
void amx_tiles(const Tile &t, int64_t high, int64_t low, TileShapes &shapes) {
    alignas(64) int32_t sums[2 * AMX_ROWS * NR];
    const int64_t stride = t.stride * sizeof(Quad), count = TWO ? high + low : high;
    shapes.set(high, TWO ? low : 1);
    store_first();
    const u8 *w = t.panel;
    const Quad *x = t.x, *second = x + high * t.stride;
    Fetch ahead{t.ahead, t.ahead + t.stride * t.ahead_stride};
    const int64_t some = ahead.left() * 3 / 4 * AMX_QUADS / (t.stride * (TWO ? 4 : 2)) + 1;
    for (int64_t i = 0; i < t.stride; i += AMX_QUADS, w += AMX_BYTES) {
        _tile_loadd(4, x + i, stride);
        _tile_loadd(6, w, NR * DEPTH);
        _tile_dpbsud(0, 4, 6);
        ahead.lines(some);
        _tile_loadd(7, w + VW * DEPTH, NR * DEPTH);
        _tile_dpbsud(1, 4, 7);
        ahead.lines(some);
        if (!TWO) continue;
        _tile_loadd(5, second + i, stride);
        _tile_dpbsud(2, 5, 6);
        ahead.lines(some);
        _tile_dpbsud(3, 5, 7);
        ahead.lines(some);
    }
    _tile_stored(0, sums, NR * sizeof(int32_t));
    _tile_stored(1, sums + VW, NR * sizeof(int32_t));
    if (TWO) {
        _tile_stored(2, sums + high * NR, NR * sizeof(int32_t));
        _tile_stored(3, sums + high * NR + VW, NR * sizeof(int32_t));
    }
    const ColumnScales scales(t.scales);
    const int64_t rest = (ahead.left() + count - 1) / count;
    for (int64_t r = 0; r < count; ++r) {
        ahead.lines(rest);
        vi left, right;
        memcpy(&left, sums + r * NR, sizeof left), memcpy(&right, sums + r * NR + VW, sizeof right);
        scales.store_row(t.rows[r], left, right, t.sums + r * NR);
    }
}

#define MOST_ROWS (2 * AMX_ROWS)  // of a tile
INLINE bool uses_amx(const LinearArguments &a) {
    return a.uses_amx && a.m > AMX_FEW && a.k % (AMX_QUADS * DEPTH) == 0 && may_use_amx();
}
INLINE void amx_rows(const Tile &t, int64_t count, TileShapes &shapes) {
    if (count > AMX_ROWS)
        amx_tiles<true>(t, (count + 1) / 2, count / 2, shapes);
    else
        amx_tiles<false>(t, count, 0, shapes);
}
#else
#define MOST_ROWS MR
INLINE bool uses_amx(const LinearArguments &) { return false; }
struct TileShapes {};
INLINE void amx_rows(const Tile &, int64_t, TileShapes &) {}
#endif

// Panel `p`, while panel `next` is fetched (none: −1). `sums` [m, NR], or where each tile's become
// outputs, [MOST_ROWS, NR].
void panel_times_rows(const LinearArguments &a, const Rows &rows, int64_t p, int64_t next,
                      float *sums, bool finishes, TileShapes &shapes) {
    const bool by_amx = uses_amx(a);
    const int64_t most = by_amx ? MOST_ROWS : MR, tiles = (a.m + most - 1) / most,
                  base = a.m / tiles, extra = a.m % tiles;
    const int64_t size = rows.stride * NR * DEPTH, steps = tiles * rows.stride;
    const u8 *weight = (const u8 *)a.weight;
    Tile t{rows.values,
           weight + p * size,
           (const float *)a.scale + p * 2 * NR,
           rows.rows,
           rows.stride,
           sums,
           weight + (next < 0 ? p : next) * size,
           next < 0 ? 0 : (size + steps - 1) / steps};
    for (int64_t index = 0, row = 0; index < tiles; ++index) {
        const int64_t count = base + (index < extra);
        if (by_amx)
            amx_rows(t, count, shapes);
        else
            TILES[count](t);
        if (finishes) finish(a, p, row, sums, count);
        else t.sums += count * NR;
        row += count, t.x += count * t.stride, t.rows += count;
        t.ahead += rows.stride * t.ahead_stride;
    }
}

}  // namespace

extern "C" int tokenmill_panel_width() { return NR; }

extern "C" int64_t tokenmill_panel_bytes(int64_t n, int64_t k) {
    return (n + NR - 1) / NR * NR * quads(k) * DEPTH;
}

extern "C" int64_t tokenmill_row_bytes(int64_t k) { return row_bytes(k); }

// Integers [n, k] in [-127, 127] → panels; rows past n and columns past k are zero
extern "C" void tokenmill_pack(const i8 *weight, u8 *packed, int64_t n, int64_t k) {
    pack_panels<NR>((uint32_t *)packed, n, quads(k), [=](int64_t row, int64_t i) {
        uint32_t quad = 0;
        for (int64_t c = 0; c < DEPTH; ++c) {
            const int value = i * DEPTH + c < k ? weight[row * k + i * DEPTH + c] : 0;
            quad |= (uint32_t)(value + 128) << 8 * c;
        }
        return quad;
    }, 0x80808080u);
}

// y = epilogue(x · weightᵀ + bias)
extern "C" int64_t tokenmill_linear_member(const LinearArguments *arguments, PoolThread *thread) {
    const LinearArguments a = of_thread(*arguments, thread);
    const int64_t panels = num_panels(a.n), num_sums = COMMIT_ROWS * NR,
                  one_row = (a.k + 15) & ~(int64_t)15;
    const bool is_own = a.m * thread->parts <= OWN_ROWS;
    float *sums = (float *)thread->scratch((num_sums + one_row) * sizeof(float) +
                                           (is_own ? a.m * row_bytes(a.k) : 0));
    float *room = sums + num_sums;
    const Rows rows = rows_at(is_own ? (char *)(room + one_row) : a.workspace, a);
    const int64_t panel_bytes = rows.stride * NR * DEPTH;
    const u8 *mine = (const u8 *)a.weight + thread->first_of(panels, thread->part) * panel_bytes;
    Fetch first_panel{mine,
                      mine + (is_own ? 0 : panel_bytes)};  // rows of one's own are soon rounded
    const int64_t some = first_panel.left() * thread->parts / a.m + 1;
    const auto round = [&](int64_t first, int64_t count, int64_t) {
        for (int64_t r = first; r < first + count; ++r) {
            first_panel.lines(some);
            rows.rows[r] = quantise(input_row(a, r, r + 1 < first + count, room), a.k,
                                    rows.values + r * rows.stride);
        }
    };
    if (is_own)
        round(0, a.m, -1);
    else
        thread->parallel_for(a.m, 4, round);
    const bool commits = a.m <= COMMIT_ROWS;
    TileShapes shapes;
    const auto work = [&](int64_t p, int64_t, int64_t next) {
        panel_times_rows(a, rows, p, next, sums, !commits, shapes);
    };
    if (commits)
        thread->parallel_for_commit(panels, 1, work,
                                    [&](int64_t p, int64_t) { finish(a, p, 0, sums, a.m); });
    else
        thread->parallel_for(panels, 1, work);
    return 0;
}
