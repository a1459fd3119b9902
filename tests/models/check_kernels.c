/* One layer of the compiled kernels against plain loops in double, for machines without Python: see
   test_native_neon.py. Says what is wrong and returns 1. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stage.h"

enum { SIZE = 70, HEADS = 6, KV = 2, DIM = 16, INNER = 530, SEEN = 45, PAGE = 16, PAGES = 3 };
enum { QKV = (HEADS + 2 * KV) * DIM, HALF = DIM / 2 };

typedef struct Engine Engine;
Engine *forebay_open(const Shape *shape);
void forebay_close(Engine *engine);
int forebay_panel(void);
int64_t forebay_trial(void);
int forebay_layers(Engine *, const Layer *, const LayerPages *, int count, const Batch *, void *hidden);

static float rounded(float x, int dtype) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == BF16) bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void put(void *to, long at, float x, int dtype) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == BF16) ((uint16_t *)to)[at] = (uint16_t)(bits >> 16);
    else ((float *)to)[at] = x;
}

static float get(const void *from, long at, int dtype) {
    if (dtype == F32) return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t dice = 7;

static double *random_numbers(long count, double around, double of, int dtype) {
    double *to = malloc((size_t)count * sizeof *to);
    for (long i = 0; i < count; i++) {
        dice = dice * 1664525u + 1013904223u;
        to[i] = rounded((float)(around + of * ((double)(dice >> 8) / 8388608.0 - 1)), dtype);
    }
    return to;
}

static void *stored(const double *x, long count, int dtype) {
    void *to = calloc((size_t)count, sizeof(float));
    for (long i = 0; i < count; i++) put(to, i, (float)x[i], dtype);
    return to;
}

/* (outputs, inputs) -> (panels, inputs / per, panel, per), as native/stage.h says. */
static void *packed(const double *weight, int outputs, int inputs, int dtype) {
    int panel = forebay_panel(), per = dtype == BF16 ? 2 : 1;
    void *to = calloc((size_t)(outputs + panel) * (size_t)inputs, sizeof(float));
    for (long out = 0; out < outputs; out++)
        for (long in = 0; in < inputs; in++)
            put(to, out / panel * panel * inputs + (in / per * panel + out % panel) * per + in % per,
                (float)weight[out * inputs + in], dtype);
    return to;
}

static void product(const double *x, const double *weight, int outputs, int inputs, double *out) {
    for (int o = 0; o < outputs; o++) {
        out[o] = 0;
        for (int i = 0; i < inputs; i++) out[o] += x[i] * weight[o * inputs + i];
    }
}

static void norm(const double *x, const double *weight, double *out) {
    double squares = 0;
    for (int i = 0; i < SIZE; i++) squares += x[i] * x[i];
    for (int i = 0; i < SIZE; i++) out[i] = x[i] / sqrt(squares / SIZE + 1e-5) * weight[i];
}

typedef struct {
    double *norm, *qkv, *o, *gate, *up, *down, *cosines, *sines;
} Weights;

static void rotate(double *head, const double *cosines, const double *sines) {
    for (int i = 0; i < HALF; i++) {
        double a = head[i], b = head[i + HALF];
        head[i] = a * cosines[i] - b * sines[i];
        head[i + HALF] = b * cosines[i] + a * sines[i];
    }
}

/* `x` (SEEN, SIZE) in place. */
static void plain_layer(const Weights *w, double *x) {
    static double qkv[SEEN][QKV], normed[SIZE], seen[HEADS * DIM], more[SIZE], gate[INNER], up[INNER];
    for (int row = 0; row < SEEN; row++) {
        norm(x + row * SIZE, w->norm, normed);
        product(normed, w->qkv, QKV, SIZE, qkv[row]);
        for (int head = 0; head < HEADS + KV; head++)
            rotate(qkv[row] + head * DIM, w->cosines + row * DIM, w->sines + row * HALF);
    }
    for (int row = 0; row < SEEN; row++) {
        for (int head = 0; head < HEADS; head++) {
            int shared = head / (HEADS / KV);
            double total = 0, *sum = seen + head * DIM;
            memset(sum, 0, DIM * sizeof *sum);
            for (int key = 0; key <= row; key++) {
                const double *k = qkv[key] + (HEADS + shared) * DIM, *v = k + KV * DIM;
                double score = 0;
                for (int i = 0; i < DIM; i++) score += qkv[row][head * DIM + i] * k[i];
                double p = exp(score / sqrt(DIM));
                total += p;
                for (int i = 0; i < DIM; i++) sum[i] += p * v[i];
            }
            for (int i = 0; i < DIM; i++) sum[i] /= total;
        }
        double *own = x + row * SIZE;
        product(seen, w->o, SIZE, HEADS * DIM, more);
        for (int i = 0; i < SIZE; i++) own[i] += more[i];
        norm(own, w->norm, normed);
        product(normed, w->gate, INNER, SIZE, gate);
        product(normed, w->up, INNER, SIZE, up);
        for (int i = 0; i < INNER; i++) gate[i] = gate[i] / (1 + exp(-gate[i])) * up[i];
        product(gate, w->down, SIZE, INNER, more);
        for (int i = 0; i < SIZE; i++) own[i] += more[i];
    }
}

