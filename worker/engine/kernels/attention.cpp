// Paged attention on the CPU: queries of many sequences, prefill chunks and decodes alike, over keys and values
// that stay where they lie in their blocks.
//
// A unit is a few query tokens of one sequence for one key/value head; its rows are those tokens × the query heads
// of the group, so that each key and value is read once for all of them. Keys are taken in tiles of TILE positions,
// counted from position 0. Each tile gives a partial softmax, and the partials are folded in order. Where units are
// fewer than threads need, a unit's tiles are computed by several threads into the workspace and folded in a second
// pass; the arithmetic is the same, so the result does not depend on the number of threads either.
//
// Keys lie in strips, [head_dim][16 tokens], so that 16 logits come without a horizontal sum; values lie
// [token][head_dim]. Block sizes that are no multiple of 16 keep all tokens of a block in one strip.

#include "attention_amx.h"

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

template <class T>
struct Attention {
    const AttendArguments &a;
    Plan &plan;
    const int group, width;      // query heads per key/value head; head_dim rounded to whole strips
    const bool in_place;         // strips can be used where they lie
    const int64_t head_stride;   // between heads of a block
    AmxAttention<T> amx;         // of this thread

    Attention(const AttendArguments &arguments, Plan &p, Team *team)
        : a(arguments), plan(p), group(arguments.num_heads / arguments.num_kv_heads),
          width(rounded(arguments.head_dim, STRIP)),
          in_place(arguments.block_size % STRIP == 0 && arguments.head_dim % STRIP == 0),
          head_stride((int64_t)arguments.block_size * arguments.head_dim),
          amx(a, most_rows(), team->scratch(takes_amx(a) ? AmxAttention<T>::bytes(a, most_rows()) : 0)) {}

    int64_t most_rows() const { return group < AMX_UNIT_ROWS ? AMX_UNIT_ROWS : group; }

    int partial_floats(const Unit &u) const { return u.num_tokens * group * (width + 2); }

    int first_key(int position) const { return a.window && position >= a.window ? position - a.window + 1 : 0; }

    const T *block(const Unit &u, int position) const {
        const int64_t id = a.block_table[u.seq * a.table_stride + position / a.block_size];
        return (const T *)a.cache + id * a.block_stride + u.head * head_stride;
    }

    void locate(const Unit &u, int t, KeyTile<T> &tile) const {
        const int base = t * TILE;
        const int end = u.position + u.num_tokens;
        const int begin = first_key(u.position);
        tile.first = begin > base ? begin - base : 0;
        tile.last = end - base < TILE ? end - base : TILE;
        if (!in_place) return;
        for (int s = tile.first / STRIP; s * STRIP < tile.last; ++s) {
            const int position = base + s * STRIP;
            const T *strip = block(u, position) + (int64_t)(position % a.block_size) * a.head_dim;
            tile.keys[s] = strip;
            tile.values[s] = strip + a.value_offset;
        }
    }

    // Strips widened to float32 (and gathered, where blocks are no whole strips); unseen positions become 0.
    void pack(const Unit &u, int t, const KeyTile<T> &from, KeyTile<float> &to, float *space) const {
        const int strip0 = from.first / STRIP, strip1 = rounded(from.last, STRIP) / STRIP;
        to.first = from.first, to.last = from.last;
        for (int s = strip0; s < strip1; ++s) {
            float *keys = space + (int64_t)s * STRIP * width, *values = keys + (int64_t)TILE * width;
            to.keys[s] = keys, to.values[s] = values;
            if (in_place) {
                for (int i = 0; i < STRIP * width; i += VW) {
                    store(keys + i, load(from.keys[s] + i));
                    store(values + i, load(from.values[s] + i));
                }
            } else {
                gather(u, t * TILE, s, from, keys, values);
            }
        }
    }

    void gather(const Unit &u, int base, int s, const KeyTile<T> &from, float *keys, float *values) const {
        const int tokens = a.block_size % STRIP == 0 ? STRIP : a.block_size;  // in one strip of the cache
        memset(keys, 0, sizeof(float) * STRIP * width);
        memset(values, 0, sizeof(float) * STRIP * width);
        for (int j = 0; j < STRIP; ++j) {
            const int index = s * STRIP + j;
            if (index < from.first || index >= from.last) continue;
            const int offset = (base + index) % a.block_size;
            const T *head = block(u, base + index);
            const T *key = head + (int64_t)(offset / tokens) * tokens * a.head_dim + offset % tokens;
            const T *value = head + a.value_offset + (int64_t)offset * a.head_dim;
            for (int d = 0; d < a.head_dim; ++d) {
                keys[d * STRIP + j] = get(key + (int64_t)d * tokens);
                values[j * width + d] = get(value + d);
            }
        }
    }

