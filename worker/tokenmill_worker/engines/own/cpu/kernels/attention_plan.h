// Cuts the work of one call of paged attention into units and items.
#pragma once

#include "attention_tile.h"
#include "work_stealing.h"
#include <new>
#include <stdlib.h>

#define TILE 256
#define TILE_STRIPS (TILE / STRIP)
#define UNIT_ROWS 96

struct Unit {
    int32_t seq, head, token,
        num_tokens;  // tokens [token, token + num_tokens) of the packed queries
    int32_t position;                      // of its first token
    int32_t first_tile, last_tile;
    int64_t partials;  // offset in floats into the partials; −1: one thread folds as it goes
};
struct Item {
    int32_t unit, tile;  // tile −1: all of the unit's
    int32_t others;      // units that see the same keys in this tile, as a chain of links; −1: none
};
struct Link {
    int32_t unit, next;
};

// What a plan follows from.
struct PlanKey {
    const int32_t *query_start, *seq_lens, *block_table;
    int64_t table_stride;
    int32_t num_seqs, num_heads, num_kv_heads, head_dim, block_size, window, is_chunked, most_rows;

    explicit PlanKey(const AttendArguments &a, int32_t rows)
        : query_start(a.query_start),
          seq_lens(a.seq_lens),
          block_table(a.block_table),
          table_stride(a.table_stride),
          num_seqs(a.num_seqs),
          num_heads(a.num_heads),
          num_kv_heads(a.num_kv_heads),
          head_dim(a.head_dim),
          block_size(a.block_size),
          window(a.window),
          is_chunked(a.is_chunked),
          most_rows(rows) {}
};

static_assert(sizeof(PlanKey) == 4 * 8 + 8 * 4, "compared byte by byte");

struct Plan {
    PlanKey key;
    Plan *older;
    Unit *units;
    Item *items;
    Link *links;
    float *partials, *scratch;
    int64_t scratch_floats;  // of each thread
    int32_t num_units, num_items;
    bool has_partials;
};

// At the start of the workspace: the plans of a row of kernels. Layers that are alike share one,
// and none changes before the row is over: a thread that comes late to a layer still finds what it
// was at.
struct Plans {
    int64_t row, used;  // bytes
    Plan *newest;

    Plan *find(const PlanKey &key) const {
        Plan *plan = newest;
        while (plan && memcmp(&plan->key, &key, sizeof key)) plan = plan->older;
        return plan;
    }
};

INLINE int64_t aligned(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }
INLINE int rounded(int x, int step) { return (x + step - 1) / step * step; }

// Units, then items in an order that starts the long ones first. With null arrays it only counts.
struct Planner {
    const AttendArguments &a;
    const int unit_rows;  // at most, but for a token's own
    int64_t num_units = 0, num_items = 0, partials = 0, max_rows = 0;

    void add(Plan *plan, const Unit &unit, bool split, int64_t floats) {
        const int tiles = unit.last_tile - unit.first_tile;
        if (plan) {
            plan->units[num_units] = unit;
            plan->units[num_units].partials = split ? partials : -1;
            if (!split) plan->items[num_items] = {(int32_t)num_units, -1, -1};
            for (int t = 0; split && t < tiles; ++t)
                plan->items[num_items + t] = {(int32_t)num_units, unit.first_tile + t, -1};
        }
        num_units += 1;
        num_items += split ? tiles : 1;
        partials += split ? tiles * floats : 0;
    }

    void sequence(Plan *plan, int seq, bool scarce) {
        const int group = a.num_heads / a.num_kv_heads, start = a.query_start[seq];
        const int num_tokens = a.query_start[seq + 1] - start,
                  step = group < unit_rows ? unit_rows / group : 1;
        for (int head = 0; head < a.num_kv_heads;
             ++head)  // outermost, so that a head's keys stay in the cache
            for (int token = num_tokens - 1; token >= 0; token -= step) {
                const int first = token - step + 1 > 0 ? token - step + 1 : 0,
                          count = token - first + 1;
                const int position = a.seq_lens[seq] - num_tokens + first, end = position + count;
                const int first_tile = first_visible(a, position) / TILE,
                          last_tile = end > 0 ? (end + TILE - 1) / TILE : first_tile;
                const int64_t rows = (int64_t)count * group,
                              floats = rows * (rounded(a.head_dim, STRIP) + 2);
                const bool split = last_tile - first_tile > 1 && (scarce || rows <= 2 * MAX_ROWS);
                if (rows > max_rows) max_rows = rows;
                add(plan, {seq, head, start + first, count, position, first_tile, last_tile, 0},
                    split, floats);
            }
    }

    void all(Plan *plan, bool scarce) {
        num_units = num_items = partials = 0;
        for (int chunks = 1; chunks >= 0;
             --chunks)  // prefill chunks first: their units are the longest
            for (int seq = 0; seq < a.num_seqs; ++seq)
                if ((a.query_start[seq + 1] - a.query_start[seq] > 1) == (bool)chunks)
                    sequence(plan, seq, scarce);
    }
};

// Decodes whose prompts begin alike have the same blocks in their first tiles: such a tile is
// computed once for all of them, so that its keys and values are read once and enough rows stand
// against them. Each row's arithmetic stays the same. Hydragen and cascade attention part a batch's
// common prefix off likewise.
struct Sharing {
    const AttendArguments &a;
    Plan &plan;
    int32_t *leaders;  // [slots] items by the first block of their tile, −1: none
    int64_t slots;     // a power of two

    static int64_t slots_for(int64_t num_items) {
        int64_t slots = 16;
        while (slots < 2 * num_items) slots *= 2;
        return slots;
    }

