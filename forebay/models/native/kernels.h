/* The arithmetic of one decoder layer for one dtype; included once for each, with

      T        a number of weights and activations        U, UV   a unit of the inner dimension, and 16 of them: one float32,
      PER      numbers in a unit                                  or two bfloat16 that one instruction multiplies and adds
      N(name)  the name for this dtype

   Everything is products of a few rows with 16 columns a register (`tile`): of the inputs with packed weights, of keys with packed
   queries, of values with packed probabilities. Each sum runs over its inner dimension in one fixed order, whatever other rows, chunks
   or threads there are: a row's result depends on nothing but the row and what it attends to. */

#ifdef IS_BF16
#define LOAD load_bf16
#define STORE store_bf16
#ifdef __AVX512BF16__
INLINE f32x16 N(mac)(f32x16 sum, U a, UV b) { return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b); }
#else
INLINE f32x16 N(mac)(f32x16 sum, U a, UV b) {
    u32x16 wide = a - (u32x16){};
    sum += (f32x16)(wide << 16) * (f32x16)(b << 16);
    return sum + (f32x16)(wide & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
}
#endif
#else
#define LOAD load_f32
#define STORE store_f32
INLINE f32x16 N(mac)(f32x16 sum, U a, UV b) { return sum + splat(a) * b; }
#endif

/* sums[m][j] = sum over k of a[m * row + k * step] * (16 of b from j * apart + k * across): rows x cols registers. */
INLINE void N(tile)(const U *a, long row, long step, const U *b, long apart, long across, long depth, int rows, int cols, f32x16 sums[ROWS][COLS]) {
    f32x16 s[ROWS][COLS];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
        for (int j = 0; j < cols; j++) s[m][j] = (f32x16){};
    for (long k = 0; k < depth; k++) {
        UV column[COLS];
#pragma GCC unroll 3
        for (int j = 0; j < cols; j++) memcpy(&column[j], b + j * apart + k * across, sizeof(UV));
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
            for (int j = 0; j < cols; j++) s[m][j] = N(mac)(s[m][j], a[m * row + k * step], column[j]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
        for (int j = 0; j < cols; j++) sums[m][j] = s[m][j];
}

/* The same with rows and cols that are known only now. */
static void N(product)(const U *a, long row, long step, const U *b, long apart, long across, long depth, int rows, int cols, f32x16 sums[ROWS][COLS]) {
#define CASE(r, c) \
    case (r) * 4 + (c): N(tile)(a, row, step, b, apart, across, depth, r, c, sums); break;
#define CASES(r) CASE(r, 1) CASE(r, 2) CASE(r, 3)
    switch (rows * 4 + cols) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) CASES(7) CASES(8) }
#undef CASES
#undef CASE
}

/* out = x / rms(x) * weight; the mean in float32, rounded before the weight as in the reference. */
static void N(norm)(const T *x, const T *weight, int size, float eps, T *out) {
    f32x16 squares = {};
    for (int i = 0; i < size; i += LANES) {
        f32x16 v = LOAD(x + i, size - i < LANES ? size - i : LANES);
        squares += v * v;
    }
    float scale = 1.0f / sqrtf(sum16(squares) / (float)size + eps);
    for (int i = 0; i < size; i += LANES) {
        int n = size - i < LANES ? size - i : LANES;
        T rounded[LANES];
        STORE(rounded, LOAD(x + i, n) * scale, LANES);
        STORE(out + i, LOAD(rounded, LANES) * LOAD(weight + i, n), n);
    }
}

/* ---- products with weights ---- */

typedef struct {
    const T *x; /* (rows, inner) */
    const U *weight, *second; /* second: `up` beside `gate`, or NULL */
    const T *bias, *second_bias, *residual; /* each may be NULL */
    void *out; /* (rows, outputs), of T; of float if `is_float` */
    int rows, inner, outputs, chunks, is_float;
} N(Linear);

INLINE f32x16 N(biased)(f32x16 x, const T *bias, int n) { return bias ? x + LOAD(bias, n) : x; }

/* One register of outputs: n of them, from column `at` of row `m`. */
INLINE void N(finish)(const N(Linear) *job, int m, int at, int n, f32x16 x, f32x16 y) {
    long place = (long)m * job->outputs + at;
    x = N(biased)(x, job->bias ? job->bias + at : NULL, n);
    if (job->second) {
        T gate[LANES];
        STORE(gate, silu16(x), LANES);
        x = LOAD(gate, LANES) * N(biased)(y, job->second_bias ? job->second_bias + at : NULL, n);
    }
    if (job->residual) x += LOAD(job->residual + place, n);
    if (job->is_float) store_f32((float *)job->out + place, x, n);
    else STORE((T *)job->out + place, x, n);
}

/* 48 outputs of up to CHUNK_ROWS rows. */
static void N(linear_item)(void *context, int item, int thread) {
    (void)thread;
    const N(Linear) *job = context;
    int first = item / job->chunks * (COLS * LANES), row = item % job->chunks * CHUNK_ROWS;
    int stop = row + CHUNK_ROWS < job->rows ? row + CHUNK_ROWS : job->rows;
    int left = job->outputs - first, cols = left > COLS * LANES ? COLS : (left + LANES - 1) / LANES;
    long depth = job->inner / PER, apart = depth * LANES;
    for (int m = row; m < stop; m += ROWS) {
        int rows = stop - m < ROWS ? stop - m : ROWS;
        f32x16 sums[ROWS][COLS], seconds[ROWS][COLS];
        const U *x = (const U *)(job->x + (long)m * job->inner);
        N(product)(x, depth, 1, job->weight + (long)first / LANES * apart, apart, LANES, depth, rows, cols, sums);
        if (job->second) N(product)(x, depth, 1, job->second + (long)first / LANES * apart, apart, LANES, depth, rows, cols, seconds);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < cols; j++) {
                int at = first + j * LANES, n = job->outputs - at < LANES ? job->outputs - at : LANES;
                N(finish)(job, m + i, at, n, sums[i][j], job->second ? seconds[i][j] : sums[i][j]);
            }
    }
}

