/* Vectors of LANES numbers in GCC's portable vector extension, and what a build's micro-kernel is
   made of: ROWS x COLS registers of sums. One source, four builds:

      AVX-512, with or without BF16   16 lanes, 32 registers: 8 x 3 of them hold sums
      AVX2 and FMA                     8 lanes, 16 registers: 6 x 2
      NEON                             4 lanes, 32 registers: 8 x 3
      SSE2, and anything else          4 lanes, 16 registers: 6 x 2, products rounded before sums

   Compiled with -ffp-contract=off: what is one rounding and what is two is said here (`madd`). */
#ifndef FOREBAY_VEC_H
#define FOREBAY_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define LANES 16
#define ROWS 8
#define COLS 3
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define ROWS 6
#define COLS 2
#elif defined(__ARM_NEON)
#define LANES 4
#define ROWS 8
#define COLS 3
#else
#define LANES 4
#define ROWS 6
#define COLS 2
#endif

#define PANEL (COLS * LANES) /* outputs side by side in packed weights */
#define WIDE 48              /* columns of a work item: a multiple of every PANEL */
#define TILES (WIDE / PANEL)
#define REGISTERS (WIDE / LANES)
#define ROWS_MAX 8 /* of ROWS, over all builds */

typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES)));
typedef uint16_t u16v __attribute__((vector_size(2 * LANES)));
typedef uint8_t u8v __attribute__((vector_size(LANES)));
typedef int8_t i8v __attribute__((vector_size(LANES)));
typedef uint16_t bf16;

INLINE f32v splat(float x) { return x - (f32v){}; }

/* a * b + c, rounded once where the processor can. */
INLINE f32v madd(f32v a, f32v b, f32v c) {
#if LANES == 16
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (f32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return c + a * b;
#endif
}

INLINE f32v choose(i32v mask, f32v yes, f32v no) {
    return (f32v)((mask & (i32v)yes) | (~mask & (i32v)no));
}

/* a > b ? a : b */
INLINE f32v larger(f32v a, f32v b) {
#if LANES == 16
    return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8
    return (f32v)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

#if LANES == 16
#include "lanes16.h"
#elif LANES == 8
#include "lanes8.h"
#else
#include "lanes4.h"
#endif

/* Loads and stores of the first n <= LANES numbers; what is not loaded is 0. */
INLINE f32v load_f32(const float *from, int n) {
    f32v x = {};
    if (n == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, (size_t)n * sizeof *from);
    return x;
}

INLINE void store_f32(float *to, f32v x, int n) {
    if (n == LANES) memcpy(to, &x, sizeof x);
    else memcpy(to, &x, (size_t)n * sizeof *to);
}

/* Round to nearest, ties to even. */
INLINE u16v narrow(f32v x) {
#ifdef __AVX512BF16__
    return (u16v)_mm512_cvtneps_pbh((__m512)x);
#else
    u32v bits = (u32v)x;
    u32v rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32v nan = (u32v)(x != x);
    return __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), u16v);
#endif
}

INLINE u32v lengthen(u16v x) {
#if LANES == 16
    return (u32v)_mm512_cvtepu16_epi32((__m256i)x);
#elif LANES == 8
    return (u32v)_mm256_cvtepu16_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, u32v);
#endif
}

INLINE u32v load_bits(const bf16 *from, int n) {
    u16v x = {};
    if (n == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, (size_t)n * sizeof *from);
    return lengthen(x);
}

INLINE f32v load_bf16(const bf16 *from, int n) { return (f32v)(load_bits(from, n) << 16); }

INLINE void store_bf16(bf16 *to, f32v x, int n) {
    u16v y = narrow(x);
    if (n == LANES) memcpy(to, &y, sizeof y);
    else memcpy(to, &y, (size_t)n * sizeof *to);
}

/* e^x for x <= 88, and exactly 0 below -87. Cody and Waite's reduction, then a polynomial of
   degree 6 (relative error 2e-7). */
INLINE f32v exponential(f32v x) {
    i32v tiny = x < -87.0f;
    x = larger(x, splat(-87.0f));
    const float round = 12582912.0f; /* 1.5 * 2^23: leaves the nearest whole number in the low bits */
    f32v shifted = madd(x, splat(1.44269504f), splat(round));
    f32v whole = shifted - round;
    f32v r = madd(whole, splat(-1.42860677e-6f), madd(whole, splat(-0.693145752f), x));
    f32v p = madd(splat(1.3888889e-3f), r, splat(8.3333333e-3f));
    p = madd(p, r, splat(4.1666667e-2f));
    p = madd(p, r, splat(1.6666667e-1f));
    p = madd(p, r, splat(0.5f));
    p = madd(p, r, splat(1.0f));
    p = madd(p, r, splat(1.0f));
    i32v scaled = (i32v)p + (((i32v)shifted - (i32v)splat(round)) << 23);
    return (f32v)(scaled & ~tiny);
}

INLINE f32v silu(f32v x) {
    f32v down = larger(-x, splat(-80.0f));
    return x / (1.0f + exponential(choose(down > 80.0f, splat(80.0f), down)));
}

#endif
