/* What depends on how many lanes there are: 4. */

/* Rows become columns: two rounds of exchanges between rows 2 and 1 apart. */
INLINE void transpose(u32v r[LANES]) {
    for (int i = 0; i < 2; i++) {
        u32v a = r[i], b = r[i + 2];
        r[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
        r[i + 2] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    }
    for (int i = 0; i < 4; i += 2) {
        u32v a = r[i], b = r[i + 1];
        r[i] = __builtin_shufflevector(a, b, 0, 4, 2, 6);
        r[i + 1] = __builtin_shufflevector(a, b, 1, 5, 3, 7);
    }
}

/* Sums in a tree, lanes 2 and 1 apart. */
INLINE float sum(f32v x) { return (x[0] + x[2]) + (x[1] + x[3]); }

INLINE float highest(f32v x) {
    f32v y = larger(x, __builtin_shufflevector(x, x, 2, 3, 0, 1));
    return y[0] > y[1] ? y[0] : y[1];
}

INLINE i32v lane_numbers(void) { return (i32v){0, 1, 2, 3}; }
