/* Vectors of 16 numbers in GCC's portable vector extension: AVX-512 where the compiler finds it, else two AVX or four SSE registers. */
#ifndef FOREBAY_VEC_H
#define FOREBAY_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));
typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint16_t bf16;

INLINE f32x16 splat(float x) { return x - (f32x16){}; }

INLINE f32x16 select16(i32x16 mask, f32x16 yes, f32x16 no) { return (f32x16)((mask & (i32x16)yes) | (~mask & (i32x16)no)); }

INLINE f32x16 max16(f32x16 a, f32x16 b) { return select16(a > b, a, b); }

/* Rows become columns: four rounds of exchanges between rows 8, 4, 2 and 1 apart. */
INLINE void transpose16(u32x16 r[LANES]) {
#define ROUND(s, ...) \
    for (int i = 0; i < LANES; i++) \
        if (!(i & s)) { \
            u32x16 a = r[i], b = r[i | s]; \
            r[i] = __builtin_shufflevector(a, b, __VA_ARGS__); \
            r[i | s] = SECOND(a, b, s); \
        }
#define SECOND(a, b, s) \
    (s == 8   ? __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31) \
     : s == 4 ? __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31) \
     : s == 2 ? __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31) \
              : __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#pragma GCC unroll 16
    ROUND(8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#pragma GCC unroll 16
    ROUND(4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
#pragma GCC unroll 16
    ROUND(2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#pragma GCC unroll 16
    ROUND(1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
#undef SECOND
#undef ROUND
}

/* Sums in a tree, lanes 8, 4, 2 and 1 apart. */
INLINE float sum16(f32x16 x) {
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1);
    return x[0] + x[1];
}

INLINE float highest16(f32x16 x) {
    x = max16(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = max16(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3));
    x = max16(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1));
    return x[0] > x[1] ? x[0] : x[1];
}

/* Loads and stores of the first n <= 16 numbers; what is not loaded is 0. */
INLINE f32x16 load_f32(const float *from, int n) {
    f32x16 x = {};
    if (n == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, (size_t)n * sizeof *from);
    return x;
}

INLINE void store_f32(float *to, f32x16 x, int n) {
    if (n == LANES) memcpy(to, &x, sizeof x);
    else memcpy(to, &x, (size_t)n * sizeof *to);
}

/* Round to nearest, ties to even. */
INLINE u16x16 narrow(f32x16 x) {
#ifdef __AVX512BF16__
    return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 nan = (u32x16)(x != x);
    return __builtin_convertvector((rounded & ~nan) | (0x7fc0 & nan), u16x16);
#endif
}

INLINE u32x16 lengthen(u16x16 x) {
#ifdef __AVX512F__
    return (u32x16)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, u32x16);
#endif
}

INLINE u32x16 load_bits(const bf16 *from, int n) {
    u16x16 x = {};
    if (n == LANES) memcpy(&x, from, sizeof x);
    else memcpy(&x, from, (size_t)n * sizeof *from);
    return lengthen(x);
}

INLINE f32x16 load_bf16(const bf16 *from, int n) { return (f32x16)(load_bits(from, n) << 16); }

INLINE void store_bf16(bf16 *to, f32x16 x, int n) {
    u16x16 y = narrow(x);
    if (n == LANES) memcpy(to, &y, sizeof y);
    else memcpy(to, &y, (size_t)n * sizeof *to);
}

/* e^x for x <= 88, and exactly 0 below -87. Cody and Waite's reduction, then a polynomial of degree 6 (relative error 2e-7). */
INLINE f32x16 exp16(f32x16 x) {
    i32x16 tiny = x < -87.0f;
    x = max16(x, splat(-87.0f));
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest whole number in the low bits */
    f32x16 shifted = x * 1.44269504f + round;
    f32x16 whole = shifted - round;
    f32x16 r = x - whole * 0.693145752f - whole * 1.42860677e-6f;
    f32x16 p = 1.3888889e-3f * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    i32x16 scaled = (i32x16)p + (((i32x16)shifted - (i32x16)splat(round)) << 23);
    return (f32x16)(scaled & ~tiny);
}

INLINE f32x16 silu16(f32x16 x) {
    f32x16 down = max16(-x, splat(-80.0f));
    return x / (1.0f + exp16(select16(down > 80.0f, splat(80.0f), down)));
}

#endif
