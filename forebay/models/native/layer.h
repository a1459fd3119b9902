/* The halves of a decoder layer but for attention: norms, products with weights, rotation, writing
   pages. Included once for each dtype of weights:

      W     a number of weights, and of hidden states between layers
      A     a number of what lies between (native/engine.h: MULTIPLIES_BF16)
      U     a unit of the inner dimension of products, as activations and weights have it side by
      PER   side; PER numbers of W. Where A is wider than W, weights are widened (`IS_WIDENED`).

   A row's result depends on nothing but the row: see native/tile.h. */

typedef struct {
    const A *x; /* (rows, inner) */
    const void *weight, *second; /* second: `up` beside `gate`, or NULL */
    const W *bias, *second_bias, *residual; /* each may be NULL */
    A *out; /* (rows, outputs); one of the three */
    W *hidden;
    float *logits;
    int rows, inner, outputs, chunks, wide;
    const Engine *engine;
} N(Linear);

/* out = x / rms(x) * weight; the mean in float32, rounded before the weight as in the reference.
   `x` is of W if `is_hidden`, else of A. */
INLINE void N(norm)(const void *x, int is_hidden, const W *weight, int size, float eps, A *out) {
#define X(i, n) (is_hidden ? LOAD_W((const W *)x + (i), n) : LOAD_A((const A *)x + (i), n))
    f32v squares = {};
    for (int i = 0; i < size; i += LANES) {
        f32v v = X(i, size - i < LANES ? size - i : LANES);
        squares = madd(v, v, squares);
    }
    f32v scale = splat(1.0f / sqrtf(sum(squares) / (float)size + eps));
    for (int i = 0; i < size; i += LANES) {
        int n = size - i < LANES ? size - i : LANES;
        STORE_A(out + i, ROUND_A(X(i, n) * scale) * LOAD_W(weight + i, n), n);
    }
#undef X
}

/* ---- products with weights ---- */

INLINE f32v N(biased)(f32v x, const W *bias, int n) { return bias ? x + LOAD_W(bias, n) : x; }

/* One register of outputs: n of them, from column `at` of row `m`. */
INLINE void N(finish)(const N(Linear) *job, int m, int at, int n, f32v x, f32v y) {
    long place = (long)m * job->outputs + at;
    x = N(biased)(x, job->bias ? job->bias + at : NULL, n);
    if (job->second)
        x = ROUND_A(silu(x)) * N(biased)(y, job->second_bias ? job->second_bias + at : NULL, n);
    if (job->residual) x += LOAD_W(job->residual + place, n);
    if (job->logits) store_f32(job->logits + place, x, n);
    else if (job->hidden) STORE_W(job->hidden + place, x, n);
    else STORE_A(job->out + place, x, n);
}

static void N(finish_panel)(const N(Linear) *job, int first_row, int rows, int first, const float *sums,
                            const float *seconds) {
    int stop = job->outputs - first < PANEL ? job->outputs - first : PANEL;
    for (int m = 0; m < rows; m++)
        for (int j = 0; j < stop; j += LANES) {
            f32v x, y;
            memcpy(&x, sums + m * PANEL + j, sizeof x);
            memcpy(&y, seconds + m * PANEL + j, sizeof y);
            N(finish)(job, first_row + m, first + j, stop - j < LANES ? stop - j : LANES, x, y);
        }
}

#ifdef IS_WIDENED
/* Pairs of a panel become two rows of it. */
INLINE void N(widen)(const uint32_t *pairs, long depth, float *wide) {
    for (long k = 0; k < depth; k += 2, pairs += PANEL, wide += 2 * PANEL)
#pragma GCC unroll 3
        for (int j = 0; j < COLS; j++) {
            u32v both;
            memcpy(&both, pairs + j * LANES, sizeof both);
            u32v first = both << 16, second = both & 0xffff0000u;
            memcpy(wide + j * LANES, &first, sizeof first);
            memcpy(wide + PANEL + j * LANES, &second, sizeof second);
        }
}