    const int32_t *blocks(const Item &item) const {
        return a.block_table + plan.units[item.unit].seq * a.table_stride +
               item.tile * (TILE / a.block_size);
    }
    bool may_share(const Item &item) const {
        if (item.tile < 0) return false;
        const Unit &u = plan.units[item.unit];
        return u.num_tokens == 1 && u.position + 1 >= (item.tile + 1) * TILE;
    }
    bool alike(const Item &x, const Item &y) const {
        return plan.units[x.unit].head == plan.units[y.unit].head && x.tile == y.tile &&
               !memcmp(blocks(x), blocks(y), TILE / a.block_size * sizeof(int32_t));
    }

    // Moves items that follow another out of the list.
    void find() {
        const int most = UNIT_ROWS / (a.num_heads / a.num_kv_heads);
        if (a.window || TILE % a.block_size || most < 2) return;
        memset(leaders, -1, slots * sizeof(int32_t));
        int32_t kept = 0, num_links = 0;
        for (int32_t i = 0; i < plan.num_items; ++i) {
            const Item item = plan.items[i];
            int32_t *leader = may_share(item) ? slot_of(item) : nullptr;
            if (leader && *leader >= 0 && num_others(plan.items[*leader]) + 2 <= most) {
                Item &first = plan.items[*leader];
                plan.links[num_links] = {item.unit, first.others};
                first.others = num_links++;
                continue;
            }
            if (leader) *leader = kept;
            plan.items[kept++] = item;
        }
        plan.num_items = kept;
    }

    int32_t *slot_of(const Item &item) const {
        uint64_t at = ((uint64_t)*blocks(item) * a.num_kv_heads + plan.units[item.unit].head) *
                          0x9e3779b97f4a7c15u >>
                      20;
        for (;; ++at) {
            int32_t *slot = leaders + (at & (slots - 1));
            if (*slot < 0 || alike(plan.items[*slot], item)) return slot;
        }
    }
    int num_others(const Item &item) const {
        int count = 0;
        for (int32_t l = item.others; l >= 0; l = plan.links[l].next) ++count;
        return count;
    }
};

// The plan of these arguments, in the workspace, of which `plans.used` bytes are taken. Returns 0,
// or the number of bytes that it must have.
INLINE int64_t make_plan(const AttendArguments &a, Plans &plans, const PlanKey &key, int threads) {
    Planner planner{a, key.most_rows};
    planner.all(nullptr, false);
    const bool scarce = planner.num_items < 4 * threads;
    if (scarce) planner.all(nullptr, true);
    const int64_t width = rounded(a.head_dim, STRIP), slots = Sharing::slots_for(planner.num_items);
    const int64_t rows =
        (planner.partials && planner.max_rows < UNIT_ROWS ? UNIT_ROWS : planner.max_rows) + 1;
    const int64_t scratch_floats = aligned((rows * (a.head_dim + 2 * width + 4) + 4 * VW +
                                            MAX_ROWS * TILE + 2 * TILE * width) *
                                           4) /
                                   4;
    int64_t offset = plans.used + aligned(sizeof(Plan)), place[6];
    const int64_t sizes[6] = {planner.num_units * (int64_t)sizeof(Unit),
                              planner.num_items * (int64_t)sizeof(Item),
                              planner.partials * 4,
                              threads * scratch_floats * 4,
                              planner.num_items * (int64_t)sizeof(Link),
                              slots * (int64_t)sizeof(int32_t)};
    for (int i = 0; i < 6; ++i) place[i] = offset, offset += aligned(sizes[i]);
    if (offset > a.workspace_bytes) return offset;
    Plan &plan = *new (a.workspace + plans.used) Plan{key, plans.newest};
    plans.newest = a.plan = &plan, plans.used = offset;
    plan.scratch_floats = scratch_floats;
    plan.units = (Unit *)(a.workspace + place[0]);
    plan.items = (Item *)(a.workspace + place[1]);
    plan.partials = (float *)(a.workspace + place[2]);
    plan.scratch = (float *)(a.workspace + place[3]);
    plan.links = (Link *)(a.workspace + place[4]);
    planner.all(&plan, scarce);
    plan.num_units = (int32_t)planner.num_units, plan.num_items = (int32_t)planner.num_items;
    plan.has_partials = planner.partials > 0;
    if (plan.has_partials) Sharing{a, plan, (int32_t *)(a.workspace + place[5]), slots}.find();
    return 0;
}

// Gives the arguments a plan, with units of `most_rows` rows at most, and zeros to rows of no
// sequence. Returns as make_plan.
INLINE int64_t prepare(const AttendArguments &a, int32_t most_rows, const PoolThread &thread) {
    Plans &plans = *(Plans *)a.workspace;
    if (plans.row != thread.row()) plans = {thread.row(), aligned(sizeof(Plans)), nullptr};
    const PlanKey key{a, most_rows};
    a.plan = plans.find(key);
    if (!a.plan)
        if (const int64_t missing = make_plan(a, plans, key, thread.parts)) return missing;
    const int64_t row = (int64_t)a.num_heads * a.head_dim,
                  used = a.num_seqs ? a.query_start[a.num_seqs] : 0;
    if (used < a.num_tokens)
        memset(a.out + used * row, 0, (a.num_tokens - used) * row * sizeof(float));
    return 0;
}

namespace {

template <class T>
constexpr float UNIT = 1.0f;  // what is loaded counts times so much
template <>
constexpr float UNIT<f8> = F8_UNIT;

template <class T>
struct KeyTile {  // where the strips of one tile lie; entries outside [first, last) are undefined
    const T *keys[TILE_STRIPS], *values[TILE_STRIPS];
    int first, last;  // positions within the tile that some row of the unit sees
};

}  // namespace