    // One tile for all rows of a unit: max[rows], sum[rows], values[rows][width] (undefined where a row saw nothing).
    template <class K, bool AHEAD>
    void compute(const Unit &u, int t, const KeyTile<K> &tile, const K *const *ahead, const float *query, float *scores,
                 float *max, float *sum, float *values) const {
        const int rows = u.num_tokens * group, dim = a.head_dim;
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = r + MAX_ROWS < rows ? MAX_ROWS : rows - r;
            const Seen seen = see(u, t * TILE, tile, r, count);
            const int strip = seen.begin() / STRIP, num_strips = seen.end() / STRIP - strip;
#define CALL(R)                                                                                                \
    score_strips<K, R, AHEAD>(query + (int64_t)r * dim, dim, tile.keys + strip, ahead + strip, num_strips, dim, \
                              scores + strip * STRIP, TILE)
            FOR_ROWS(count, CALL)
#undef CALL
            for (int i = 0; i < count; ++i) max[r + i] = cap_and_hide(scores + i * TILE, seen, i, a.softcap);
            for (int i = 0; i < count; ++i) sum[r + i] = weigh(scores + i * TILE, seen, max + r + i);
#define CALL(R)                                                                                             \
    value_columns<K, R, AHEAD>(scores, TILE, tile.values, ahead + TILE_STRIPS, seen.any_first, seen.any_last, \
                               width, values + (int64_t)r * width, width)
            if (num_strips > 0) FOR_ROWS(count, CALL)
#undef CALL
        }
    }

    // What `count` rows from r on, those of one register tile, see of the tile that begins at position `base`.
    template <class K>
    Seen see(const Unit &u, int base, const KeyTile<K> &tile, int r, int count) const {
        Seen seen;
        int position = u.position + r / group, left = group - r % group;
        for (int i = 0; i < count; ++i, --left) {
            if (!left) ++position, left = group;
            const int first = first_key(position) - base, last = position + 1 - base;
            seen.first[i] = first > 0 ? first : 0;
            seen.last[i] = last < TILE ? last : TILE;
        }
        seen.any_first = seen.first[0] > tile.first ? seen.first[0] : tile.first;
        seen.any_last = seen.last[count - 1] < tile.last ? seen.last[count - 1] : tile.last;
        return seen;
    }

    // [rows, head_dim], scaled; that is all of them.
    void take_queries(const float *query, int64_t rows) {
        if (AmxAttention<T>::takes(a, rows)) amx.take_queries(query, rows);
    }

    void load_query(const Unit &u, float *query) const {
        const float scale = a.scale * UNIT<T>;
        for (int t = 0; t < u.num_tokens; ++t) {
            const float *from = a.query + (u.token + t) * a.query_stride + u.head * group * a.query_head_stride;
            for (int g = 0; g < group; ++g, from += a.query_head_stride)
                for (int d = 0; d < a.head_dim; ++d) *query++ = from[d] * scale;
        }
    }

    void finish(const Unit &u, int row, float max, float sum, const float *values) const {
        const int head = u.head * group + row % group;
        float *out = a.out + ((int64_t)(u.token + row / group) * a.num_heads + head) * a.head_dim;
        float scale = 1.0f;
        if (a.sinks) {
            const float m = fmaxf(max, a.sinks[head]);
            const vf both = vexp(vf{max - m, a.sinks[head] - m});
            scale = both[0];
            sum = sum * scale + both[1];
        }
        scale = sum == 0.0f ? 0.0f : scale / sum * UNIT<T>;
        for (int d = 0; d < a.head_dim; ++d) out[d] = values[d] * scale;
    }

    // What to fetch into the cache while working on strip s: the strip four further on, then the values, then `next`.
    void look_ahead(const KeyTile<T> &tile, const Item *next, const T **ahead) const {
        const int strip0 = tile.first / STRIP, strip1 = rounded(tile.last, STRIP) / STRIP;
        const T *order[2 * TILE_STRIPS + 4];
        int n = 0;
        for (int s = strip0; s < strip1; ++s) order[n++] = tile.keys[s];
        for (int s = strip0; s < strip1; ++s) order[n++] = tile.values[s];
        KeyTile<T> then = tile;
        if (next) locate(plan.units[next->unit], next->tile < 0 ? plan.units[next->unit].first_tile : next->tile, then);
        for (int i = 0; i < 4; ++i) {
            const int s = then.first / STRIP + i;
            order[n++] = then.keys[s * STRIP < then.last ? s : then.first / STRIP];
        }
        n = 4;
        for (int s = strip0; s < strip1; ++s) ahead[s] = order[n++];
        for (int s = strip0; s < strip1; ++s) ahead[TILE_STRIPS + s] = order[n++];
    }

    void one_tile(const Unit &u, int t, const Item *next, const float *query, float *scratch, float *max, float *sum,
                  float *values) {
        KeyTile<T> tile;
        locate(u, t, tile);
        const int rows = u.num_tokens * group;
        float *scores = scratch;
        if (AmxAttention<T>::takes(a, rows)) {
            const auto seen = [&](int r, int count) { return see(u, t * TILE, tile, r, count); };
            amx.compute(tile.keys, tile.values, tile.first, tile.last, seen, max, sum, values);
            return;
        }
        if (in_place && (sizeof(T) == sizeof(float) || rows <= 2 * MAX_ROWS)) {
            const T *ahead[2 * TILE_STRIPS];
            if (rows <= 2 * MAX_ROWS) {
                look_ahead(tile, next, ahead);
                compute<T, true>(u, t, tile, ahead, query, scores, max, sum, values);
            } else {
                memset(ahead, 0, sizeof ahead);
                compute<T, false>(u, t, tile, ahead, query, scores, max, sum, values);
            }
            return;
        }
        KeyTile<float> packed;
        const float *ahead[2 * TILE_STRIPS] = {};
        pack(u, t, tile, packed, scores + MAX_ROWS * TILE);
        compute<float, false>(u, t, packed, ahead, query, scores, max, sum, values);
    }

    void whole_unit(const Unit &u, const Item *next, float *scratch) {
        const int rows = u.num_tokens * group;
        const int room = rounded(rows, VW);
        float *query = scratch, *max = query + (int64_t)rows * a.head_dim, *sum = max + room, *tile_max = sum + room;
        float *tile_sum = tile_max + room, *values = tile_sum + room, *tile_values = values + (int64_t)rows * width;
        float *rest = tile_values + (int64_t)rows * width;
        load_query(u, query);
        take_queries(query, rows);
        memset(values, 0, sizeof(float) * rows * width);
        for (int r = 0; r < rows; ++r) max[r] = -INFINITY, sum[r] = 0.0f;
        for (int t = u.first_tile; t < u.last_tile; ++t) {
            const Item following = {(int32_t)(&u - plan.units), t + 1, -1};
            one_tile(u, t, t + 1 < u.last_tile ? &following : next, query, rest, tile_max, tile_sum, tile_values);
            fold(rows, width, max, sum, values, tile_max, tile_sum, tile_values);
        }
        for (int r = 0; r < rows; ++r) finish(u, r, max[r], sum[r], values + (int64_t)r * width);
    }

    void work(const Item &item, const Item *next, float *scratch) {
        const Unit &u = plan.units[item.unit];
        if (item.tile < 0) return whole_unit(u, next, scratch);
        if (item.others >= 0) return shared_tile(item, next, scratch);
        const int rows = u.num_tokens * group;
        float *partial = plan.partials + u.partials + (int64_t)(item.tile - u.first_tile) * partial_floats(u);
        load_query(u, scratch);
        take_queries(scratch, rows);
        one_tile(u, item.tile, next, scratch, scratch + (int64_t)rows * a.head_dim, partial, partial + rows,
                 partial + 2 * rows);
    }

    // One tile for the only tokens of several units, as if they were tokens of one that all see the whole tile.
    void shared_tile(const Item &item, const Item *next, float *scratch) {
        int32_t members[UNIT_ROWS], count = 0;
        members[count++] = item.unit;
        for (int32_t l = item.others; l >= 0; l = plan.links[l].next) members[count++] = plan.links[l].unit;
        for (int i = 0; i < count; ++i) load_query(plan.units[members[i]], scratch + (int64_t)i * group * a.head_dim);
        Unit all = plan.units[item.unit];
        all.num_tokens = count, all.position = (item.tile + 1) * TILE;
        const int64_t rows = (int64_t)count * group;
        take_queries(scratch, rows);
        float *max = scratch + rows * a.head_dim, *sum = max + rows, *values = sum + rows, *rest = values + rows * width;
        one_tile(all, item.tile, next, scratch, rest, max, sum, values);
        for (int i = 0; i < count; ++i) {
            const Unit &u = plan.units[members[i]];
            float *partial = plan.partials + u.partials + (int64_t)(item.tile - u.first_tile) * partial_floats(u);
            memcpy(partial, max + i * group, group * sizeof(float));
            memcpy(partial + group, sum + i * group, group * sizeof(float));
            memcpy(partial + 2 * group, values + (int64_t)i * group * width, sizeof(float) * group * width);
        }
    }

    void fold_partials(const Unit &u, float *max) const {
        const int rows = u.num_tokens * group;
        float *sum = max + rounded(rows, VW), *values = sum + rounded(rows, VW);
        for (int r = 0; r < rows; ++r) max[r] = -INFINITY, sum[r] = 0.0f;
        memset(values, 0, sizeof(float) * rows * width);
        for (int t = u.first_tile; t < u.last_tile; ++t) {
            const float *partial = plan.partials + u.partials + (int64_t)(t - u.first_tile) * partial_floats(u);
            fold(rows, width, max, sum, values, partial, partial + rows, partial + 2 * rows);
        }
        for (int r = 0; r < rows; ++r) finish(u, r, max[r], sum[r], values + (int64_t)r * width);
    }

    void run(Team *team) {
        const auto scratch = [&] { return plan.scratch + team->part * plan.scratch_floats; };
        team->each(plan.num_items, 1, [&](int64_t i, int64_t, int64_t next) {
            work(plan.items[i], next < 0 ? nullptr : &plan.items[next], scratch());
        });
        team->each(plan.has_partials ? plan.num_units : 0, 1, [&](int64_t i, int64_t, int64_t) {
            if (plan.units[i].partials >= 0) fold_partials(plan.units[i], scratch());
        });
    }
};

