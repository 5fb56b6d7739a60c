// Samples one token per row of logits: the highest logit, or the winner of a race with Gumbel noise
// among the tokens that min-p, top-k and top-p keep.
//
// The noise is the hash of sampling/noise.py. A token must beat the best so far, and -log1p(-u) >=
// u, so u >= exp(scaled - best) rules a token out with one exponential; the few tokens left are
// computed exactly. The floor is searched among the tokens near the peak, and further down only if
// these do not decide it. One thread computes a row, and the result depends on that row alone.

#include "argmax.h"

#include <algorithm>
#include <functional>

struct DrawArguments {
    const float *logits;               // [num_rows, vocab], rows `stride` apart; −inf: masked
    const float *inverse_temperature;  // [num_rows]; 0: greedy
    const float *log_min_p;            // [num_rows]; −inf: off
    const double *top_p;               // [num_rows]; 1: off
    const int64_t *top_k;              // [num_rows]; the vocabulary or more: off
    const int32_t *keys;               // [num_rows, 2]
    int64_t *token_ids;                // [num_rows]
    float *peaks;                      // [num_rows]: the highest logit; NaN if one is NaN
    int64_t num_rows, vocab, stride;
};

#define BINS 2048
#define FEW 2048  // values that are sorted rather than put into bins

namespace {

const float DEPTHS[] = {-8.0f, -20.0f,
                        -INFINITY};  // how far below the peak candidates are looked for

struct Space {
    double mass[BINS];
    int32_t count[BINS];
    float *scaled, *candidates, *border;  // [vocab] each
};

// The highest value and its first position.
float peak_of(const float *x, int64_t n, int64_t *at) {
    vf best = splat(-INFINITY);
    vi bad = vi{};
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vf v = load(x + i);
        best = larger(v, best);
        bad |= (vi)(v != v);
    }
    float peak = max_lanes(best);
    bool is_bad = any_lane(bad);
    for (; i < n; ++i) {
        peak = x[i] > peak ? x[i] : peak;
        is_bad |= x[i] != x[i];
    }
    *at = 0;
    if (is_bad) return NAN;
    const vf wanted = splat(peak);
    for (i = 0; i + VW <= n && !any_lane((vi)(load(x + i) == wanted));) i += VW;
    for (; i < n && x[i] != peak;) ++i;
    *at = i < n ? i : 0;
    return peak;
}

// scaled = (x − peak) · inverse
void scale(const float *x, int64_t n, float peak, float inverse, float *scaled) {
    const vf p = splat(peak), t = splat(inverse);
    int64_t i = 0;
    for (; i + VW <= n; i += VW) store(scaled + i, (load(x + i) - p) * t);
    for (; i < n; ++i) scaled[i] = (x[i] - peak) * inverse;
}

INLINE float exp_of(float x) { return vexp(splat(x))[0]; }

// Sum of exp over the values that reach the floor.
double mass_of(const float *values, int64_t n, float floor) {
    double total = 0.0;
    const vf least = splat(floor);
    int64_t i = 0;
    while (i + VW <= n) {
        vf sums = vf{};
        for (int64_t end = i + 32 * VW; i + VW <= n && i < end; i += VW) {
            const vf v = load(values + i);
            sums += select(v >= least, vexp(v), splat(0.0f));
        }
        for (int j = 0; j < VW; ++j) total += sums[j];
    }
    for (; i < n; ++i) total += values[i] >= floor ? exp_of(values[i]) : 0.0f;
    return total;
}

// The values that reach the floor, into space.candidates; how many.
int64_t collect(Space &space, int64_t n, float floor) {
    const vf least = splat(floor);
    float *to = space.candidates;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vi enough = (vi)(load(space.scaled + i) >= least);
#if VW == 16
        const __mmask16 mask = _mm512_test_epi32_mask((__m512i)enough, (__m512i)enough);
        _mm512_storeu_ps(to, _mm512_maskz_compress_ps(
                                 mask, (__m512)load(space.scaled + i)));  // to ends before i + VW
        to += __builtin_popcount(mask);
#else
        if (!any_lane(enough)) continue;
        for (int j = 0; j < VW; ++j)
            if (enough[j]) *to++ = space.scaled[i + j];
#endif
    }
    for (; i < n; ++i)
        if (space.scaled[i] >= floor) *to++ = space.scaled[i];
    return to - space.candidates;
}

