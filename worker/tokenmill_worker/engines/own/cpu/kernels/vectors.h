// Float vectors of the machine's width (AVX512, AVX2, else 128 bits through the compiler's vector
// extension), loads that widen half precision, and exp and tanh that agree on every lane.
//
// Code above this file thinks in strips of 16 floats; a strip is VPS vectors.
#pragma once

#include <math.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX2__) && defined(__FMA__)
#define VW 8
#else
#define VW 4
#endif
#define STRIP 16
#define VPS (STRIP / VW)

// Register tiles: rows of queries × strips of columns, so that accumulators, one column vector and
// one broadcast fit the register file (32 registers on AVX512 and NEON, 16 elsewhere).
#if VW == 16
#define MAX_ROWS 6
#define MAX_STRIPS 4
#elif VW == 8 || defined(__aarch64__)
#define MAX_ROWS 6
#define MAX_STRIPS 1
#else
#define MAX_ROWS 3
#define MAX_STRIPS 1
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VW * 4)));
typedef int32_t vi __attribute__((vector_size(VW * 4)));
typedef uint32_t vu __attribute__((vector_size(VW * 4)));
typedef uint16_t vh __attribute__((vector_size(VW * 2)));
typedef uint8_t vb __attribute__((vector_size(VW)));

struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};
struct f8 {  // E4M3: 4 bits of exponent, 3 of fraction; up to 448, no infinities, one NaN
             // (Micikevicius et al. 2022)
    uint8_t bits;
};
struct f8e5 {  // E5M2, the upper byte of half precision: up to 57,344, with infinities and NaNs
    uint8_t bits;
};

INLINE vf splat(float x) {
    return x - vf{};
}  // x − 0 is x for every x, so only the broadcast remains
INLINE vf fma(vf a, vf b, vf c) {
#if VW == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VW == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;  // contracted where the target has fused multiply-add, alike in every kernel
#endif
}
INLINE vf select(vi mask, vf yes, vf no) { return mask ? yes : no; }
INLINE vf larger(vf a, vf b) { return select(a > b, a, b); }
INLINE bool any_lane(vi mask) {
#if VW == 16
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int any = 0;
    for (int j = 0; j < VW; ++j) any |= mask[j];
    return any != 0;
#endif
}
INLINE vi lanes() {
    vi v;
    for (int i = 0; i < VW; ++i) v[i] = i;
    return v;
}

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}
INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }
// GCC would load a vector again for each of its uses, and loads are fewer a cycle than sums.
INLINE vf in_register(vf v) {
#if defined(__x86_64__)
    asm("" : "+v"(v));
#endif
    return v;
}

INLINE vf load(const bf16 *p) {
#if VW == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    vh v;
    memcpy(&v, p, sizeof v);
    return (vf)(__builtin_convertvector(v, vu) << 16);
#endif
}
INLINE vf load(const f16 *p) {
#if VW == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif VW == 8 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vh v;
    memcpy(&v, p, sizeof v);
    vu wide = __builtin_convertvector(v, vu), magnitude = (wide & 0x7fff) << 13;
    vf scaled = (vf)magnitude * splat(0x1p112f);  // rebias the exponent; exact for subnormals too
    vi special = (vi)(magnitude >= (vu{} + 0x0f800000u));
    vf value = select(special, (vf)(magnitude | 0x7f800000u), scaled);
    return (vf)((vu)value | ((wide & 0x8000) << 16));
#endif
}

// A 256th of the number, which is what its bits are in half precision: who multiplies does so where
// there is less of it (F8_UNIT). The bit above the exponent, where a half has another one, is the
// carry of a NaN, all of whose bits are set.
#define F8_UNIT 256.0f
INLINE vf load(const f8 *p) {
#if VW == 16
    const __m256i bits =
        _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)), 7);
    const __m256i carried = _mm256_add_epi16(bits, _mm256_set1_epi16(0x80)),
                  place = _mm256_set1_epi16(0x4000);
    return (vf)_mm512_cvtph_ps(
        _mm256_ternarylogic_epi32(bits, carried, place, 0x78));  // bits ^ (carried & place)
