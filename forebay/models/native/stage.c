/* Layers of a Llama-like model on a CPU, over paged keys and values. What and why: native/engine.py and docs/ARCHITECTURE.md.

   C11 with GCC's vector extension (GCC, clang). Called by one thread at a time for each engine; owns nothing that is handed to it. */
#include "pool.h"

#include "vec.h"

#include "stage.h"

#define ROWS 8         /* of a tile: 8 rows x 3 registers = 24 of 32 accumulators */
#define COLS 3
#define KEYS 64        /* keys that are scored before their values are added */
#define FEW 8          /* query heads of a key/value head that one decoded row brings */
#define CHUNK_ROWS 128 /* of a work item of a product */

typedef struct {
    Shape shape;
    Pool *pool;
    float score_scale;
    int rows; /* that the buffers below have room for */
    void *normed, *qkv, *attended, *inner;
    char *scratch;
    size_t scratch_stride;
} Engine;

/* ---- numbers of the pages ---- */

INLINE f32x16 from_fp8(u8x16 codes) {
    u32x16 c = __builtin_convertvector(codes, u32x16);
    /* Exponent and mantissa in float32's places; the product moves the bias from 7 to 127, also for numbers below the least normal one. */
    f32x16 size = (f32x16)((c & 0x7f) << 20) * 0x1p120f;
    return (f32x16)((u32x16)size | (c & 0x80) << 24);
}

INLINE f32x16 get_numbers(int format, const void *pool, long at, int n) {
    i8x16 bytes = {};
    switch (format) {
    case KV_F32: return load_f32((const float *)pool + at, n);
    case KV_BF16: return load_bf16((const bf16 *)pool + at, n);
#ifdef __FLT16_MANT_DIG__
    case KV_F16: {
        f32x16 x = {};
        for (int i = 0; i < n; i++) x[i] = (float)((const _Float16 *)pool)[at + i];
        return x;
    }
#endif
    default:
        memcpy(&bytes, (const char *)pool + at, (size_t)n);
        return format == KV_INT8 ? __builtin_convertvector(__builtin_convertvector(bytes, i32x16), f32x16) : from_fp8((u8x16)bytes);
    }
}

INLINE int format_bytes(int format) { return format == KV_F32 ? 4 : format == KV_BF16 || format == KV_F16 ? 2 : 1; }

INLINE uint8_t to_fp8(float x) {
    float size = fabsf(x) > 448.0f ? 448.0f : fabsf(x);
    uint32_t bits;
    if (size != size) return 0x7f;
    size *= 0x1p-120f;
    memcpy(&bits, &size, sizeof bits);
    bits = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    return (uint8_t)(bits | (x < 0) << 7);
}

INLINE bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return x != x ? 0x7fc0 : (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
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

#define T float
#define U float
#define UV f32x16
#define PER 1
#define OWN_FORMAT KV_F32
#define N(name) name##_f32
INLINE float number_f32(float x) { return x; }
INLINE void set_f32(float *to, float x) { *to = x; }
#include "kernels.h"

#define IS_BF16
#define T bf16
#define U uint32_t
#define UV u32x16
#define PER 2
#define OWN_FORMAT KV_BF16
#define N(name) name##_bf16
INLINE float number_bf16(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, sizeof y);
    return y;
}
INLINE void set_bf16(bf16 *to, float x) { *to = to_bf16(x); }
#include "kernels.h"

/* ---- what Python calls ---- */

#define EXPORT __attribute__((visibility("default")))

static void release(Engine *engine) {
    free(engine->normed);
    free(engine->qkv);
    free(engine->attended);
    free(engine->inner);
    engine->normed = engine->qkv = engine->attended = engine->inner = NULL;
    engine->rows = 0;
}

static void *room(long numbers) { return aligned_alloc(64, ((size_t)numbers * sizeof(float) + 63) / 64 * 64); }