// The first of `values`, in falling order, at which their mass, `reached` before them, comes to the
// target.
float border_among(float *values, int64_t count, double reached, double target) {
    std::sort(values, values + count, std::greater<float>());
    for (int64_t i = 0; i < count; ++i) {
        reached += exp_of(values[i]);
        if (reached >= target) return values[i];
    }
    return values[count - 1];
}

// As border_among, of many values: bins of equal width first, then what lies in the bin at the
// border.
float border_by_bins(Space &space, int64_t count, double target) {
    const float *values = space.candidates;
    float lowest = 0.0f;
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < lowest && values[i] > -64.0f) lowest = values[i];
    const float slope = (BINS - 1) / (lowest < -1e-6f ? lowest : -1e-6f);
    const auto bin_of = [=](float v) { return v * slope < BINS - 1 ? (int)(v * slope) : BINS - 1; };
    memset(space.mass, 0, sizeof space.mass);
    memset(space.count, 0, sizeof space.count);
    for (int64_t i = 0; i < count; ++i) {
        const int bin = bin_of(values[i]);
        space.mass[bin] += exp_of(values[i]);
        space.count[bin] += 1;
    }
    double reached = 0.0;
    int bin = 0, last = 0;
    for (; bin < BINS; reached += space.mass[bin++]) {
        if (space.count[bin]) last = bin;
        if (space.count[bin] && reached + space.mass[bin] >= target) break;
    }
    if (bin == BINS) reached -= space.mass[bin = last];  // rounding: the lowest of all
    int64_t inside = 0;
    for (int64_t i = 0; i < count; ++i)
        if (bin_of(values[i]) == bin) space.border[inside++] = values[i];
    return border_among(space.border, inside, reached, target);
}

// The floor of scaled logits: min-p first, then top-k, then top-p over the remaining mass.
float find_floor(Space &space, int64_t n, float floor, int64_t top_k, double top_p) {
    const bool has_k = top_k < n, has_p = top_p < 1.0;
    if (!has_k && !has_p) return floor;
    double total = has_k ? 0.0 : mass_of(space.scaled, n, floor);
    for (const float depth : DEPTHS) {
        const bool is_all = depth <= floor || depth == -INFINITY;
        int64_t count = collect(space, n, is_all ? floor : depth);
        if (has_k && count < top_k && !is_all) continue;
        float least = floor;
        if (has_k && count >= top_k) {
            float *kth = space.candidates + (top_k - 1);
            std::nth_element(space.candidates, kth, space.candidates + count,
                             std::greater<float>());
            least = *kth;
        }
        if (!has_p) return least;
        if (has_k) {
            count = std::partition(space.candidates, space.candidates + count,
                                   [=](float v) { return v >= least; }) -
                    space.candidates;
            total = mass_of(space.candidates, count, least);
        }
        const double target = top_p * total;
        if (!is_all && !has_k && mass_of(space.candidates, count, least) < target) continue;
        return count <= FEW ? border_among(space.candidates, count, 0.0, target)
                            : border_by_bins(space, count, target);
    }
    return floor;
}

INLINE float noise_cost(float u) { return logf(-log1pf(-u)); }

#define LARGEST_BELOW_ONE (1.0f - 0x1p-24f)

INLINE float uniform(int64_t token, const int32_t *keys) {
    uint32_t x = (uint32_t)token * 0x9E3779B1u ^ (uint32_t)keys[0];
    x ^= x >> 16, x *= 0x7FEB352Du, x ^= x >> 15;
    x ^= (uint32_t)keys[1], x *= 0x846CA68Bu, x ^= x >> 16;
    const float u = ((float)(int32_t)(x & 0x7FFFFFFFu) + 0.5f) * 0x1p-31f;
    return u < LARGEST_BELOW_ONE ? u : LARGEST_BELOW_ONE;
}

