/* What depends on how many lanes there are: 16. */

/* Rows become columns: four rounds of exchanges between rows 8, 4, 2 and 1 apart. */
INLINE void transpose(u32v r[LANES]) {
#define SHUFFLE __builtin_shufflevector
#define ROUND(s, first, second) \
    for (int i = 0; i < LANES; i++) \
        if (!(i & s)) { \
            u32v a = r[i], b = r[i | s]; \
            r[i] = SHUFFLE(a, b, first); \
            r[i | s] = SHUFFLE(a, b, second); \
        }
#define L8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define H8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define L4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define H4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define L2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define H2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define L1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define H1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#pragma GCC unroll 16
    ROUND(8, L8, H8)
#pragma GCC unroll 16
    ROUND(4, L4, H4)
#pragma GCC unroll 16
    ROUND(2, L2, H2)
#pragma GCC unroll 16
    ROUND(1, L1, H1)
#undef L8
#undef H8
#undef L4
#undef H4
#undef L2
#undef H2
#undef L1
#undef H1
#undef ROUND
#undef SHUFFLE
}

/* The lanes 8, 4 or 2 further on; what else is in the result counts for nothing. */
#define APART8(x) __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define APART4(x) __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3)
#define APART2(x) __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1)

/* Sums in a tree, lanes 8, 4, 2 and 1 apart. */
INLINE float sum(f32v x) {
    x += APART8(x);
    x += APART4(x);
    x += APART2(x);
    return x[0] + x[1];
}

INLINE float highest(f32v x) {
    x = larger(x, APART8(x));
    x = larger(x, APART4(x));
    x = larger(x, APART2(x));
    return x[0] > x[1] ? x[0] : x[1];
}

INLINE i32v lane_numbers(void) {
    return (i32v){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}
