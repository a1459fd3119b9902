/* Attention over pages. Included once for each type of activations (A, U, PER: see native/layer.h).

   Everything is products of a few rows with the columns of a few registers: of keys with queries,
   of values with probabilities. Each sum runs over its inner dimension in one fixed order, whatever
   other rows, chunks or threads there are: a row's result depends on nothing but the row and what it
   attends to. */

/* What one thread works in. Queries are columns: WIDE of rows x query heads that share a key/value
   head, PANEL at a time. */
typedef struct {
    U *queries;       /* [TILES][head_dim / PER][PANEL] */
    U *probabilities; /* [TILES][KEYS / PER][PANEL], or (few) [queries][KEYS] of A */
    float *scores;    /* [KEYS][WIDE], or (few) [queries][KEYS] */
    float *sums;      /* [head_dim][WIDE], or (few) [queries][head_dim]: of values, weighted */
    A *keys, *values; /* [KEYS][head_dim], for formats other than A's own */
    U *pairs;         /* [KEYS / PER][head_dim]: values of PER keys side by side */
    U *turned;        /* [head_dim / PER][KEYS]: keys, transposed */
    f32v highest[REGISTERS], totals[REGISTERS];
    i32v positions[REGISTERS];
    float few_highest[FEW], few_totals[FEW];
} N(Scratch);

static void N(scratch)(N(Scratch) *s, char *memory, int dim) {
    s->queries = (U *)memory;
    s->probabilities = s->queries + WIDE * dim;
    s->scores = (float *)(s->probabilities + WIDE * KEYS);
    s->sums = s->scores + WIDE * KEYS;
    s->keys = (A *)(s->sums + WIDE * dim);
    s->values = s->keys + KEYS * dim;
    s->pairs = (U *)(s->values + KEYS * dim);
    s->turned = s->pairs + KEYS / PER * dim;
}

/* Numbers of `count` keys of a page's head: where they lie, or in `copy` after decoding. */
static const A *N(rows_of)(const void *pool, const float *scales, int format, long slot, int count, int dim,
                           A *copy) {
    if (format == OWN_FORMAT) return (const A *)pool + slot * dim;
    if (format == KV_BF16 && dim % LANES == 0) { /* the usual one, where it is not A's own */
        for (long i = 0; i < (long)count * dim; i += LANES)
            STORE_A(copy + i, load_bf16((const bf16 *)pool + slot * dim + i, LANES), LANES);
        return copy;
    }
    for (int k = 0; k < count; k++) {
        float scale = scales ? scales[slot + k] : 1.0f;
        for (int i = 0; i < dim; i += LANES) {
            int n = dim - i < LANES ? dim - i : LANES;
            STORE_A(copy + k * dim + i, get_numbers(format, pool, (slot + k) * dim + i, n) * scale, n);
        }
    }
    return copy;
}

/* Values of PER keys side by side, so that one unit meets one unit of probabilities. A missing last
   key is 0. */
INLINE const U *N(pair_up)(const A *values, int count, int dim, U *pairs) {
#ifdef IS_PAIR
    for (int k = 0; k < count; k += 2)
        for (int i = 0; i < dim; i += LANES) {
            int n = dim - i < LANES ? dim - i : LANES;
            u32v first = load_bits(values + k * dim + i, n), second = {};
            if (k + 1 < count) second = load_bits(values + (k + 1) * dim + i, n);
            first |= second << 16;
            store_f32((float *)(pairs + k / 2 * dim + i), (f32v)first, n);
        }
    return pairs;
#else
    (void)count, (void)dim, (void)pairs;
    return values;
#endif
}

/* Scores of a register's queries -> probabilities up to the common factor, and what they do to the
   running sums (online softmax, arXiv 2205.14135). */