/* Rows of `hidden` from the first to the last, `step` at a time. */
static void run(Engine *engine, const Layer *layer, const LayerPages *pages, const Weights *w, void *hidden, int step,
                int dtype) {
    int64_t positions[SEEN], rows[SEEN], at_pages[SEEN], offsets[SEEN], tables[PAGES] = {2, 0, 1};
    void *cosines = stored(w->cosines, SEEN * DIM, dtype), *sines = stored(w->sines, SEEN * HALF, dtype);
    for (int first = 0; first < SEEN; first += step) {
        int count = SEEN - first < step ? SEEN - first : step;
        for (int i = 0; i < count; i++) {
            positions[i] = first + i, rows[i] = i;
            at_pages[i] = tables[(first + i) / PAGE], offsets[i] = (first + i) % PAGE;
        }
        Span span = {.rows = count, .context = first};
        uint8_t finite[SEEN];
        memset(finite, 1, sizeof finite);
        Batch batch = {.positions = positions, .spans = &span, .tables = tables, .write_rows = rows,
                       .write_pages = at_pages, .write_offsets = offsets, .cosines = cosines, .sines = sines,
                       .finite = finite, .rows = count, .span_count = 1, .writes = count, .page_size = PAGE};
        if (forebay_layers(engine, layer, pages, 1, &batch, (char *)hidden + first * SIZE * (dtype == BF16 ? 2 : 4)))
            exit(2);
        for (int i = 0; i < count; i++)
            if (!finite[i]) exit(3);
    }
    free(cosines), free(sines);
}

static int check(int dtype) {
    Weights w = {random_numbers(SIZE, 1, 0.2, dtype), random_numbers(QKV * SIZE, 0, 0.2, dtype),
                 random_numbers(SIZE * HEADS * DIM, 0, 0.2, dtype), random_numbers(INNER * SIZE, 0, 0.2, dtype),
                 random_numbers(INNER * SIZE, 0, 0.2, dtype), random_numbers(SIZE * INNER, 0, 0.1, dtype),
                 random_numbers(SEEN * DIM, 0, 1, dtype), random_numbers(SEEN * HALF, 0, 1, dtype)};
    double *x = random_numbers(SEEN * SIZE, 0, 1, dtype), largest = 0, apart = 0;
    void *norms = stored(w.norm, SIZE, dtype);
    Layer layer = {.attention_norm = norms, .mlp_norm = norms, .qkv = packed(w.qkv, QKV, SIZE, dtype),
                   .o = packed(w.o, SIZE, HEADS * DIM, dtype), .gate = packed(w.gate, INNER, SIZE, dtype),
                   .up = packed(w.up, INNER, SIZE, dtype), .down = packed(w.down, SIZE, INNER, dtype)};
    Shape shape = {dtype, dtype == BF16 ? KV_BF16 : KV_F32, SIZE, HEADS, KV, DIM, INNER, 2, 1e-5f};
    LayerPages pages = {calloc(PAGES * KV * PAGE * DIM, 4), calloc(PAGES * KV * PAGE * DIM, 4), NULL, NULL};
    void *once = stored(x, SEEN * SIZE, dtype), *chunks = stored(x, SEEN * SIZE, dtype);
    void *singly = stored(x, SEEN * SIZE, dtype);
    Engine *engine = forebay_open(&shape);
    run(engine, &layer, &pages, &w, once, SEEN, dtype);
    run(engine, &layer, &pages, &w, chunks, 19, dtype);
    run(engine, &layer, &pages, &w, singly, 1, dtype);
    forebay_close(engine);
    plain_layer(&w, x);
    for (int i = 0; i < SEEN * SIZE; i++) {
        double difference = fabs(get(once, i, dtype) - x[i]);
        largest = fabs(x[i]) > largest ? fabs(x[i]) : largest;
        apart = difference > apart || difference != difference ? difference : apart;
    }
    size_t bytes = SEEN * SIZE * (dtype == BF16 ? 2 : 4);
    int is_near = apart <= largest * (dtype == BF16 ? 0.02 : 1e-5);
    int is_same = !memcmp(once, chunks, bytes) && !memcmp(once, singly, bytes);
    printf("%s: apart %g of %g, %s\n", dtype == BF16 ? "bfloat16" : "float32", apart, largest,
           is_same ? "same bits" : "OTHER BITS in chunks or singly");
    return is_near && is_same;
}

int main(void) {
    int64_t trial = forebay_trial();
    printf("panel %d, trial %s\n", forebay_panel(), trial < 0 ? "WRONG" : "right");
    int both = check(F32) & check(BF16);
    return trial < 0 || !both;
}
