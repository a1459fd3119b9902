/* What depends on how many lanes there are: 8. */

/* Rows become columns: three rounds of exchanges between rows 4, 2 and 1 apart. */
INLINE void transpose(u32v r[LANES]) {
#define SHUFFLE __builtin_shufflevector
#define ROUND(s, first, second) \
    for (int i = 0; i < LANES; i++) \
        if (!(i & s)) { \
            u32v a = r[i], b = r[i | s]; \
            r[i] = SHUFFLE(a, b, first); \
            r[i | s] = SHUFFLE(a, b, second); \
        }
#define L4 0, 1, 2, 3, 8, 9, 10, 11
#define H4 4, 5, 6, 7, 12, 13, 14, 15
#define L2 0, 1, 8, 9, 4, 5, 12, 13
#define H2 2, 3, 10, 11, 6, 7, 14, 15
#define L1 0, 8, 2, 10, 4, 12, 6, 14
#define H1 1, 9, 3, 11, 5, 13, 7, 15
#pragma GCC unroll 8
    ROUND(4, L4, H4)
#pragma GCC unroll 8
    ROUND(2, L2, H2)
#pragma GCC unroll 8
    ROUND(1, L1, H1)
#undef L4
#undef H4
#undef L2
#undef H2
#undef L1
#undef H1
#undef ROUND
#undef SHUFFLE
}

/* The lanes 4 or 2 further on; what else is in the result counts for nothing. */
#define APART4(x) __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3)
#define APART2(x) __builtin_shufflevector(x, x, 2, 3, 0, 1, 2, 3, 0, 1)

/* Sums in a tree, lanes 4, 2 and 1 apart. */
INLINE float sum(f32v x) {
    x += APART4(x);
    x += APART2(x);
    return x[0] + x[1];
}

INLINE float highest(f32v x) {
    x = larger(x, APART4(x));
    x = larger(x, APART2(x));
    return x[0] > x[1] ? x[0] : x[1];
}

INLINE i32v lane_numbers(void) { return (i32v){0, 1, 2, 3, 4, 5, 6, 7}; }