// Writes the plan to the start of the workspace; 0, or the number of bytes that the workspace must have.
int64_t make_plan(const AttendArguments &a, int threads) {
    Planner planner{a, takes_amx(a) ? AMX_UNIT_ROWS : UNIT_ROWS};
    planner.all(nullptr, false);
    const bool scarce = planner.num_items < 4 * threads;
    if (scarce) planner.all(nullptr, true);
    const int64_t width = rounded(a.head_dim, STRIP), slots = Sharing::slots_for(planner.num_items);
    const int64_t rows = (planner.partials && planner.max_rows < UNIT_ROWS ? UNIT_ROWS : planner.max_rows) + 1;
    const int64_t scratch_floats =
        aligned((rows * (a.head_dim + 2 * width + 4) + 4 * VW + MAX_ROWS * TILE + 2 * TILE * width) * 4) / 4;
    int64_t offset = aligned(sizeof(Plan)), place[6];
    const int64_t sizes[6] = {planner.num_units * (int64_t)sizeof(Unit), planner.num_items * (int64_t)sizeof(Item),
                              planner.partials * 4, threads * scratch_floats * 4,
                              planner.num_items * (int64_t)sizeof(Link), slots * (int64_t)sizeof(int32_t)};
    for (int i = 0; i < 6; ++i) place[i] = offset, offset += aligned(sizes[i]);
    if (offset > a.workspace_bytes) return offset;
    Plan &plan = *(Plan *)a.workspace;
    plan = {};
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
    const int64_t row = (int64_t)a.num_heads * a.head_dim, used = a.num_seqs ? a.query_start[a.num_seqs] : 0;
    if (used < a.num_tokens) memset(a.out + used * row, 0, (a.num_tokens - used) * row * sizeof(float));
    return 0;
}

}  // namespace

// 0 when done; otherwise the workspace was too small and the number of bytes that it takes is returned.
extern "C" int64_t tokenmill_attend_member(const AttendArguments *arguments, Team *team) {
    const AttendArguments &a = *arguments;
    const int64_t missing = team->once([&] { return make_plan(a, team->parts); });
    if (missing) return missing;
    Plan &plan = *(Plan *)a.workspace;
    if (a.kv_type == 0) Attention<float>(a, plan, team).run(team);
    if (a.kv_type == 1) Attention<bf16>(a, plan, team).run(team);
    if (a.kv_type == 2) Attention<f16>(a, plan, team).run(team);
    if (a.kv_type == 3) Attention<f8>(a, plan, team).run(team);
    return 0;
}