INLINE void N(soften)(N(Scratch) *s, int j, int count, long first_key, int is_masked, float scale, f32v *keep) {
    float *scores = s->scores + j * LANES;
    f32v highest = s->highest[j];
    for (int k = 0; k < count; k++) {
        f32v x;
        memcpy(&x, scores + k * WIDE, sizeof x);
        x *= scale;
        if (is_masked) x = choose(s->positions[j] >= (int)(first_key + k), x, splat(-INFINITY));
        memcpy(scores + k * WIDE, &x, sizeof x);
        highest = larger(x, highest);
    }
    *keep = exponential(s->highest[j] - highest);
    f32v parts[LANES] = {};
    for (int k = 0; k < count; k += LANES)
        for (int i = 0; i < LANES && k + i < count; i++) {
            f32v p;
            memcpy(&p, scores + (k + i) * WIDE, sizeof p);
            p = exponential(p - highest);
            memcpy(scores + (k + i) * WIDE, &p, sizeof p);
            parts[i] += p;
        }
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    s->highest[j] = highest;
    s->totals[j] = madd(s->totals[j], *keep, parts[0]);
}

/* Where products read a tile's probabilities, and how far apart two keys' are. */
INLINE const U *N(probabilities)(N(Scratch) *s, int tile, int count, long *across) {
#ifdef IS_PAIR
    U *packed = s->probabilities + (long)tile * KEYS / PER * PANEL;
    const float *scores = s->scores + tile * PANEL;
    for (int k = 0; k < count; k += PER)
        for (int j = 0; j < PANEL; j += LANES) {
            f32v first, second = {};
            memcpy(&first, scores + k * WIDE + j, sizeof first);
            if (k + 1 < count) memcpy(&second, scores + (k + 1) * WIDE + j, sizeof second);
            u32v both = lengthen(narrow(first)) | lengthen(narrow(second)) << 16;
            memcpy(packed + k / PER * PANEL + j, &both, sizeof both);
        }
    *across = PANEL;
    return packed;
#else
    (void)count;
    *across = WIDE;
    return s->scores + tile * PANEL;
#endif
}

/* Score `count` keys of one page with PANEL queries, and add their values. */
static void N(attend_tile)(N(Scratch) *s, int tile, const A *keys, const U *values, int count, int dim,
                           long first_key, int is_masked, float scale) {
    float found[ROWS * PANEL];
    f32v keep[COLS];
    long depth = dim / PER, across;
    for (int k = 0; k < count; k += ROWS)
        N(product)(&(N(Product)){.a = (const U *)(keys + k * dim), .row = depth, .step = 1,
                                 .b = s->queries + (long)tile * depth * PANEL, .across = PANEL, .depth = depth,
                                 .c = s->scores + k * WIDE + tile * PANEL, .c_row = WIDE},
                   count - k < ROWS ? count - k : ROWS, COLS);
    for (int j = 0; j < COLS; j++)
        N(soften)(s, tile * COLS + j, count, first_key, is_masked, scale, keep + j);
    const U *probabilities = N(probabilities)(s, tile, count, &across);
    for (int i = 0; i < dim; i += ROWS) {
        int rows = dim - i < ROWS ? dim - i : ROWS;
        N(product)(&(N(Product)){.a = values + i, .row = 1, .step = dim, .b = probabilities, .across = across,
                                 .depth = (count + PER - 1) / PER, .c = found, .c_row = PANEL}, rows, COLS);
        for (int m = 0; m < rows; m++)
            for (int j = 0; j < COLS; j++) {
                float *at = s->sums + (i + m) * WIDE + tile * PANEL + j * LANES;
                f32v sum, more;
                memcpy(&sum, at, sizeof sum);
                memcpy(&more, found + m * PANEL + j * LANES, sizeof more);
                sum = madd(sum, keep[j], more);
                memcpy(at, &sum, sizeof sum);
            }
    }
}

/* ---- the same for one row: keys, then numbers of a head, are the columns, since a few queries
   would leave most lanes idle ---- */