static void N(linear)(Engine *engine, N(Linear) job) {
    job.chunks = (job.rows + CHUNK_ROWS - 1) / CHUNK_ROWS;
    int panels = (job.outputs + COLS * LANES - 1) / (COLS * LANES);
    pool_run(engine->pool, N(linear_item), &job, panels * job.chunks);
}

/* ---- rows: norms, rotation, writing pages ---- */

typedef struct {
    const Engine *engine;
    const Layer *layer;
    const LayerPages *pages;
    const Batch *batch;
    const T *hidden;
    int rows; /* of an item */
} N(Rows);

static void N(norm_item)(void *context, int item, int thread) {
    (void)thread;
    const N(Rows) *job = context;
    int size = job->engine->shape.hidden, stop = (item + 1) * job->rows;
    for (int row = item * job->rows; row < stop && row < job->batch->rows; row++)
        N(norm)(job->hidden + (long)row * size, job->layer->attention_norm, size, job->engine->shape.norm_eps, (T *)job->engine->normed + (long)row * size);
}

/* Halves a, b of a head become (a cos - b sin, b cos + a sin), each product rounded as in the reference. */
static void N(rotate)(T *head, const T *cosines, const T *sines, int half) {
    for (int i = 0; i < half; i += LANES) {
        int n = half - i < LANES ? half - i : LANES;
        f32x16 a = LOAD(head + i, n), b = LOAD(head + half + i, n), c = LOAD(cosines + i, n), s = LOAD(sines + i, n);
        T products[4][LANES];
        STORE(products[0], a * c, LANES);
        STORE(products[1], b * s, LANES);
        STORE(products[2], b * c, LANES);
        STORE(products[3], a * s, LANES);
        STORE(head + i, LOAD(products[0], LANES) - LOAD(products[1], LANES), n);
        STORE(head + half + i, LOAD(products[2], LANES) + LOAD(products[3], LANES), n);
    }
}

static void N(rotate_item)(void *context, int item, int thread) {
    (void)thread;
    const N(Rows) *job = context;
    const Shape *shape = &job->engine->shape;
    int dim = shape->head_dim, both = shape->heads + shape->kv_heads, stop = (item + 1) * job->rows;
    for (int row = item * job->rows; row < stop && row < job->batch->rows; row++) {
        long position = job->batch->positions[row];
        T *heads = (T *)job->engine->qkv + (long)row * (both + shape->kv_heads) * dim;
        for (int head = 0; head < both; head++) {
            T *x = heads + head * dim;
            const T *weight = head < shape->heads ? job->layer->q_norm : job->layer->k_norm;
            if (weight) N(norm)(x, weight, dim, shape->norm_eps, x);
            N(rotate)(x, (const T *)job->batch->cosines + position * dim, (const T *)job->batch->sines + position * (dim / 2), dim / 2);
        }
    }
}

