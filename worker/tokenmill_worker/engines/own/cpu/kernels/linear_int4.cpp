// Linear layers with 4-bit weights and float32 activations: w = scale · code + zero, by groups of
// 32 along k.
//
// A 32-bit lane holds eight codes of one column, so that one load feeds eight steps of k. Panels
// are [n / NR][k / 8][NR], scales [n / NR][k / 32][2][NR] half floats (scales, then zeros).

#include "byte_dot.h"

#define CODES 8  // in one lane

namespace {

struct Int4 {
    static constexpr int64_t GROUP = 32, CHUNK = CODES, PARTS = 0, FEW = 4, DOT_ROWS = 4;
    static constexpr bool IS_FACTOR = false, HAS_ZEROS = true, FITS = true, IN_PLACE = true,
                          HAS_LENGTHS = false;
    static constexpr int OFFSET = 8;
    struct Group {
        vf scale[2], zero[2];
    };
    struct Chunk {
        vi lanes[2];
    };
    const uint32_t *codes;
    const f16 *scales;

    // Even steps lie in the lower half of a lane, so that a shift brings two of them where the
    // matrix registers want them.
    static INLINE_MEMBER int place(int step) { return step / 2 * 4 + step % 2 * 16; }
    static Int4 at(const LinearArguments &a, int64_t p) {
        return {(const uint32_t *)a.weight + p * (a.k / CODES) * NR,
                (const f16 *)a.scale + p * (a.k / GROUP) * 2 * NR};
    }
    static INLINE_MEMBER const float *lengths(const LinearArguments &) { return nullptr; }
    INLINE_MEMBER const void *start() const { return codes; }
    static int64_t bytes(int64_t k) { return k / CODES * NR * sizeof(uint32_t); }
    INLINE_MEMBER Group group(int64_t i) const {
        const f16 *at = scales + i / GROUP * 2 * NR;
        return {{load(at), load(at + VW)}, {load(at + NR), load(at + NR + VW)}};
    }
    INLINE_MEMBER Chunk chunk(int64_t i) const {
        Chunk c;
        // A vector at a time: a copy of both is made in smaller pieces, for which the registers
        // then wait.
        for (int half = 0; half < 2; ++half)
            memcpy(&c.lanes[half], codes + i / CODES * NR + half * VW, sizeof c.lanes[half]);
        return c;
    }
    INLINE_MEMBER void fetch_group(int64_t i) const {
        fetch_lines(scales + i / GROUP * 2 * NR, 2 * NR * sizeof(f16));
    }
    INLINE_MEMBER void fetch_chunk(int64_t i) const {
        fetch_lines(codes + i / CODES * NR, NR * sizeof(uint32_t));
    }
    INLINE_MEMBER static vf decode(const Group &group, const Chunk &chunk, int step, int half) {
        const vi shifted = (vi)((vu)chunk.lanes[half] >> place(step));
#if VW == 16
        const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const vf code =
            (vf)_mm512_permutexvar_ps((__m512i)shifted, table);  // the low four bits choose
#else
        const vf code = __builtin_convertvector(shifted & 15, vf);
#endif
        return fma(code, group.scale[half], group.zero[half]);
    }
    // As numbers from −OFFSET on, whose zero is that much higher.
    static INLINE_MEMBER void scales_of(const Group &group, vf *scale, vf *zero) {
        for (int half = 0; half < 2; ++half)
            scale[half] = group.scale[half],
            zero[half] = fma(splat((float)OFFSET), group.scale[half], group.zero[half]);
    }
#if BYTE_DOT
    INLINE_MEMBER void quads(int64_t i, int quad, __m512i *to) const {
        const Chunk c = chunk(i);
        for (int half = 0; half < 2; ++half)
            to[half] = _mm512_and_si512(_mm512_srli_epi32((__m512i)c.lanes[half], 4 * quad),
                                        _mm512_set1_epi8(15));
    }
#endif
#if AMX
    static INLINE_MEMBER void store_codes(const Chunk &chunk, uint32_t *to) {
        alignas(64) static const uint16_t BF16[32] = {
            0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
            0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
            0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
        const __m512i table = _mm512_load_si512(BF16);  // twice, for five bits of an index choose
#pragma GCC unroll 4
        for (int pair = 0; pair < CODES / 2; ++pair, to += NR)
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const vu both = (vu)chunk.lanes[half] >> (4 * pair);
                _mm512_storeu_si512(to + half * VW, _mm512_permutexvar_epi16((__m512i)both, table));
            }
    }
#endif
};

}  // namespace

// Codes [n, k], 0 to 15, and scales and zeros [n, k / 32] as half floats → panels; k is a multiple
// of 32
extern "C" void tokenmill_pack(const uint8_t *codes, const uint16_t *scale, const uint16_t *zero,
                               uint32_t *panels, uint16_t *scales, int64_t n, int64_t k) {
    const int64_t lanes = k / CODES, groups = k / Int4::GROUP;
    pack_panels<NR>(panels, n, lanes, [=](int64_t row, int64_t i) {
        uint32_t lane = 0;
        for (int c = 0; c < CODES; ++c)
            lane |= (uint32_t)codes[row * k + i * CODES + c] << Int4::place(c);
        return lane;
    });
    pack_panels<NR>(scales, n, 2 * groups, [=](int64_t row, int64_t i) {
        return (i % 2 ? zero : scale)[row * groups + i / 2];
    });
}

CODED_LINEAR(Int4)