#elif VW == 8 && defined(__F16C__)
    const __m128i bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    const __m128i carried = _mm_add_epi16(bits, _mm_set1_epi16(0x80)),
                  place = _mm_set1_epi16(0x4000);
    return (vf)_mm256_cvtph_ps(_mm_xor_si128(bits, _mm_and_si128(carried, place)));
#else
    vb v;
    memcpy(&v, p, sizeof v);
    const vu wide = __builtin_convertvector(v, vu), magnitude = wide & 0x7f;
    const vf scaled =
        (vf)(magnitude << 20) * splat(0x1p112f);  // rebias the exponent; exact for subnormals too
    const vf value = select((vi)(magnitude == 0x7f), splat(NAN), scaled);
    return (vf)((vu)value | ((wide & 0x80) << 24));
#endif
}
INLINE vf load(const f8e5 *p) {
#if VW == 16
    return (vf)_mm512_cvtph_ps(
        _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8));
#else
    f16 halves[VW];
    for (int i = 0; i < VW; ++i) halves[i].bits = (uint16_t)(p[i].bits << 8);
    return load(halves);
#endif
}

INLINE float get(const float *p) { return *p; }
INLINE float get(const f8 *p) {  // as load()
    const uint32_t magnitude = p->bits & 0x7fu;
    const uint32_t shifted = magnitude << 20, sign = (p->bits & 0x80u) << 24;
    float x;
    memcpy(&x, &shifted, 4);
    x = magnitude == 0x7f ? NAN : x * 0x1p112f;
    return sign ? -x : x;
}
INLINE float get(const bf16 *p) {
    uint32_t bits = (uint32_t)p->bits << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE float get(const f16 *p) {
    uint32_t magnitude = (p->bits & 0x7fffu) << 13, sign = (p->bits & 0x8000u) << 16, bits;
    float x;
    memcpy(&x, &magnitude, 4);
    x *= 0x1p112f;
    memcpy(&bits, &x, 4);
    bits = (magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : bits) | sign;
    memcpy(&x, &bits, 4);
    return x;
}
INLINE float get(const f8e5 *p) {
    const f16 half{(uint16_t)(p->bits << 8)};
    return get(&half);
}

INLINE void put(float *p, float x) { *p = x; }
INLINE void put(bf16 *p, float x) {  // round to nearest even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, &x, 4);
    p->bits = x != x ? (uint16_t)((bits >> 16) | 0x40)
                     : (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE void put(f16 *p, float x) {
#if defined(__F16C__)
    p->bits = (uint16_t)_cvtss_sh(x, 0);
#else
    uint32_t bits, magnitude;
    memcpy(&bits, &x, 4);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
    magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {
        p->bits = sign | 0x7e00;
    } else if (magnitude >= 0x477ff000) {  // rounds to infinity
        p->bits = sign | 0x7c00;
    } else if (magnitude < 0x38800000) {  // subnormal in half: let an addition do the rounding
        float y;
        memcpy(&y, &magnitude, 4);
        y += 0.5f;
        memcpy(&magnitude, &y, 4);
        p->bits = sign | (uint16_t)(magnitude - 0x3f000000);
    } else {
        p->bits =
            sign | (uint16_t)((magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13);
    }
#endif
}

INLINE void put(
    f8 *p,
    float x) {  // round to nearest even, at most 448; without branches, so that rows become vectors
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t magnitude = bits & 0x7fffffff;
    float y;
    memcpy(&y, &magnitude, 4);
    y += 16384.0f;  // a subnormal's unit is this one's last bit
    uint32_t small;
    memcpy(&small, &y, 4);
    uint32_t value = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
    value = magnitude < 0x3c800000 ? small - 0x46800000 : value;
    value = magnitude >= 0x43e00000 ? 0x7e : value;
    value = magnitude > 0x7f800000 ? 0x7f : value;
    p->bits = (uint8_t)(value | bits >> 24 & 0x80);
}
INLINE void put(f8e5 *p, float x) {  // as for E4M3, at most 57,344
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t magnitude = bits & 0x7fffffff;
    float y;
    memcpy(&y, &magnitude, 4);
    y += 128.0f;  // a subnormal's unit is this one's last bit
    uint32_t small;
    memcpy(&small, &y, 4);
    uint32_t value = ((magnitude + 0xfffff + (magnitude >> 21 & 1)) >> 21) - (112 << 2);
    value = magnitude < 0x38800000 ? small - 0x43000000 : value;
    value = magnitude >= 0x47600000 ? 0x7b : value;
    value = magnitude > 0x7f800000 ? 0x7f : value;
    p->bits = (uint8_t)(value | bits >> 24 & 0x80);
}

// exp(x) in place, N vectors in step so that none waits for another's result; relative error about
// 1e-7, exactly 0 below -87 (a masked logit), NaN stays NaN. x must not exceed 88.
template <int N>
INLINE void vexps(vf *x) {
    const vf magic =
        splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer in the low bits
    vf shifted[N], n[N], f[N], y[N];
#define EACH(...)             \
    _Pragma("GCC unroll 4") for (int i = 0; i < N; ++i) { __VA_ARGS__; }
    EACH(shifted[i] = fma(x[i], splat(1.44269504f), magic))
    EACH(n[i] = shifted[i] - magic)
    EACH(f[i] = fma(n[i], splat(-0.693359375f), x[i]))
    EACH(f[i] = fma(n[i], splat(2.12194440e-4f), f[i]))
    EACH(y[i] = fma(splat(1.9875691500e-4f), f[i], splat(1.3981999507e-3f)))
    EACH(y[i] = fma(y[i], f[i], splat(8.3334519073e-3f)))
    EACH(y[i] = fma(y[i], f[i], splat(4.1665795894e-2f)))
    EACH(y[i] = fma(y[i], f[i], splat(1.6666665459e-1f)))
    EACH(y[i] = fma(y[i], f[i], splat(5.0000001201e-1f)))
    EACH(y[i] = fma(y[i], f[i] * f[i], f[i]) + splat(1.0f))
#if VW == 16
    EACH(x[i] = (vf)_mm512_maskz_scalef_ps(
             _mm512_cmp_ps_mask((__m512)x[i], (__m512)splat(-87.0f), _CMP_NLT_UQ), (__m512)y[i],
             (__m512)n[i]))
#else
    EACH(vf result = (vf)((vi)y[i] + ((vi)shifted[i] << 23));
         result = select(x[i] < splat(-87.0f), splat(0.0f), result);
         x[i] = select(x[i] == x[i], result, x[i]))
#endif
#undef EACH
}
INLINE vf vexp(vf x) {
    vexps<1>(&x);
    return x;
}

INLINE vf vtanh(vf x) {
    vi sign = (vi)x & (vi{} + (int32_t)0x80000000);
    vf a = (vf)((vi)x & 0x7fffffff);
    vf z = a * a;
    vf y = splat(-5.70498872745e-3f);
    y = fma(y, z, splat(2.06390887954e-2f));
    y = fma(y, z, splat(-5.37397155531e-2f));
    y = fma(y, z, splat(1.33314422036e-1f));
    y = fma(y, z, splat(-3.33332819422e-1f));
    vf small = fma(y * z, a, a);
    vf capped = select(a > splat(9.1f), splat(9.1f), a);
    vf large = splat(1.0f) - splat(2.0f) / (vexp(capped + capped) + splat(1.0f));
    vf result = select(a < splat(0.625f), small, large);
    return select(x == x, (vf)((vi)result | sign), x);
}

// Lanes folded in halves, so that sums do not depend on the machine's instructions.
INLINE vf swapped(vf v, int distance) {
    vi at = lanes() ^ distance;
    return __builtin_shuffle(v, at);
}
INLINE float sum_lanes(vf v) {
#pragma GCC unroll 8
    for (int width = VW / 2; width > 0; width /= 2) v += swapped(v, width);
    return v[0];
}
INLINE float max_lanes(vf v) {
#pragma GCC unroll 8
    for (int width = VW / 2; width > 0; width /= 2) v = larger(v, swapped(v, width));
    return v[0];
}
