// Paged attention on the CPU: queries of many sequences, prefill chunks and decodes alike, over
// keys and values that stay where they lie in their blocks.
//
// A unit is a few query tokens of one sequence for one key/value head; its rows are those tokens ×
// the query heads of the group, so that each key and value is read once for all of them. Keys are
// taken in tiles of TILE positions, counted from position 0. Each tile gives a partial softmax, and
// the partials are folded in order. Where units are fewer than threads need, a unit's tiles are
// computed by several threads into the workspace and folded in a second pass; the arithmetic is the
// same, so the result does not depend on the number of threads either.
//
// Keys lie in strips, [head_dim][16 tokens], so that 16 logits come without a horizontal sum;
// values lie [token][head_dim]. Block sizes that are no multiple of 16 keep all tokens of a block
// in one strip.

#include "attention_amx.h"

#define FEW_ROWS (4 * MAX_ROWS)  // whose units read tiles in place, and fetch what comes next

namespace {

template <class T>
struct Attention {
    const AttendArguments &a;
    const Plan &plan;
    const int group, width;      // query heads per key/value head; head_dim rounded to whole strips
    const bool in_place;         // strips can be used where they lie
    const int64_t head_stride;   // between heads of a block
    AmxAttention<T> amx;         // of this thread

    Attention(const AttendArguments &arguments, const Plan &p, PoolThread *thread)
        : a(arguments), plan(p), group(a.num_heads / a.num_kv_heads),
          width(rounded(a.head_dim, STRIP)),
          in_place(a.block_size % STRIP == 0 && a.head_dim % STRIP == 0),
          head_stride((int64_t)a.block_size * a.head_dim),
          amx(a, most_rows(),
              thread->scratch(takes_amx(a) ? AmxAttention<T>::bytes(a, most_rows()) : 0)) {}

    int64_t most_rows() const { return group < AMX_UNIT_ROWS ? AMX_UNIT_ROWS : group; }

    int partial_floats(const Unit &u) const { return u.num_tokens * group * (width + 2); }

    const T *block(const Unit &u, int position) const {
        const int64_t id = a.block_table[u.seq * a.table_stride + position / a.block_size];
        return (const T *)a.cache + id * a.block_stride + u.head * head_stride;
    }