/* Missing keys become 0. */
static void N(turn)(const U *keys, int count, long depth, U *turned) {
    for (int key = 0; key < count; key += LANES)
        for (long k = 0; k < depth; k += LANES) {
            u32v block[LANES] = {};
            long wide = depth - k < LANES ? depth - k : LANES, high = count - key < LANES ? count - key : LANES;
            if (wide == LANES && high == LANES)
                for (int i = 0; i < LANES; i++) memcpy(&block[i], keys + (key + i) * depth + k, sizeof block[i]);
            else
                for (int i = 0; i < high; i++)
                    memcpy(&block[i], keys + (key + i) * depth + k, (size_t)wide * sizeof(U));
            transpose(block);
            for (int i = 0; i < wide; i++) memcpy(turned + (k + i) * KEYS + key, &block[i], sizeof block[i]);
        }
}

/* As `soften`, bit for bit, with the keys of one query side by side. */
static void N(soften_few)(N(Scratch) *s, int count, int queries, float scale, float keep[FEW]) {
    int padded = (count + LANES - 1) / LANES * LANES;
    for (int q = 0; q < queries; q++) {
        float *scores = s->scores + q * KEYS;
        f32v largest = splat(s->few_highest[q]), parts = {}, p;
        for (int k = 0; k < padded; k += LANES) {
            memcpy(&p, scores + k, sizeof p);
            p = choose(lane_numbers() < count - k, p * scale, splat(-INFINITY));
            memcpy(scores + k, &p, sizeof p);
            largest = larger(p, largest);
        }
        float top = highest(largest);
        keep[q] = exponential(splat(s->few_highest[q] - top))[0];
        for (int k = 0; k < padded; k += LANES) {
            memcpy(&p, scores + k, sizeof p);
            p = exponential(p - top);
            STORE_A((A *)s->probabilities + q * KEYS + k, p, LANES);
            parts += p;
        }
        s->few_totals[q] = madd(splat(s->few_totals[q]), splat(keep[q]), splat(sum(parts)))[0];
        s->few_highest[q] = top;
    }
}