/* Put a head's vector into slot `slot` of a pool, in the pool's format (models/kv_format.py). */
static void N(write)(const T *x, int dim, int format, void *pool, float *scales, long slot) {
    float largest = 0, top = format == KV_INT8 ? 127.0f : 448.0f;
    if (scales) {
        for (int i = 0; i < dim; i++) {
            float size = fabsf(N(number)(x[i]));
            largest = size > largest || size != size ? size : largest;
        }
        scales[slot] = largest / top;
    }
    float scale = scales && scales[slot] > 0 ? scales[slot] : 1.0f;
    for (int i = 0; i < dim; i++) put_number(format, pool, slot * dim + i, N(number)(x[i]) / scale);
}

static void N(write_item)(void *context, int item, int thread) {
    (void)thread;
    const N(Rows) *job = context;
    const Shape *shape = &job->engine->shape;
    const Batch *batch = job->batch;
    int dim = shape->head_dim, stop = (item + 1) * job->rows;
    for (int i = item * job->rows; i < stop && i < batch->writes; i++) {
        const T *row = (const T *)job->engine->qkv + batch->write_rows[i] * (shape->heads + 2 * shape->kv_heads) * dim;
        for (int head = 0; head < shape->kv_heads; head++) {
            long slot = (batch->write_pages[i] * shape->kv_heads + head) * batch->page_size + batch->write_offsets[i];
            N(write)(row + (shape->heads + head) * dim, dim, shape->kv_format, job->pages->keys, job->pages->key_scales, slot);
            N(write)(row + (shape->heads + shape->kv_heads + head) * dim, dim, shape->kv_format, job->pages->values, job->pages->value_scales, slot);
        }
    }
}

/* ---- attention ---- */

/* What one thread works in. Queries are columns: 16 of a register are rows x query heads that share a key/value head. */
typedef struct {
    U *queries;       /* [COLS][head_dim / PER][16] */
    U *probabilities; /* [COLS][KEYS / PER][16] */
    float *scores;    /* [KEYS][COLS][16] */
    float *sums;      /* [head_dim][COLS][16]: of values, weighted */
    T *keys, *values; /* [KEYS][head_dim], for formats other than T's own */
    U *pairs;         /* [KEYS / PER][head_dim]: values of PER keys side by side */
    U *turned;        /* [head_dim / PER][KEYS]: keys, transposed */
    f32x16 highest[COLS], totals[COLS];
    i32x16 positions[COLS];
    float few_highest[FEW], few_totals[FEW];
} N(Scratch);

static N(Scratch) N(scratch)(char *memory, int dim) {
    N(Scratch) s;
    size_t lanes = COLS * LANES;
    s.queries = (U *)memory;
    s.probabilities = s.queries + lanes * dim;
    s.scores = (float *)(s.probabilities + lanes * KEYS);
    s.sums = s.scores + lanes * KEYS;
    s.keys = (T *)(s.sums + lanes * dim);
    s.values = s.keys + KEYS * dim;
    s.pairs = (U *)(s.values + KEYS * dim);
    s.turned = s.pairs + KEYS / PER * dim;
    return s;
}

/* Keys [from, from + count) of a page's head: where they lie, or in `copy` after decoding. */
INLINE const T *N(rows_of)(const void *pool, const float *scales, int format, long slot, int count, int dim, T *copy) {
    if (format == OWN_FORMAT) return (const T *)pool + slot * dim;
    for (int k = 0; k < count; k++) {
        float scale = scales ? scales[slot + k] : 1.0f;
        for (int i = 0; i < dim; i += LANES) {
            int n = dim - i < LANES ? dim - i : LANES;
            STORE(copy + k * dim + i, get_numbers(format, pool, (slot + k) * dim + i, n) * scale, n);
        }
    }
    return copy;
}

