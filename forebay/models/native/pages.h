/* Numbers of the pages, in each of their formats (models/kv_format.py). */
#ifndef FOREBAY_PAGES_H
#define FOREBAY_PAGES_H

#include "numbers.h"
#include "stage.h"

INLINE f32v from_fp8(u8v codes) {
    u32v c = __builtin_convertvector(codes, u32v);
    /* Exponent and mantissa in float32's places; the product moves the bias from 7 to 127, also for
       numbers below the least normal one. */
    f32v size = (f32v)((c & 0x7f) << 20) * 0x1p120f;
    return (f32v)((u32v)size | (c & 0x80) << 24);
}

INLINE f32v get_numbers(int format, const void *pool, long at, int n) {
    i8v bytes = {};
    switch (format) {
    case KV_F32: return load_f32((const float *)pool + at, n);
    case KV_BF16: return load_bf16((const bf16 *)pool + at, n);
#ifdef __FLT16_MANT_DIG__
    case KV_F16: {
        f32v x = {};
        for (int i = 0; i < n; i++) x[i] = (float)((const _Float16 *)pool)[at + i];
        return x;
    }
#endif
    default:
        memcpy(&bytes, (const char *)pool + at, (size_t)n);
        return format == KV_INT8 ? __builtin_convertvector(__builtin_convertvector(bytes, i32v), f32v)
                                 : from_fp8((u8v)bytes);
    }
}

INLINE int format_bytes(int format) {
    return format == KV_F32 ? 4 : format == KV_BF16 || format == KV_F16 ? 2 : 1;
}

INLINE uint8_t to_fp8(float x) {
    float size = fabsf(x) > 448.0f ? 448.0f : fabsf(x);
    uint32_t bits;
    if (size != size) return 0x7f;
    size *= 0x1p-120f;
    memcpy(&bits, &size, sizeof bits);
    bits = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return (uint8_t)(bits | (x < 0) << 7);
}

INLINE void put_number(int format, void *pool, long at, float x) {
    float clipped = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
    switch (format) {
    case KV_F32: ((float *)pool)[at] = x; return;
    case KV_BF16: ((bf16 *)pool)[at] = to_bf16(x); return;
#ifdef __FLT16_MANT_DIG__
    case KV_F16: ((_Float16 *)pool)[at] = (_Float16)x; return;
#endif
    case KV_INT8: ((int8_t *)pool)[at] = clipped == clipped ? (int8_t)rintf(clipped) : 0; return;
    default: ((uint8_t *)pool)[at] = to_fp8(x);
    }
}

#endif
