/* What the units of the library share: an engine, and the work that each unit does for it. */
#ifndef FOREBAY_ENGINE_H
#define FOREBAY_ENGINE_H

#include "pool.h"
#include "stage.h"
#include "vec.h"

#define KEYS 64        /* keys that are scored before their values are added */
#define FEW 8          /* query heads of a key/value head that one decoded row brings */
#define CHUNK_ROWS 128 /* of a work item of a product */

/* bfloat16 is multiplied as it is, two and two, where one instruction does that. Elsewhere weights
   are widened on their way, and what lies between a layer's products is float32. */
#ifdef __AVX512BF16__
#define MULTIPLIES_BF16 1
#define DEPTH 1024 /* units of weights that many rows meet at a time */
#else
#define MULTIPLIES_BF16 0
#define DEPTH (LANES == 16 ? 128 : 256) /* of weights that are widened at a time: near 16 KiB */
#endif

typedef struct Engine {
    Shape shape;
    Pool *pool;
    float score_scale;
    int rows; /* that the buffers below have room for */
    void *normed, *qkv, *attended, *inner;
    char *scratch;
    size_t scratch_stride;
} Engine;

static inline char *scratch_of(const Engine *engine, int thread) {
    return engine->scratch + (size_t)thread * engine->scratch_stride;
}

/* Attention of all rows over their pages: engine->qkv -> engine->attended. Activations of a type. */
void attention_f32(Engine *engine, const LayerPages *pages, const Batch *batch);
void attention_bf16(Engine *engine, const LayerPages *pages, const Batch *batch);

/* Bytes of one thread's scratch for it. */
static inline size_t attention_scratch(size_t dim) {
    return sizeof(float) * (2 * WIDE * (dim + KEYS) + 4 * KEYS * dim) + 4096;
}

static inline size_t product_scratch(void) {
    return sizeof(float) * PANEL * (DEPTH + 2 * CHUNK_ROWS) + 4096;
}

/* The halves of a layer, and the head, with weights and hidden states of a type (native/stage.c). */
void attention_half_f32(Engine *engine, const Layer *layer, const LayerPages *pages, const Batch *batch,
                        const void *hidden, void *out, int add);
void attention_half_bf16(Engine *engine, const Layer *layer, const LayerPages *pages, const Batch *batch,
                         const void *hidden, void *out, int add);
void mlp_half_f32(Engine *engine, const Layer *layer, const Batch *batch, const void *hidden, void *out, int add);
void mlp_half_bf16(Engine *engine, const Layer *layer, const Batch *batch, const void *hidden, void *out, int add);
void head_f32(Engine *engine, const void *norm, const void *weight, const void *hidden, int rows, int outputs,
              float *out);
void head_bf16(Engine *engine, const void *norm, const void *weight, const void *hidden, int rows, int outputs,
               float *out);

#endif