/* Values of PER keys side by side, so that one unit meets one unit of probabilities. A missing last key is 0. */
INLINE const U *N(pair_up)(const T *values, int count, int dim, U *pairs) {
#ifdef IS_BF16
    for (int k = 0; k < count; k += 2)
        for (int i = 0; i < dim; i += LANES) {
            int n = dim - i < LANES ? dim - i : LANES;
            u32x16 first = load_bits(values + k * dim + i, n), second = {};
            if (k + 1 < count) second = load_bits(values + (k + 1) * dim + i, n);
            first |= second << 16;
            store_f32((float *)(pairs + k / 2 * dim + i), (f32x16)first, n);
        }
    return pairs;
#else
    (void)count, (void)dim, (void)pairs;
    return values;
#endif
}

/* Scores -> probabilities up to the common factor, and what they do to the running sums (online softmax, arXiv 2205.14135). */
INLINE void N(soften)(N(Scratch) *s, int count, int cols, long first_key, int is_masked, float scale, f32x16 keep[COLS]) {
    int padded = (count + LANES - 1) / LANES * LANES;
    for (int j = 0; j < cols; j++) {
        f32x16 highest = s->highest[j];
        for (int k = 0; k < count; k++) {
            f32x16 *score = (f32x16 *)(s->scores + (k * COLS + j) * LANES);
            f32x16 x = *score * scale;
            if (is_masked) x = select16(s->positions[j] >= (int)(first_key + k), x, splat(-INFINITY));
            *score = x;
            highest = max16(x, highest);
        }
        keep[j] = exp16(s->highest[j] - highest);
        f32x16 parts[LANES] = {};
        for (int k = 0; k < padded; k += LANES)
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                f32x16 *score = (f32x16 *)(s->scores + ((k + i) * COLS + j) * LANES);
                *score = k + i < count ? exp16(*score - highest) : (f32x16){};
                parts[i] += *score;
            }
        for (int k = 0; k < padded; k += PER) {
            const f32x16 *p = (const f32x16 *)(s->scores + (k * COLS + j) * LANES);
            U *unit = s->probabilities + ((long)j * KEYS / PER + k / PER) * LANES;
#ifdef IS_BF16
            u32x16 both = lengthen(narrow(p[0])) | lengthen(narrow(p[COLS])) << 16;
            memcpy(unit, &both, sizeof both);
#else
            memcpy(unit, p, sizeof *p);
#endif
        }
#pragma GCC unroll 4
        for (int half = LANES / 2; half; half /= 2)
            for (int i = 0; i < half; i++) parts[i] += parts[i + half];
        s->highest[j] = highest;
        s->totals[j] = s->totals[j] * keep[j] + parts[0];
    }
}

/* Score `count` keys of one page and add their values. */
static void N(attend_keys)(N(Scratch) *s, const T *keys, const U *values, int count, int cols, int dim, long first_key, int is_masked, float scale) {
    f32x16 found[ROWS][COLS], keep[COLS];
    long depth = dim / PER;
    for (int k = 0; k < count; k += ROWS) {
        int rows = count - k < ROWS ? count - k : ROWS;
        N(product)((const U *)(keys + k * dim), depth, 1, s->queries, depth * LANES, LANES, depth, rows, cols, found);
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < cols; j++) memcpy(s->scores + ((k + m) * COLS + j) * LANES, &found[m][j], sizeof(f32x16));
    }
    N(soften)(s, count, cols, first_key, is_masked, scale, keep);
    for (int i = 0; i < dim; i += ROWS) {
        int rows = dim - i < ROWS ? dim - i : ROWS;
        N(product)(values + i, 1, dim, s->probabilities, (long)KEYS / PER * LANES, LANES, (count + PER - 1) / PER, rows, cols, found);
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < cols; j++) {
                f32x16 *sum = (f32x16 *)(s->sums + ((i + m) * COLS + j) * LANES);
                *sum = *sum * keep[j] + found[m][j];
            }
    }
}

/* ---- the same for one row: keys, then numbers of a head, are the columns, since a few queries would leave most lanes idle ---- */