static void N(attend_few)(N(Scratch) *s, const A *query, const A *keys, const U *values, int count, int queries,
                          int dim, float scale) {
    float found[ROWS * 2 * LANES], keep[FEW];
    long depth = dim / PER;
    N(turn)((const U *)keys, count, depth, s->turned);
    for (int q = 0; q < queries; q += ROWS)
        for (int k = 0; k < count; k += 2 * LANES)
            N(product)(&(N(Product)){.a = (const U *)(query + q * dim), .row = depth, .step = 1,
                                     .b = s->turned + k, .across = KEYS, .depth = depth,
                                     .c = s->scores + q * KEYS + k, .c_row = KEYS},
                       queries - q < ROWS ? queries - q : ROWS, count - k > LANES ? 2 : 1);
    N(soften_few)(s, count, queries, scale, keep);
    for (int first = 0; first < queries; first += ROWS)
        for (int i = 0; i < dim; i += 2 * LANES) {
            int rows = queries - first < ROWS ? queries - first : ROWS, cols = dim - i > LANES ? 2 : 1;
            N(product)(&(N(Product)){.a = s->probabilities + first * (KEYS / PER), .row = KEYS / PER, .step = 1,
                                     .b = values + i, .across = dim, .depth = (count + PER - 1) / PER, .c = found,
                                     .c_row = 2 * LANES}, rows, cols);
            for (int m = 0; m < rows; m++)
                for (int j = 0; j < cols; j++) {
                    float *at = s->sums + (first + m) * dim + i + j * LANES;
                    f32v sum, more;
                    memcpy(&sum, at, sizeof sum);
                    memcpy(&more, found + (m * 2 + j) * LANES, sizeof more);
                    sum = madd(sum, splat(keep[first + m]), more);
                    memcpy(at, &sum, sizeof sum);
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
    const A *queries;
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
    at.queries = (const A *)job->engine->qkv + (span->row_start + at.first) * at.width
                 + at.head * at.groups * shape->head_dim;
    return at;
}

/* Queries into columns; nothing seen yet. */
static void N(begin)(N(Scratch) *s, const N(Place) *at, int tiles, int dim) {
    long depth = dim / PER;
    memset(s->queries, 0, sizeof(U) * tiles * PANEL * depth);
    memset(s->sums, 0, sizeof(float) * WIDE * dim);
    for (int q = 0; q < FEW; q++) s->few_highest[q] = -1e30f, s->few_totals[q] = 0;
    for (int j = 0; j < tiles * COLS; j++) {
        s->highest[j] = splat(-1e30f);
        s->totals[j] = (f32v){};
        for (int lane = 0; lane < LANES; lane++) {
            int column = j * LANES + lane, row = column / at->groups;
            s->positions[j][lane] = at->span->context + at->first + (row < at->rows ? row : 0);
            if (row >= at->rows) continue;
            const U *own = (const U *)(at->queries + row * at->width + column % at->groups * dim);
            U *to = s->queries + column / PANEL * depth * PANEL + column % PANEL;
            for (long k = 0; k < depth; k++) to[k * PANEL] = own[k];
        }
    }
}

/* What was seen, divided by its total, to where the next product reads it. */
static void N(end)(const N(Scratch) *s, const N(Attention) *job, const N(Place) *at, int is_few) {
    int dim = job->engine->shape.head_dim, heads = job->engine->shape.heads;
    for (int column = 0; column < at->rows * at->groups; column++) {
        int row = at->span->row_start + at->first + column / at->groups;
        A *to = (A *)job->engine->attended + ((long)row * heads + at->head * at->groups + column % at->groups) * dim;
        const float *sums = is_few ? s->sums + column * dim : s->sums + column;
        float total = is_few ? s->few_totals[column] : s->totals[column / LANES][column % LANES];
        for (long i = 0; i < dim; i++) SET_A(to + i, sums[is_few ? i : i * WIDE] / total);
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
    int dim = shape->head_dim, format = shape->kv_format, queries = at.rows * at.groups;
    int tiles = (queries + PANEL - 1) / PANEL;
    int is_few = at.rows == 1 && at.groups <= FEW && dim % LANES == 0;
    float scale = job->engine->score_scale;
    N(Scratch) s;
    N(scratch)(&s, scratch_of(job->engine, thread), dim);
    N(begin)(&s, &at, tiles, dim);
    /* The last keys of the first and the last row. */
    long first_sees = at.span->context + at.first, last_sees = first_sees + at.rows - 1;
    N(Block) next = N(block)(job, &at, 0, last_sees);
    while (next.count > 0) {
        N(Block) block = next;
        long after = block.key + block.count;
        next.count = 0;
        if (after <= last_sees) {
            next = N(block)(job, &at, after, last_sees);
            if (is_few) N(fetch_ahead)(job, &next);
        }
        const A *keys = N(rows_of)(pages->keys, pages->key_scales, format, block.slot, block.count, dim, s.keys);
        const A *values = N(rows_of)(pages->values, pages->value_scales, format, block.slot, block.count, dim,
                                     s.values);
        const U *pairs = N(pair_up)(values, block.count, dim, s.pairs);
        if (is_few) N(attend_few)(&s, at.queries, keys, pairs, block.count, queries, dim, scale);
        else
            for (int tile = 0; tile < tiles; tile++)
                N(attend_tile)(&s, tile, keys, pairs, block.count, dim, block.key, after - 1 > first_sees, scale);
    }
    N(end)(&s, job, &at, is_few);
}

void N(attention)(Engine *engine, const LayerPages *pages, const Batch *batch) {
    const Shape *shape = &engine->shape;
    N(Attention) attention = {engine, pages, batch, WIDE / (shape->heads / shape->kv_heads)};
    int items = 0;
    for (int i = 0; i < batch->span_count; i++) {
        batch->spans[i].items_before = items;
        items += (batch->spans[i].rows + attention.block_rows - 1) / attention.block_rows * shape->kv_heads;
    }
    pool_run(engine->pool, N(attention_item), &attention, items);
}