int64_t race(const Space &space, int64_t n, float floor, int64_t first, const int32_t *keys) {
    int64_t winner = first;  // the most likely token races first: few can beat it
    float best = space.scaled[first] - noise_cost(uniform(first, keys));
    const vu k0 = (uint32_t)keys[0] - vu{}, k1 = (uint32_t)keys[1] - vu{};
    const vf least = splat(floor);
    vu id = (vu)lanes();
    int64_t i = 0;
    for (; i + VW <= n; i += VW, id += VW) {
        const vf s = load(space.scaled + i);
        vu x = id * 0x9E3779B1u ^ k0;
        x ^= x >> 16, x *= 0x7FEB352Du, x ^= x >> 15;
        x ^= k1, x *= 0x846CA68Bu, x ^= x >> 16;
        const vf u =
            (__builtin_convertvector((vi)(x & 0x7FFFFFFFu), vf) + splat(0.5f)) * splat(0x1p-31f);
        const vf bound = vexp(s - splat(best)) * splat(1.0001f);
        const vi may_win = (vi)(u < bound) & (vi)(s >= least);
        if (!any_lane(may_win)) continue;
        for (int j = 0; j < VW; ++j) {
            if (!may_win[j]) continue;
            const float value = s[j] - noise_cost(uniform(i + j, keys));
            if (value > best || (value == best && i + j < winner)) best = value, winner = i + j;
        }
    }
    for (; i < n; ++i) {
        if (!(space.scaled[i] >= floor)) continue;
        const float value = space.scaled[i] - noise_cost(uniform(i, keys));
        if (value > best || (value == best && i < winner)) best = value, winner = i;
    }
    return winner;
}

void draw_row(const DrawArguments &a, int64_t row, Space &space) {
    const float *x = a.logits + row * a.stride, inverse = a.inverse_temperature[row];
    int64_t at;
    const float peak = a.peaks[row] = peak_of(x, a.vocab, &at);
    a.token_ids[row] = at;
    if (inverse == 0.0f || !(fabsf(peak) < INFINITY)) return;
    scale(x, a.vocab, peak, inverse, space.scaled);
    const float floor = find_floor(space, a.vocab, a.log_min_p[row], a.top_k[row], a.top_p[row]);
    a.token_ids[row] = race(space, a.vocab, floor, at, a.keys + 2 * row);
}

int64_t padded_floats(int64_t vocab) { return (vocab + 15) & ~(int64_t)15; }

int64_t bytes_for(int64_t vocab) {
    return ((int64_t)sizeof(Space) + 63) / 64 * 64 + 3 * padded_floats(vocab) * 4;
}

}  // namespace

extern "C" int64_t tokenmill_draw_member(const DrawArguments *arguments, PoolThread *thread) {
    const DrawArguments &a = *arguments;
    thread->parallel_for(a.num_rows, 1, [&](int64_t row, int64_t, int64_t) {
        char *mine = thread->scratch(bytes_for(a.vocab));
        Space &space = *(Space *)mine;
        space.scaled = (float *)(mine + ((int64_t)sizeof(Space) + 63) / 64 * 64);
        space.candidates = space.scaled + padded_floats(a.vocab);
        space.border = space.candidates + padded_floats(a.vocab);
        draw_row(a, row, space);
    });
    return 0;
}

// What threads have kept of a head's outputs (argmax.h) → as draw for greedy rows. No rows: nothing
// is done.
struct ArgmaxArguments {
    char *seen;  // [threads] ArgmaxSeen
    int64_t *token_ids;
    float *peaks;
    int64_t num_rows;
};

extern "C" int64_t tokenmill_argmax_bytes() { return sizeof(ArgmaxSeen); }

extern "C" int64_t tokenmill_argmax_rows() { return ARGMAX_ROWS; }

extern "C" int64_t tokenmill_argmax_member(const ArgmaxArguments *arguments, PoolThread *thread) {
    const ArgmaxArguments &a = *arguments;
    if (!a.num_rows) return 0;
    thread->parallel_for(a.num_rows, 8, [&](int64_t first, int64_t count, int64_t) {
        for (int64_t r = first; r < first + count; ++r) {
            float peak = -INFINITY;
            int64_t token = INT64_MAX;
            for (int32_t part = 0; part < thread->parts; ++part) {
                const ArgmaxSeen &seen = ArgmaxSeen::of(a.seen, part);
                if (!seen.is_open(thread->row())) continue;
                for (int j = 0; j < VW; ++j) {
                    const float value = seen.rows[r].value[j];
                    const int64_t at = (int64_t)seen.rows[r].vector[j] * VW + j;
                    if (value > peak || value != value || (value == peak && at < token))
                        peak = value, token = at;
                }
            }
            a.peaks[r] = peak;
            a.token_ids[r] = peak == peak ? token : 0;
        }
    });
    return 0;
}