/* Missing keys become 0. */
static void N(turn)(const U *keys, int count, long depth, U *turned) {
    for (int key = 0; key < count; key += LANES)
        for (long k = 0; k < depth; k += LANES) {
            u32x16 block[LANES] = {};
            long wide = depth - k < LANES ? depth - k : LANES, high = count - key < LANES ? count - key : LANES;
            if (wide == LANES && high == LANES)
                for (int i = 0; i < LANES; i++) memcpy(&block[i], keys + (key + i) * depth + k, sizeof block[i]);
            else
                for (int i = 0; i < high; i++) memcpy(&block[i], keys + (key + i) * depth + k, (size_t)wide * sizeof(U));
            transpose16(block);
            for (int i = 0; i < wide; i++) memcpy(turned + (k + i) * KEYS + key, &block[i], sizeof block[i]);
        }
}

/* As `soften`, bit for bit, with the keys of one query side by side. */
static void N(soften_few)(N(Scratch) *s, int count, int queries, float scale, float keep[FEW]) {
    int padded = (count + LANES - 1) / LANES * LANES;
    i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int q = 0; q < queries; q++) {
        f32x16 largest = splat(s->few_highest[q]);
        for (int k = 0; k < padded; k += LANES) {
            f32x16 *score = (f32x16 *)(s->scores + q * KEYS + k);
            *score = select16(lane < count - k, *score * scale, splat(-INFINITY));
            largest = max16(*score, largest);
        }
        float highest = highest16(largest);
        keep[q] = exp16(splat(s->few_highest[q]) - highest)[0];
        f32x16 parts = {};
        for (int k = 0; k < padded; k += LANES) {
            f32x16 p = exp16(*(f32x16 *)(s->scores + q * KEYS + k) - highest);
            STORE((T *)s->probabilities + q * KEYS + k, p, LANES);
            parts += p;
        }
        s->few_totals[q] = s->few_totals[q] * keep[q] + sum16(parts);
        s->few_highest[q] = highest;
    }
}

static void N(attend_keys_few)(N(Scratch) *s, const T *query, const T *keys, const U *values, int count, int queries, int dim, float scale) {
    f32x16 found[ROWS][COLS];
    float keep[FEW];
    long depth = dim / PER;
    N(turn)((const U *)keys, count, depth, s->turned);
    for (int k = 0; k < count; k += 2 * LANES) {
        int cols = count - k > LANES ? 2 : 1;
        N(product)((const U *)query, depth, 1, s->turned + k, LANES, KEYS, depth, queries, cols, found);
        for (int q = 0; q < queries; q++)
            for (int j = 0; j < cols; j++) memcpy(s->scores + q * KEYS + k + j * LANES, &found[q][j], sizeof(f32x16));
    }
    N(soften_few)(s, count, queries, scale, keep);
    for (int i = 0; i < dim; i += 2 * LANES) {
        int cols = dim - i > LANES ? 2 : 1;
        N(product)(s->probabilities, KEYS / PER, 1, values + i, LANES, dim, (count + PER - 1) / PER, queries, cols, found);
        for (int q = 0; q < queries; q++)
            for (int j = 0; j < cols; j++) {
                f32x16 *sum = (f32x16 *)(s->sums + q * dim + i + j * LANES);
                *sum = *sum * keep[q] + found[q][j];
            }
    }
}

typedef struct {
    const Engine *engine;
    const LayerPages *pages;
    const Batch *batch;
    int block_rows; /* query rows of an item */
} N(Attention);

/* Where an item's queries are: `rows` rows from row `first` of a span, heads of one key/value head. */
typedef struct {
    const Span *span;
    int head, first, rows, groups;
    const T *queries;
    long width; /* from row to row */
} N(Place);

/* The last rows, which see most, come first. */
static N(Place) N(place)(const N(Attention) *job, int item) {
    const Shape *shape = &job->engine->shape;
    const Span *span = job->batch->spans + job->batch->span_count - 1;
    while (item < span->items_before) span--;
    int within = item - span->items_before, blocks = (span->rows + job->block_rows - 1) / job->block_rows;
    N(Place) at = {.span = span, .head = within % shape->kv_heads, .groups = shape->heads / shape->kv_heads};
    at.first = (blocks - 1 - within / shape->kv_heads) * job->block_rows;
    at.rows = span->rows - at.first < job->block_rows ? span->rows - at.first : job->block_rows;
    at.width = (shape->heads + 2L * shape->kv_heads) * shape->head_dim;
    at.queries = (const T *)job->engine->qkv + (span->row_start + at.first) * at.width + at.head * at.groups * shape->head_dim;
    return at;
}

