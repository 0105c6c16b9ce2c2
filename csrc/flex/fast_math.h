/* exp, exp2, log, log2 and tanh of fp32 without branches and without calls, so that loops over them vectorise. The
 * errors are at most 2 units in the last place, of tanh 4. Infinities, NaN and zeros give what C's functions give.
 * Without FAST_MATH the functions are those of C. */
#ifndef FA_FLEX_FAST_MATH_H
#define FA_FLEX_FAST_MATH_H

#include <math.h>

#include "cpu/convert.h"

#ifdef FAST_MATH
#define FAST_FUNCTION(name) fast_##name

/* 2^n e^r for an integer n and |r| <= ln(2) / 2. `shifted` holds n in its low bits. Two factors let the result be
 * subnormal or infinite. */
static inline float fast_power(float shifted, float r) {
    const int32_t n = (int32_t)(fa_bits_of(shifted) - 0x4b400000u), half = n >> 1;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    return p * fa_f32_of_bits((uint32_t)(half + 127) << 23) * fa_f32_of_bits((uint32_t)(n - half + 127) << 23);
}

/* Comparisons are such that a NaN stays. */
static inline float fast_clamp(float x, float low, float high) {
    x = x < low ? low : x;
    return x > high ? high : x;
}

static inline float fast_exp(float a) {
    const float x = fast_clamp(a, -105.0f, 90.0f), shifted = x * 1.44269504f + 0x1.8p23f, n = shifted - 0x1.8p23f;
    const float power = fast_power(shifted, x - n * 0.693359375f + n * 2.12194440e-4f);
    return a != a ? a : power;
}

static inline float fast_exp2(float a) {
    const float x = fast_clamp(a, -151.0f, 129.0f), shifted = x + 0x1.8p23f, f = x - (shifted - 0x1.8p23f);
    const float power = fast_power(shifted, f * 0.693147181f);
    return a != a ? a : power;
}

/* log(a) = n ln(2) + log(m) with m from sqrt(1/2) to sqrt(2). Returns log(m), and n. */
static inline float fast_log_parts(float a, float *n) {
    const bool is_small = a < 0x1p-126f;
    const uint32_t bits = fa_bits_of(is_small ? a * 0x1p24f : a) - 0x3f3504f3u; /* the bits of sqrt(1/2) */
    const float x = fa_f32_of_bits((bits & 0x7fffffu) + 0x3f3504f3u) - 1.0f, square = x * x;
    float p = 7.0376836292e-2f;
    p = p * x - 1.1514610310e-1f;
    p = p * x + 1.1676998740e-1f;
    p = p * x - 1.2420140846e-1f;
    p = p * x + 1.4249322787e-1f;
    p = p * x - 1.6668057665e-1f;
    p = p * x + 2.0000714765e-1f;
    p = p * x - 2.4999993993e-1f;
    p = p * x + 3.3333331174e-1f;
    *n = (float)((int32_t)bits >> 23) - (is_small ? 24.0f : 0.0f);
    return x + (p * x * square - 0.5f * square);
}

/* The logarithm where it is finite; otherwise -inf at 0, inf at inf, and NaN. */
static inline float fast_log_of(float a, float finite) {
    const float special = a == 0 ? -INFINITY : a > 0 ? a : NAN;
    return a > 0 && a < INFINITY ? finite : special;
}

static inline float fast_log(float a) {
    float n, log_m = fast_log_parts(a, &n);
    return fast_log_of(a, n * 0.693359375f + (log_m - n * 2.12194440e-4f));
}

static inline float fast_log2(float a) {
    float n, log_m = fast_log_parts(a, &n);
    return fast_log_of(a, log_m * 1.44269504f + n);
}

/* The quotient of vec_tanh (cpu/elementwise.h). */
static inline float fast_tanh(float a) {
    const float x = fast_clamp(a, -9.03125f, 9.03125f), square = x * x;
    float p = 1.33546527e-08f, q = 7.77655436e-07f;
    p = p * square + 2.06090748e-05f;
    q = q * square + 0.000328563402f;
    p = p * square + 0.00349558761f;
    q = q * square + 0.0258769802f;
    p = p * square + 0.133810252f;
    q = q * square + 0.467143408f;
    p = p * square + 0.999999979f;
    return p * x / (q * square + 1.0f);
}

#else
#define FAST_FUNCTION(name) name##f
#endif

#endif
