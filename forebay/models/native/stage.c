/* Layers of a Llama-like model on a CPU, over paged keys and values. What and why: native/engine.py and
   docs/ARCHITECTURE.md.

   C11 with GCC's vector extension (GCC, clang). Called by one thread at a time for each engine; owns
   nothing that is handed to it. */
#include <stdlib.h>

#include "engine.h"

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

static size_t scratch_bytes(size_t dim) {
    return attention_scratch(dim) > product_scratch() ? attention_scratch(dim) : product_scratch();
}

/* Outputs side by side in packed weights (native/stage.h). */
EXPORT int forebay_panel(void) { return PANEL; }

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