/* Queries into columns; nothing seen yet. */
static void N(begin)(N(Scratch) *s, const N(Place) *at, int cols, int dim) {
    long depth = dim / PER;
    memset(s->queries, 0, sizeof(U) * cols * LANES * depth);
    for (int q = 0; q < FEW; q++) s->few_highest[q] = -1e30f, s->few_totals[q] = 0;
    for (int j = 0; j < cols; j++) {
        s->highest[j] = splat(-1e30f);
        s->totals[j] = (f32x16){};
        for (int lane = 0; lane < LANES; lane++) {
            int column = j * LANES + lane, row = column / at->groups;
            s->positions[j][lane] = at->span->context + at->first + (row < at->rows ? row : 0);
            if (row >= at->rows) continue;
            const U *own = (const U *)(at->queries + row * at->width + column % at->groups * dim);
            for (long k = 0; k < depth; k++) s->queries[(j * depth + k) * LANES + lane] = own[k];
        }
    }
}

/* What was seen, divided by its total, to where the next product reads it. */
static void N(end)(const N(Scratch) *s, const N(Attention) *job, const N(Place) *at, int is_few) {
    int dim = job->engine->shape.head_dim, heads = job->engine->shape.heads;
    for (int column = 0; column < at->rows * at->groups; column++) {
        int row = at->span->row_start + at->first + column / at->groups, j = column / LANES, lane = column % LANES;
        T *to = (T *)job->engine->attended + ((long)row * heads + at->head * at->groups + column % at->groups) * dim;
        const float *sums = is_few ? s->sums + column * dim : s->sums + j * LANES + lane;
        float total = is_few ? s->few_totals[column] : s->totals[j][lane];
        for (long i = 0; i < dim; i++) N(set)(to + i, sums[is_few ? i : i * COLS * LANES] / total);
    }
}

/* Up to KEYS keys of one head, within one page. */
typedef struct {
    long key, slot; /* the first: its position, and where it lies in the pool */
    int count;
} N(Block);

static N(Block) N(block)(const N(Attention) *job, const N(Place) *at, long key, long last) {
    const Batch *batch = job->batch;
    long within = key % batch->page_size, page = batch->tables[at->span->table_start + key / batch->page_size];
    long count = batch->page_size - within < KEYS ? batch->page_size - within : KEYS;
    long slot = (page * job->engine->shape.kv_heads + at->head) * batch->page_size + within;
    return (N(Block)){key, slot, (int)(last + 1 - key < count ? last + 1 - key : count)};
}

/* Ask for what comes next while this is computed: pages are scattered, so no hardware guesses it. */
static void N(fetch_ahead)(const N(Attention) *job, const N(Block) *block) {
    long bytes = job->engine->shape.head_dim * format_bytes(job->engine->shape.kv_format);
    for (long at = block->slot * bytes; at < (block->slot + block->count) * bytes; at += 64) {
        __builtin_prefetch((const char *)job->pages->keys + at);
        __builtin_prefetch((const char *)job->pages->values + at);
    }
}

static void N(attention_item)(void *context, int item, int thread) {
    const N(Attention) *job = context;
    const Shape *shape = &job->engine->shape;
    const LayerPages *pages = job->pages;
    N(Place) at = N(place)(job, item);
    int dim = shape->head_dim, columns = at.rows * at.groups, cols = (columns + LANES - 1) / LANES;
    int is_few = at.rows == 1 && at.groups <= FEW && dim % LANES == 0;
    float scale = job->engine->score_scale;
    N(Scratch) s = N(scratch)(job->engine->scratch + (size_t)thread * job->engine->scratch_stride, dim);
    N(begin)(&s, &at, cols, dim);
    memset(s.sums, 0, sizeof(float) * COLS * LANES * dim);
    long first_sees = at.span->context + at.first, last_sees = first_sees + at.rows - 1; /* the last keys of the first and the last row */
    N(Block) next = N(block)(job, &at, 0, last_sees);
    while (next.count > 0) {
        N(Block) block = next;
        long after = block.key + block.count;
        next.count = 0;
        if (after <= last_sees) {
            next = N(block)(job, &at, after, last_sees);
            if (is_few) N(fetch_ahead)(job, &next);
        }
        const T *keys = N(rows_of)(pages->keys, pages->key_scales, shape->kv_format, block.slot, block.count, dim, s.keys);
        const T *values = N(rows_of)(pages->values, pages->value_scales, shape->kv_format, block.slot, block.count, dim, s.values);
        const U *pairs = N(pair_up)(values, block.count, dim, s.pairs);
        if (is_few) N(attend_keys_few)(&s, at.queries, keys, pairs, block.count, columns, dim, scale);
        else N(attend_keys)(&s, keys, pairs, block.count, cols, dim, block.key, after - 1 > first_sees, scale);
    }
    N(end)(&s, job, &at, is_few);
}