    void locate(const Unit &u, int t, KeyTile<T> &tile) const {
        const int base = t * TILE, end = u.position + u.num_tokens;
        const int begin = first_visible(a, u.position);
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

    // Strips widened to float32, gathered where blocks are no whole strips; unseen positions are 0.
    void pack(const Unit &u, int t, const KeyTile<T> &from, KeyTile<float> &to,
              float *space) const {
        const int strip0 = from.first / STRIP, strip1 = rounded(from.last, STRIP) / STRIP;
        to.first = from.first, to.last = from.last;
        for (int s = strip0; s < strip1; ++s) {
            float *keys = space + (int64_t)s * STRIP * width;
            float *values = keys + (int64_t)TILE * width;
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

    void gather(const Unit &u, int base, int s, const KeyTile<T> &from, float *keys,
                float *values) const {
        // of one strip of the cache
        const int tokens = a.block_size % STRIP == 0 ? STRIP : a.block_size;
        memset(keys, 0, sizeof(float) * STRIP * width);
        memset(values, 0, sizeof(float) * STRIP * width);
        for (int j = 0; j < STRIP; ++j) {
            const int index = s * STRIP + j;
            if (index < from.first || index >= from.last) continue;
            const int offset = (base + index) % a.block_size;
            const T *head = block(u, base + index);
            const T *key =
                head + (int64_t)(offset / tokens) * tokens * a.head_dim + offset % tokens;
            const T *value = head + a.value_offset + (int64_t)offset * a.head_dim;
            for (int d = 0; d < a.head_dim; ++d) {
                keys[d * STRIP + j] = get(key + (int64_t)d * tokens);
                values[j * width + d] = get(value + d);
            }
        }
    }

    // One tile for all rows of a unit: max[rows], sum[rows], values[rows][width] (undefined where a
    // row saw nothing).
    template <class K, bool AHEAD>
    void compute(const Unit &u, int t, const KeyTile<K> &tile, const K *const *ahead,
                 const float *query, float *scores, float *max, float *sum, float *values) const {
        const int rows = u.num_tokens * group, dim = a.head_dim;
        for (int r = 0; r < rows; r += MAX_ROWS) {
            const int count = r + MAX_ROWS < rows ? MAX_ROWS : rows - r;
            const Seen seen = see(u, t * TILE, tile, r, count);
            const int strip = seen.begin() / STRIP, num_strips = seen.end() / STRIP - strip;
#define CALL(R)                                                                                \
    score_strips<K, R, AHEAD>(query + (int64_t)r * dim, dim, tile.keys + strip, ahead + strip, \
                              num_strips, dim, scores + strip * STRIP, TILE)
            FOR_ROWS(count, CALL)
#undef CALL
            for (int i = 0; i < count; ++i)
                max[r + i] = cap_and_hide(scores + i * TILE, seen, i, a.softcap);
            for (int i = 0; i < count; ++i)
                sum[r + i] = weigh(scores + i * TILE, seen, max + r + i);
#define CALL(R)                                                                                \
    value_columns<K, R, AHEAD>(scores, TILE, tile.values, ahead + TILE_STRIPS, seen.any_first, \
                               seen.any_last, width, values + (int64_t)r * width, width)
            if (num_strips > 0) FOR_ROWS(count, CALL)
#undef CALL
        }
    }

    // What `count` rows from r on, of one register tile, see of the tile that begins at `base`.
    template <class K>
    Seen see(const Unit &u, int base, const KeyTile<K> &tile, int r, int count) const {
        Seen seen;
        int position = u.position + r / group, left = group - r % group;
        for (int i = 0; i < count; ++i, --left) {
            if (!left) ++position, left = group;
            const int first = first_visible(a, position) - base, last = position + 1 - base;
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
        const float scale = a.scale * UNIT<T> * (a.key_scales ? a.key_scales[u.head] : 1.0f);
        for (int t = 0; t < u.num_tokens; ++t) {
            const float *from =
                a.query + (u.token + t) * a.query_stride + u.head * group * a.query_head_stride;
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
        if (a.value_scales) scale *= a.value_scales[u.head];
        for (int d = 0; d < a.head_dim; ++d) out[d] = values[d] * scale;
    }

    // What to fetch into the cache while working on strip s: the strip four further on, then the
    // values, then `next`.
    void prefetch_next(const KeyTile<T> &tile, const Item *next, const T **ahead) const {
        const int strip0 = tile.first / STRIP, strip1 = rounded(tile.last, STRIP) / STRIP;
        const T *order[2 * TILE_STRIPS + 4];
        int n = 0;
        for (int s = strip0; s < strip1; ++s) order[n++] = tile.keys[s];
        for (int s = strip0; s < strip1; ++s) order[n++] = tile.values[s];
        KeyTile<T> then = tile;
        if (next)
            locate(plan.units[next->unit],
                   next->tile < 0 ? plan.units[next->unit].first_tile : next->tile, then);
        for (int i = 0; i < 4; ++i) {
            const int s = then.first / STRIP + i;
            order[n++] = then.keys[s * STRIP < then.last ? s : then.first / STRIP];
        }
        n = 4;
        for (int s = strip0; s < strip1; ++s) ahead[s] = order[n++];
        for (int s = strip0; s < strip1; ++s) ahead[TILE_STRIPS + s] = order[n++];
    }

    void one_tile(const Unit &u, int t, const Item *next, const float *query, float *scratch,
                  float *max, float *sum, float *values) {
        KeyTile<T> tile;
        locate(u, t, tile);
        const int rows = u.num_tokens * group;
        float *scores = scratch;
        if (AmxAttention<T>::takes(a, rows)) {
            const auto seen = [&](int r, int count) { return see(u, t * TILE, tile, r, count); };
            amx.compute(tile.keys, tile.values, tile.first, tile.last, seen, max, sum, values);
            return;
        }
        if (in_place && (sizeof(T) == sizeof(float) || rows <= FEW_ROWS)) {
            const T *ahead[2 * TILE_STRIPS];
            if (rows <= FEW_ROWS) {
                prefetch_next(tile, next, ahead);
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

    // Leaves max, sum and values in the scratch, as fold_partials does.
    void whole_unit(const Unit &u, const Item *next, float *scratch) {
        const int rows = u.num_tokens * group, room = rounded(rows, VW);
        float *max = scratch, *sum = max + room, *values = sum + room,
              *query = values + (int64_t)rows * width;
        float *tile_max = query + (int64_t)rows * a.head_dim, *tile_sum = tile_max + room,
              *tile_values = tile_sum + room;
        float *rest = tile_values + (int64_t)rows * width;
        load_query(u, query);
        take_queries(query, rows);
        memset(values, 0, sizeof(float) * rows * width);
        for (int r = 0; r < rows; ++r) max[r] = -INFINITY, sum[r] = 0.0f;
        for (int t = u.first_tile; t < u.last_tile; ++t) {
            const Item following = {(int32_t)(&u - plan.units), t + 1, -1};
            one_tile(u, t, t + 1 < u.last_tile ? &following : next, query, rest, tile_max, tile_sum,
                     tile_values);
            fold(rows, width, max, sum, values, tile_max, tile_sum, tile_values);
        }
    }

    void finish_unit(const Unit &u, const float *scratch) const {
        const int rows = u.num_tokens * group, room = rounded(rows, VW);
        const float *max = scratch, *sum = max + room, *values = sum + room;
        for (int r = 0; r < rows; ++r) finish(u, r, max[r], sum[r], values + (int64_t)r * width);
    }

    // The units that an item is a tile of.
    int members_of(const Item &item, int32_t *members) const {
        int count = 0;
        members[count++] = item.unit;
        for (int32_t l = item.others; l >= 0; l = plan.links[l].next)
            members[count++] = plan.links[l].unit;
        return count;
    }

    // Leaves queries, max, sum and values in the scratch. Several units' only tokens are as tokens
    // of one that all see the whole tile.
    void tile_of_units(const Item &item, const Item *next, float *scratch) {
        int32_t members[UNIT_ROWS];
        const int count = members_of(item, members);
        Unit all = plan.units[item.unit];
        const int64_t rows = (int64_t)count * all.num_tokens * group, each = rows / count;
        for (int i = 0; i < count; ++i)
            load_query(plan.units[members[i]], scratch + i * each * a.head_dim);
        if (count > 1) all.num_tokens = count, all.position = (item.tile + 1) * TILE;
        take_queries(scratch, rows);
        float *max = scratch + rows * a.head_dim, *sum = max + rows, *values = sum + rows,
              *rest = values + rows * width;
        one_tile(all, item.tile, next, scratch, rest, max, sum, values);
    }

    void store_partials(const Item &item, const float *scratch) const {
        int32_t members[UNIT_ROWS];
        const int count = members_of(item, members);
        const int64_t each = plan.units[item.unit].num_tokens * group, rows = count * each;
        const float *max = scratch + rows * a.head_dim, *sum = max + rows, *values = sum + rows;
        for (int i = 0; i < count; ++i) {
            const Unit &u = plan.units[members[i]];
            float *partial = plan.partials + u.partials +
                             (int64_t)(item.tile - u.first_tile) * partial_floats(u);
            memcpy(partial, max + i * each, each * sizeof(float));
            memcpy(partial + each, sum + i * each, each * sizeof(float));
            memcpy(partial + 2 * each, values + i * each * width, each * width * sizeof(float));
        }
    }

    void fold_partials(const Unit &u, float *scratch) const {
        const int rows = u.num_tokens * group, room = rounded(rows, VW);
        float *max = scratch, *sum = max + room, *values = sum + room;
        for (int r = 0; r < rows; ++r) max[r] = -INFINITY, sum[r] = 0.0f;
        memset(values, 0, sizeof(float) * rows * width);
        for (int t = u.first_tile; t < u.last_tile; ++t) {
            const float *partial =
                plan.partials + u.partials + (int64_t)(t - u.first_tile) * partial_floats(u);
            fold(rows, width, max, sum, values, partial, partial + rows, partial + 2 * rows);
        }
    }

    void run(PoolThread *thread) {
        float *scratch = plan.scratch + thread->part * plan.scratch_floats;
        thread->parallel_for_commit(
            plan.num_items, 1,
            [&](int64_t i, int64_t, int64_t next) {
                const Item &item = plan.items[i], *then = next < 0 ? nullptr : &plan.items[next];
                if (item.tile < 0)
                    whole_unit(plan.units[item.unit], then, scratch);
                else
                    tile_of_units(item, then, scratch);
            },
            [&](int64_t i, int64_t) {
                const Item &item = plan.items[i];
                if (item.tile < 0)
                    finish_unit(plan.units[item.unit], scratch);
                else
                    store_partials(item, scratch);
            });
        const auto is_split = [&](int64_t i) { return plan.units[i].partials >= 0; };
        if (!plan.has_partials) return;
        thread->parallel_for_commit(
            plan.num_units, 1,
            [&](int64_t i, int64_t, int64_t) {
                if (is_split(i)) fold_partials(plan.units[i], scratch);
            },
            [&](int64_t i, int64_t) {
                if (is_split(i)) finish_unit(plan.units[i], scratch);
            });
    }
};

}  // namespace

// Returns 0 when done, or the bytes of workspace that it takes where there are fewer.
extern "C" int64_t tokenmill_attend_member(const AttendArguments *arguments, PoolThread *thread) {
    const AttendArguments &a = *arguments;
    const int64_t missing =
        thread->once([&] { return prepare(a, takes_amx(a) ? AMX_UNIT_ROWS : UNIT_ROWS, *thread); });
    if (missing) return missing;
    const Plan &plan = *a.plan;
    if (a.kv_type == 0) Attention<float>(a, plan, thread).run(thread);
    if (a.kv_type == 1) Attention<bf16>(a, plan, thread).run(thread);
    if (a.kv_type == 2) Attention<f16>(a, plan, thread).run(thread);
    if (a.kv_type == 3) Attention<f8>(a, plan, thread).run(thread);
    if (a.kv_type == 4) Attention<f8e5>(a, plan, thread).run(thread);
    return 0;
}
