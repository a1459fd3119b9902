/* What Python hands over. Field for field the same in native/engine.py. */
#ifndef FOREBAY_STAGE_H
#define FOREBAY_STAGE_H

#include <stdint.h>

enum { F32, BF16 };                                            /* dtype of weights and activations */
enum { KV_F32, KV_BF16, KV_F16, KV_INT8, KV_FP8_E4M3 };        /* format of the pages */

/* Weight matrices are packed: (ceil(out / panel), in / per, panel, per) with per = 2 for bfloat16, 1 for
   float32, outputs padded with zeros; panel is what forebay_panel() says. */
typedef struct {
    const void *attention_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
    const void *mlp_norm, *gate, *gate_bias, *up, *up_bias, *down, *down_bias; /* no bias, no q_norm: NULL */
} Layer;

typedef struct {
    void *keys, *values; /* (pages, kv_heads, page_size, head_dim) */
    float *key_scales, *value_scales; /* (pages, kv_heads, page_size), or NULL */
} LayerPages;

typedef struct {
    int64_t table_start; /* into Batch.tables: the pages that hold positions 0 .. context + rows - 1 */
    int32_t row_start, rows, context, items_before;
} Span;

typedef struct {
    const int64_t *positions; /* (rows,) */
    Span *spans;
    const int64_t *tables;
    const int64_t *write_rows, *write_pages, *write_offsets; /* (writes,) */
    const void *cosines, *sines; /* (positions, head_dim) and (positions, head_dim / 2) */
    uint8_t *finite; /* (rows,): 0 where a key or value is not finite as the pages keep it; else left as it is */
    int32_t rows, span_count, writes, page_size;
} Batch;

typedef struct {
    int32_t dtype, kv_format, hidden, heads, kv_heads, head_dim, intermediate, threads;
    float norm_eps;
} Shape;

#endif