/* Whether buffers for `rows` rows are there. */
static int reserve(Engine *engine, int rows) {
    const Shape *shape = &engine->shape;
    long wide = shape->heads * shape->head_dim;
    if (rows <= engine->rows) return 1;
    release(engine);
    engine->normed = room((long)rows * shape->hidden);
    engine->qkv = room(rows * (wide + 2L * shape->kv_heads * shape->head_dim));
    engine->attended = room(rows * wide);
    engine->inner = room((long)rows * shape->intermediate);
    if (!engine->normed || !engine->qkv || !engine->attended || !engine->inner) {
        release(engine);
        return 0;
    }
    engine->rows = rows;
    return 1;
}

EXPORT void forebay_close(Engine *engine) {
    release(engine);
    if (engine->pool) pool_close(engine->pool);
    free(engine->scratch);
    free(engine);
}

/* Whether this build knows the page format. */
EXPORT int forebay_knows(int kv_format) {
#ifndef __FLT16_MANT_DIG__
    if (kv_format == KV_F16) return 0;
#endif
    return kv_format >= KV_F32 && kv_format <= KV_FP8_E4M3;
}

/* What one thread's Scratch takes at most; of float32, which is never less than that of bfloat16. */
static size_t scratch_bytes(size_t dim) { return sizeof(float) * (2 * COLS * LANES * (dim + KEYS) + 4 * KEYS * dim) + 4096; }

/* NULL without memory or threads. */
EXPORT Engine *forebay_open(const Shape *shape) {
    Engine *engine = calloc(1, sizeof *engine);
    if (!engine) return NULL;
    engine->shape = *shape;
    engine->score_scale = 1.0f / sqrtf((float)shape->head_dim);
    engine->scratch_stride = (scratch_bytes((size_t)shape->head_dim) + 4095) / 4096 * 4096;
    engine->scratch = aligned_alloc(4096, engine->scratch_stride * (size_t)shape->threads);
    engine->pool = pool_open(shape->threads);
    if (!engine->scratch || !engine->pool) {
        forebay_close(engine);
        return NULL;
    }
    return engine;
}

/* out (rows, hidden) = attention of the normed hidden states, added to them if `add`; writes the batch's keys and values first.
   `out` may be `hidden`. 0, or -1 without memory. */
EXPORT int forebay_attention(Engine *engine, const Layer *layer, const LayerPages *pages, const Batch *batch, const void *hidden, void *out, int add) {
    if (!reserve(engine, batch->rows)) return -1;
    if (engine->shape.dtype == BF16) attention_half_bf16(engine, layer, pages, batch, hidden, out, add);
    else attention_half_f32(engine, layer, pages, batch, hidden, out, add);
    return 0;
}

/* The same for the other half of a layer. */
EXPORT int forebay_mlp(Engine *engine, const Layer *layer, const Batch *batch, const void *hidden, void *out, int add) {
    if (!reserve(engine, batch->rows)) return -1;
    if (engine->shape.dtype == BF16) mlp_half_bf16(engine, layer, batch, hidden, out, add);
    else mlp_half_f32(engine, layer, batch, hidden, out, add);
    return 0;
}

/* `count` whole layers, one after the other, on `hidden` in place. */
EXPORT int forebay_layers(Engine *engine, const Layer *layers, const LayerPages *pages, int count, const Batch *batch, void *hidden) {
    for (int i = 0; i < count; i++) {
        if (forebay_attention(engine, layers + i, pages + i, batch, hidden, hidden, 1)) return -1;
        if (forebay_mlp(engine, layers + i, batch, hidden, hidden, 1)) return -1;
    }
    return 0;
}

/* out (rows, outputs) float32 = norm(hidden) @ weight. */
EXPORT int forebay_head(Engine *engine, const void *norm, const void *weight, const void *hidden, int rows, int outputs, float *out) {
    if (!reserve(engine, rows)) return -1;
    if (engine->shape.dtype == BF16) head_bf16(engine, norm, weight, hidden, rows, outputs, out);
    else head_f32(engine, norm, weight, hidden, rows, outputs, out);
    return 0;
}
