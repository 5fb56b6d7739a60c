// Linear layers with 8-bit weights and float32 activations: w = scale · code, by groups of 32 along
// k.
//
// Panels are [n / NR][k][NR] bytes, scales [n / NR][k / 32][NR] half floats, behind which the
// columns' lengths lie: [n] floats, up to a whole panel.

#include "byte_dot.h"

namespace {

INLINE vi widened(const int8_t *p) {
#if VW == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif VW == 8
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    typedef int8_t vb __attribute__((vector_size(VW)));
    vb v;
    memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vi);
#endif
}

struct Byte {
    static constexpr int64_t GROUP = 32, CHUNK = 2, PARTS = 0, FEW = 5, DOT_ROWS = 0;
    static constexpr bool IS_FACTOR = false, HAS_ZEROS = false, FITS = false, IN_PLACE = false,
                          HAS_LENGTHS = true;
    static constexpr int OFFSET = 128;
    struct Group {
        vf scale[2];
    };
    struct Chunk {
        const int8_t *codes;
    };
    const int8_t *codes;
    const f16 *scales;

    static Byte at(const LinearArguments &a, int64_t p) {
        return {(const int8_t *)a.weight + p * a.k * NR,
                (const f16 *)a.scale + p * (a.k / GROUP) * NR};
    }
    // Of column vectors of all k weights, or a little more.
    static INLINE_MEMBER const float *lengths(const LinearArguments &a) {
        return (const float *)((const f16 *)a.scale + num_panels(a.n) * (a.k / GROUP) * NR);
    }
    INLINE_MEMBER const void *start() const { return codes; }
    static int64_t bytes(int64_t k) { return k * NR; }
    INLINE_MEMBER Group group(int64_t i) const {
        const f16 *at = scales + i / GROUP * NR;
        return {{load(at), load(at + VW)}};
    }
    INLINE_MEMBER Chunk chunk(int64_t i) const { return {codes + i * NR}; }
    INLINE_MEMBER void fetch_group(int64_t i) const {
        fetch_lines(scales + i / GROUP * NR, NR * sizeof(f16));
    }
    INLINE_MEMBER void fetch_chunk(int64_t i) const { fetch_lines(codes + i * NR, CHUNK * NR); }
    INLINE_MEMBER static vf decode(const Group &group, const Chunk &chunk, int step, int half) {
        return __builtin_convertvector(widened(chunk.codes + step * NR + half * VW), vf) *
               group.scale[half];
    }
    static INLINE_MEMBER void scales_of(const Group &group, vf *scale, vf *) {
        for (int half = 0; half < 2; ++half) scale[half] = group.scale[half];
    }
#if BYTE_DOT
    INLINE_MEMBER void quads(int64_t i, int quad, __m512i *to) const {
#define LANE(column) column, 64 + column, 32 + column, 96 + column
#define LANES(column) LANE(column), LANE(column + 1), LANE(column + 2), LANE(column + 3)
        alignas(64) static constexpr uint8_t PLACES[2][64] = {
            {LANES(0), LANES(4), LANES(8), LANES(12)},
            {LANES(16), LANES(20), LANES(24), LANES(28)}};
#undef LANES
#undef LANE
        const __m512i *two_steps = (const __m512i *)(codes + (i + 2 * quad) * NR);
        const __m512i first = _mm512_loadu_si512(two_steps),
                      fifth = _mm512_loadu_si512(two_steps + 2);
        for (int half = 0; half < 2; ++half)
            to[half] = _mm512_xor_si512(
                _mm512_permutex2var_epi8(first, _mm512_load_si512(PLACES[half]), fifth),
                _mm512_set1_epi8((char)0x80));
    }
#endif
#if AMX
    static INLINE_MEMBER void store_codes(const Chunk &chunk, uint32_t *to) {
        for (int half = 0; half < 2; ++half) {
            const int8_t *from = chunk.codes + half * VW;
            store_pair(to + half * VW, (vu)__builtin_convertvector(widened(from), vf),
                       (vu)__builtin_convertvector(widened(from + NR), vf));
        }
    }
#endif
};

}  // namespace

// Codes [n, k] and scales [n, k / 32] as half floats, none of them negative → panels; k is a
// multiple of 32
extern "C" void tokenmill_pack(const int8_t *codes, const uint16_t *scale, int8_t *panels,
                               uint16_t *scales, int64_t n, int64_t k) {
    const int64_t groups = k / Byte::GROUP;
    pack_panels<NR>(panels, n, k, [=](int64_t row, int64_t i) { return codes[row * k + i]; });
    pack_panels<NR>(scales, n, groups,
                    [=](int64_t row, int64_t g) { return scale[row * groups + g]; });
    pack_panels<NR>(
        (float *)(scales + num_panels(n) * groups * NR), n, 1, [=](int64_t row, int64_t) {
            double squares = 0.0;
            for (int64_t i = 0; i < k; ++i) {
                const double wide = get((const f16 *)scale + row * groups + i / Byte::GROUP);
                squares += wide * wide * codes[row * k + i] * codes[row * k + i];
            }
            return (float)(sqrt(squares) * (1.0 + 1e-6));
        });
}

CODED_LINEAR(Byte)
