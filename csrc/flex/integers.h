/* Arithmetic of int64 as torch does it. Sums and products wrap around. A division by 0 gives 0. */
#ifndef FA_FLEX_INTEGERS_H
#define FA_FLEX_INTEGERS_H

#include <stdint.h>

static inline int64_t fa_flex_add_ints(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
static inline int64_t fa_flex_sub_ints(int64_t a, int64_t b) { return (int64_t)((uint64_t)a - (uint64_t)b); }
static inline int64_t fa_flex_mul_ints(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

static inline int64_t fa_flex_trunc_divide(int64_t a, int64_t b) {
    return b == 0 ? 0 : b == -1 ? fa_flex_sub_ints(0, a) : a / b;
}
static inline int64_t fa_flex_fmod(int64_t a, int64_t b) { return b == 0 || b == -1 ? 0 : a % b; }

static inline int64_t fa_flex_floor_divide(int64_t a, int64_t b) {
    const int64_t rest = fa_flex_fmod(a, b);
    return fa_flex_trunc_divide(a, b) - (rest != 0 && (rest < 0) != (b < 0));
}
static inline int64_t fa_flex_remainder(int64_t a, int64_t b) {
    const int64_t rest = fa_flex_fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

static inline int64_t fa_flex_shift_left(int64_t a, int64_t b) {
    return b < 0 || b > 63 ? 0 : (int64_t)((uint64_t)a << b);
}
static inline int64_t fa_flex_shift_right(int64_t a, int64_t b) { return a >> (b < 0 || b > 63 ? 63 : b); }

/* A negative exponent gives the integer part of the quotient: 0 unless a is 1 or -1. */
static inline int64_t fa_flex_pow(int64_t a, int64_t b) {
    int64_t power = 1;
    if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
    for (; b > 0; b >>= 1, a = fa_flex_mul_ints(a, a))
        if (b & 1) power = fa_flex_mul_ints(power, a);
    return power;
}

/* The place of index i in a dimension: a negative index counts from the end, and then the place is clamped. */
static inline int64_t fa_flex_place(int64_t i, int64_t size) {
    if (i < 0) i += size;
    return i < 0 ? 0 : i < size ? i : size - 1;
}

#endif
