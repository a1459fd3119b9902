/* The micro-kernel: a few rows times the columns of a few registers. Included once for each unit
   of the inner dimension:

      U, UV    the unit, and LANES of them: one float32, or two bfloat16 that one instruction
      N(name)  multiplies and adds (`IS_PAIR`)

   Each sum runs over its inner dimension in order and in one register, or on from what is there;
   so it is the same bit for bit whatever tile it is part of, and wherever the depth is cut. */

#ifdef IS_PAIR
INLINE f32v N(mac)(f32v sum, U a, UV b) {
    return (f32v)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}
#else
INLINE f32v N(mac)(f32v sum, U a, UV b) { return madd(splat(a), b, sum); }
#endif

/* Where factors and sums are, in units: a[m * row + k * step], b[k * across + j * LANES],
   c[m * c_row + j * LANES]. */
typedef struct {
    const U *a;
    long row, step;
    const U *b;
    long across, depth;
    float *c;
    long c_row;
    int add; /* to what is in c */
} N(Product);

INLINE void N(tile)(const N(Product) *p, int rows, int cols) {
    f32v s[ROWS][COLS];
    const U *a = p->a, *b = p->b;
    long row = p->row, step = p->step, across = p->across, depth = p->depth;
    if (p->add) {
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
            for (int j = 0; j < cols; j++) memcpy(&s[m][j], p->c + m * p->c_row + j * LANES, sizeof(f32v));
    } else {
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
            for (int j = 0; j < cols; j++) s[m][j] = (f32v){};
    }
    for (long k = 0; k < depth; k++, a += step, b += across) {
        UV column[COLS];
#pragma GCC unroll 3
        for (int j = 0; j < cols; j++) memcpy(&column[j], b + j * LANES, sizeof(UV));
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
            for (int j = 0; j < cols; j++) s[m][j] = N(mac)(s[m][j], a[m * row], column[j]);
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 3
        for (int j = 0; j < cols; j++) memcpy(p->c + m * p->c_row + j * LANES, &s[m][j], sizeof(f32v));
}

/* rows <= ROWS and cols <= COLS that are known only now. */
static void N(product)(const N(Product) *p, int rows, int cols) {
#define CASE(r, c) \
    case (r) * 4 + (c): N(tile)(p, r, c); break;
#if COLS == 3
#define CASES(r) CASE(r, 1) CASE(r, 2) CASE(r, 3)
#else
#define CASES(r) CASE(r, 1) CASE(r, 2)
#endif
    switch (rows * 4 + cols) {
        CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6)
#if ROWS == 8
        CASES(7) CASES(8)
#endif
    }
#undef CASES
#undef CASE
}
