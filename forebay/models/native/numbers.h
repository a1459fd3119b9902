/* Numbers of the two dtypes, under the names that the templates use: LOAD_f32, STORE_bf16, ... */
#ifndef FOREBAY_NUMBERS_H
#define FOREBAY_NUMBERS_H

#include "vec.h"

INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float number_f32(float x) { return x; }

INLINE float number_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}

INLINE void set_f32(float *to, float x) { *to = x; }
INLINE void set_bf16(bf16 *to, float x) { *to = to_bf16(x); }

/* As if it had been stored and loaded. */
INLINE f32v rounded_f32(f32v x) { return x; }
INLINE f32v rounded_bf16(f32v x) { return (f32v)(lengthen(narrow(x)) << 16); }

typedef float number_of_f32;
typedef bf16 number_of_bf16;

#endif