/* ---- halves of a layer ---- */

static void N(each_row)(Engine *engine, Run run, N(Rows) *job, int rows) {
    job->rows = rows < 2 * ROWS ? rows : ROWS; /* a few rows are not worth other threads */
    pool_run(engine->pool, run, job, rows ? (rows + job->rows - 1) / job->rows : 0);
}

static void N(norm_rows)(Engine *engine, const Layer *layer, const Batch *batch, const T *hidden, const void *weight) {
    Layer as = *layer;
    as.attention_norm = weight;
    N(Rows) job = {.engine = engine, .layer = &as, .batch = batch, .hidden = hidden};
    N(each_row)(engine, N(norm_item), &job, batch->rows);
}

static void N(attention_half)(Engine *engine, const Layer *layer, const LayerPages *pages, const Batch *batch, const T *hidden, T *out, int add) {
    const Shape *shape = &engine->shape;
    int groups = shape->heads / shape->kv_heads, dim = shape->head_dim;
    N(norm_rows)(engine, layer, batch, hidden, layer->attention_norm);
    N(linear)(engine, (N(Linear)){.x = engine->normed, .weight = layer->qkv, .bias = layer->qkv_bias, .out = engine->qkv, .rows = batch->rows,
                                  .inner = shape->hidden, .outputs = (shape->heads + 2 * shape->kv_heads) * dim});
    N(Rows) rows = {.engine = engine, .layer = layer, .pages = pages, .batch = batch};
    N(each_row)(engine, N(rotate_item), &rows, batch->rows);
    N(each_row)(engine, N(write_item), &rows, batch->writes);
    N(Attention) attention = {engine, pages, batch, COLS * LANES / groups};
    int items = 0;
    for (int i = 0; i < batch->span_count; i++) {
        batch->spans[i].items_before = items;
        items += (batch->spans[i].rows + attention.block_rows - 1) / attention.block_rows * shape->kv_heads;
    }
    pool_run(engine->pool, N(attention_item), &attention, items);
    N(linear)(engine, (N(Linear)){.x = engine->attended, .weight = layer->o, .bias = layer->o_bias, .residual = add ? hidden : NULL, .out = out,
                                  .rows = batch->rows, .inner = shape->heads * dim, .outputs = shape->hidden});
}

static void N(mlp_half)(Engine *engine, const Layer *layer, const Batch *batch, const T *hidden, T *out, int add) {
    const Shape *shape = &engine->shape;
    N(norm_rows)(engine, layer, batch, hidden, layer->mlp_norm);
    N(linear)(engine, (N(Linear)){.x = engine->normed, .weight = layer->gate, .second = layer->up, .bias = layer->gate_bias, .second_bias = layer->up_bias,
                                  .out = engine->inner, .rows = batch->rows, .inner = shape->hidden, .outputs = shape->intermediate});
    N(linear)(engine, (N(Linear)){.x = engine->inner, .weight = layer->down, .bias = layer->down_bias, .residual = add ? hidden : NULL, .out = out,
                                  .rows = batch->rows, .inner = shape->intermediate, .outputs = shape->hidden});
}

/* Logits of `rows` rows of hidden states, float32. */
static void N(head)(Engine *engine, const T *norm, const U *weight, const T *hidden, int rows, int outputs, float *out) {
    int size = engine->shape.hidden;
    for (int row = 0; row < rows; row++) N(norm)(hidden + (long)row * size, norm, size, engine->shape.norm_eps, (T *)engine->normed + (long)row * size);
    N(linear)(engine, (N(Linear)){.x = engine->normed, .weight = weight, .out = out, .rows = rows, .inner = size, .outputs = outputs, .is_float = 1});
}

#undef LOAD
#undef STORE
#undef T
#undef U
#undef UV
#undef PER
#undef OWN_FORMAT
#undef N