/* The tile of a few rows, with pairs that are widened as they are read. */
INLINE void N(narrow_tile)(const float *a, long row, const uint32_t *pairs, long depth, float *c, int rows) {
    f32v s[ROWS][COLS];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
        for (int j = 0; j < COLS; j++) s[m][j] = (f32v){};
    for (long k = 0; k < depth; k += 2, pairs += PANEL) {
        __builtin_prefetch((const char *)pairs + 2048);
#pragma GCC unroll 3
        for (int j = 0; j < COLS; j++) {
            u32v both;
            memcpy(&both, pairs + j * LANES, sizeof both);
            f32v first = (f32v)(both << 16), second = (f32v)(both & 0xffff0000u);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                s[m][j] = madd(splat(a[m * row + k]), first, s[m][j]);
                s[m][j] = madd(splat(a[m * row + k + 1]), second, s[m][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
        for (int j = 0; j < COLS; j++) memcpy(c + m * PANEL + j * LANES, &s[m][j], sizeof(f32v));
}
#endif

/* sums (rows, PANEL) of up to ROWS rows: a decode, whose weights are read once. */
static void N(few_rows)(const N(Linear) *job, int row, int rows, const void *panel, float *sums) {
    const A *x = job->x + (long)row * job->inner;
#ifdef IS_WIDENED
    switch (rows) {
#define CASE(r) \
    case r: N(narrow_tile)(x, job->inner, panel, job->inner, sums, r); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS == 8
        CASE(7) CASE(8)
#endif
#undef CASE
    }
#else
    long depth = job->inner / PER;
    N(product)(&(N(Product)){.a = (const U *)x, .row = depth, .step = 1, .b = panel, .across = PANEL,
                             .depth = depth, .c = sums, .c_row = PANEL}, rows, COLS);
#endif
}

#ifndef IS_WIDENED
/* One row and two panels at a time: its time is that of reading them, and two streams are read
   faster than one. The order of each sum is the tile's. */
static void N(two_panels)(const U *x, const U *one, const U *other, long depth, float *sums, float *seconds) {
    f32v s[2][COLS] = {};
    for (long k = 0; k < depth; k++, one += PANEL, other += PANEL)
#pragma GCC unroll 3
        for (int j = 0; j < COLS; j++) {
            UV a, b;
            memcpy(&a, one + j * LANES, sizeof a);
            memcpy(&b, other + j * LANES, sizeof b);
            s[0][j] = N(mac)(s[0][j], x[k], a);
            s[1][j] = N(mac)(s[1][j], x[k], b);
        }
    memcpy(sums, s[0], sizeof s[0]);
    memcpy(seconds, s[1], sizeof s[1]);
}

/* A decode of one request: an item of `linear_item`, or two of them side by side. */
static void N(one_row_item)(const N(Linear) *job, int first, int stop, float *sums, float *seconds) {
    long depth = job->inner / PER;
    const U *x = (const U *)job->x, *weight = (const U *)job->weight;
    for (int at = first; at < job->outputs && at < stop; at += PANEL) {
        const U *panel = weight + (long)at * depth;
        if (job->second) {
            N(two_panels)(x, panel, (const U *)job->second + (long)at * depth, depth, sums, seconds);
            N(finish_panel)(job, 0, 1, at, sums, seconds);
        } else if (at + PANEL < job->outputs && at + PANEL < stop) {
            N(two_panels)(x, panel, panel + PANEL * depth, depth, sums, seconds);
            N(finish_panel)(job, 0, 1, at, sums, sums);
            at += PANEL;
            N(finish_panel)(job, 0, 1, at, seconds, seconds);
        } else {
            N(few_rows)(job, 0, 1, panel, sums);
            N(finish_panel)(job, 0, 1, at, sums, sums);
        }
    }
}
#endif

/* The same of many rows, part by part of the depth: a part of the panel stays in the L1 cache. */
static void N(many_rows)(const N(Linear) *job, int row, int rows, const void *panel, float *sums, float *wide) {
    long depth = job->inner / PER;
    for (long k = 0; k < depth; k += DEPTH) {
        long part = depth - k < DEPTH ? depth - k : DEPTH;
#ifdef IS_WIDENED
        const U *b = wide;
        N(widen)((const uint32_t *)panel + k / 2 * PANEL, part, wide);
#else
        (void)wide;
        const U *b = (const U *)panel + k * PANEL;
#endif
        for (int m = 0; m < rows; m += ROWS)
            N(product)(&(N(Product)){.a = (const U *)(job->x + (long)(row + m) * job->inner) + k, .row = depth,
                                     .step = 1, .b = b, .across = PANEL, .depth = part, .c = sums + m * PANEL,
                                     .c_row = PANEL, .add = k > 0},
                       rows - m < ROWS ? rows - m : ROWS, COLS);
    }
}

/* WIDE outputs of up to CHUNK_ROWS rows. */
static void N(linear_item)(void *context, int item, int thread) {
    const N(Linear) *job = context;
    int first = item / job->chunks * WIDE, row = item % job->chunks * CHUNK_ROWS;
    int rows = job->rows - row < CHUNK_ROWS ? job->rows - row : CHUNK_ROWS;
    float *sums = (float *)scratch_of(job->engine, thread), *seconds = sums + CHUNK_ROWS * PANEL;
    float *wide = seconds + CHUNK_ROWS * PANEL;
#ifndef IS_WIDENED
    if (job->rows == 1) {
        N(one_row_item)(job, item * job->wide, (item + 1) * job->wide, sums, seconds);
        return;
    }
#endif
    for (int at = first; at < job->outputs && at < first + WIDE; at += PANEL) {
        for (int which = 0; which < (job->second ? 2 : 1); which++) {
            const W *panel = (const W *)(which ? job->second : job->weight) + (long)at * job->inner;
            float *into = which ? seconds : sums;
            if (rows <= ROWS) N(few_rows)(job, row, rows, panel, into);
            else N(many_rows)(job, row, rows, panel, into, wide);
        }
        N(finish_panel)(job, row, rows, at, sums, job->second ? seconds : sums);
    }
}

static void N(linear)(Engine *engine, N(Linear) job) {
    job.engine = engine;
    job.chunks = (job.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
#ifdef IS_WIDENED
    job.wide = WIDE;
#else
    job.wide = job.rows == 1 && !job.second ? 2 * WIDE : WIDE;
#endif
    pool_run(engine->pool, N(linear_item), &job, (job.outputs + job.wide - 1) / job.wide * job.chunks);
}

/* ---- rows: norms, rotation, writing pages ---- */

typedef struct {
    const Engine *engine;
    const Layer *layer;
    const LayerPages *pages;
    const Batch *batch;
    const W *hidden, *norm;
    int rows; /* of an item */
} N(Rows);

static void N(norm_item)(void *context, int item, int thread) {
    (void)thread;
    const N(Rows) *job = context;
    int size = job->engine->shape.hidden, stop = (item + 1) * job->rows;
    for (int row = item * job->rows; row < stop && row < job->batch->rows; row++)
        N(norm)(job->hidden + (long)row * size, 1, job->norm, size, job->engine->shape.norm_eps,
                (A *)job->engine->normed + (long)row * size);
}

/* Halves a, b of a head become (a cos - b sin, b cos + a sin), products rounded as in the reference. */
static void N(rotate)(A *head, const W *cosines, const W *sines, int half) {
    for (int i = 0; i < half; i += LANES) {
        int n = half - i < LANES ? half - i : LANES;
        f32v a = LOAD_A(head + i, n), b = LOAD_A(head + half + i, n);
        f32v c = LOAD_W(cosines + i, n), s = LOAD_W(sines + i, n);
        STORE_A(head + i, ROUND_A(a * c) - ROUND_A(b * s), n);
        STORE_A(head + half + i, ROUND_A(b * c) + ROUND_A(a * s), n);
    }
}

static void N(rotate_item)(void *context, int item, int thread) {
    (void)thread;
    const N(Rows) *job = context;
    const Shape *shape = &job->engine->shape;
    int dim = shape->head_dim, both = shape->heads + shape->kv_heads, stop = (item + 1) * job->rows;
    for (int row = item * job->rows; row < stop && row < job->batch->rows; row++) {
        long position = job->batch->positions[row];
        A *heads = (A *)job->engine->qkv + (long)row * (both + shape->kv_heads) * dim;
        for (int head = 0; head < both; head++) {
            A *x = heads + head * dim;
            const W *weight = head < shape->heads ? job->layer->q_norm : job->layer->k_norm;
            if (weight) N(norm)(x, 0, weight, dim, shape->norm_eps, x);
            N(rotate)(x, (const W *)job->batch->cosines + position * dim,
                      (const W *)job->batch->sines + position * (dim / 2), dim / 2);
        }
    }
}

/* Whether the pages can keep these numbers: no NaN, nothing infinite in their format. */
static int N(fit)(const A *x, int count, int format) {
    float top = format == KV_F16 ? 65504.0f : 3.3895314e38f; /* the largest bfloat16 */
    int fit = 1;
    for (int i = 0; i < count; i++) fit &= fabsf(NUMBER_A(x[i])) <= top;
    return fit;
}

/* Put a head's vector into slot `slot` of a pool, in the pool's format. */
static void N(write)(const A *x, int dim, int format, void *pool, float *scales, long slot) {
    float largest = 0, top = format == KV_INT8 ? 127.0f : 448.0f;
    if (scales) {
        for (int i = 0; i < dim; i++) {
            float size = fabsf(NUMBER_A(x[i]));
            largest = size > largest || size != size ? size : largest;
        }
        scales[slot] = largest / top;
    }
    float scale = scales && scales[slot] > 0 ? scales[slot] : 1.0f;
    for (int i = 0; i < dim; i++) put_number(format, pool, slot * dim + i, NUMBER_A(x[i]) / scale);
}

static void N(write_item)(void *context, int item, int thread) {
    (void)thread;
    const N(Rows) *job = context;
    const Shape *shape = &job->engine->shape;
    const Batch *batch = job->batch;
    const LayerPages *pages = job->pages;
    int dim = shape->head_dim, heads = shape->kv_heads, format = shape->kv_format, stop = (item + 1) * job->rows;
    for (int i = item * job->rows; i < stop && i < batch->writes; i++) {
        const A *row = (const A *)job->engine->qkv + batch->write_rows[i] * (shape->heads + 2 * heads) * dim;
        const A *keys = row + shape->heads * dim, *values = keys + heads * dim;
        if (!N(fit)(keys, 2 * heads * dim, format)) batch->finite[batch->write_rows[i]] = 0;
        for (int head = 0; head < heads; head++) {
            long slot = (batch->write_pages[i] * heads + head) * batch->page_size + batch->write_offsets[i];
            N(write)(keys + head * dim, dim, format, pages->keys, pages->key_scales, slot);
            N(write)(values + head * dim, dim, format, pages->values, pages->value_scales, slot);
        }
    }
}

static void N(each_row)(Engine *engine, Run run, N(Rows) *job, int rows) {
    job->rows = rows < 2 * ROWS_MAX ? rows : ROWS_MAX; /* a few rows are not worth other threads */
    pool_run(engine->pool, run, job, rows ? (rows + job->rows - 1) / job->rows : 0);
}

/* ---- halves of a layer ---- */

void N(attention_half)(Engine *engine, const Layer *layer, const LayerPages *pages, const Batch *batch,
                       const void *hidden, void *out, int add) {
    const Shape *shape = &engine->shape;
    int dim = shape->head_dim;
    N(Rows) rows = {.engine = engine, .layer = layer, .pages = pages, .batch = batch, .hidden = hidden,
                    .norm = layer->attention_norm};
    N(each_row)(engine, N(norm_item), &rows, batch->rows);
    N(linear)(engine, (N(Linear)){.x = engine->normed, .weight = layer->qkv, .bias = layer->qkv_bias,
                                  .out = engine->qkv, .rows = batch->rows, .inner = shape->hidden,
                                  .outputs = (shape->heads + 2 * shape->kv_heads) * dim});
    N(each_row)(engine, N(rotate_item), &rows, batch->rows);
    N(each_row)(engine, N(write_item), &rows, batch->writes);
    ATTENTION(engine, pages, batch);
    N(linear)(engine, (N(Linear)){.x = engine->attended, .weight = layer->o, .bias = layer->o_bias,
                                  .residual = add ? hidden : NULL, .hidden = out, .rows = batch->rows,
                                  .inner = shape->heads * dim, .outputs = shape->hidden});
}

void N(mlp_half)(Engine *engine, const Layer *layer, const Batch *batch, const void *hidden, void *out, int add) {
    const Shape *shape = &engine->shape;
    N(Rows) rows = {.engine = engine, .layer = layer, .batch = batch, .hidden = hidden, .norm = layer->mlp_norm};
    N(each_row)(engine, N(norm_item), &rows, batch->rows);
    N(linear)(engine, (N(Linear)){.x = engine->normed, .weight = layer->gate, .second = layer->up,
                                  .bias = layer->gate_bias, .second_bias = layer->up_bias, .out = engine->inner,
                                  .rows = batch->rows, .inner = shape->hidden, .outputs = shape->intermediate});
    N(linear)(engine, (N(Linear)){.x = engine->inner, .weight = layer->down, .bias = layer->down_bias,
                                  .residual = add ? hidden : NULL, .hidden = out, .rows = batch->rows,
                                  .inner = shape->intermediate, .outputs = shape->hidden});
}

/* Logits of `rows` rows of hidden states, float32. */
void N(head)(Engine *engine, const void *norm, const void *weight, const void *hidden, int rows, int outputs,
             float *out) {
    int size = engine->shape.hidden;
    for (int row = 0; row < rows; row++)
        N(norm)((const W *)hidden + (long)row * size, 1, norm, size, engine->shape.norm_eps,
                (A *)engine->normed + (long)row * size);
    N(linear)(engine, (N(Linear)){.x = engine->normed, .weight = weight, .logits = out, .rows = rows,
                                  .inner = size, .outputs = outputs});
}
