/* Elements of any dtype in portable C. Integer code converts fp16 and bf16 to fp32 and back. So the bits are the same
 * on every machine, whatever MXCSR says.
 *
 *   fp16   s eeeee mmmmmmmmmm          bias 15
 *   bf16   s eeeeeeee mmmmmmm          the upper half of an fp32
 *   e4m3   s eeee mmm                  bias 7, no infinity
 *
 * Narrowing rounds to nearest, ties to even. An infinity stays an infinity, and a NaN becomes a quiet NaN. Only e4m3
 * saturates at 448, as GPUs do. */
#ifndef FA_CPU_CONVERT_H
#define FA_CPU_CONVERT_H

#include "flash_attn.h"
#include <string.h>

static inline uint32_t fa_bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float fa_f32_of_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float fa_f32_from_bf16(uint16_t x) { return fa_f32_of_bits((uint32_t)x << 16); }

static inline uint16_t fa_bf16_from_f32(float x) {
    uint32_t bits = fa_bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40); /* rounding a NaN could give inf */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float fa_f32_from_f16(uint16_t x) {
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, exponent = x >> 10 & 31, mantissa = x & 0x3ff;
    if (exponent == 31) return fa_f32_of_bits(sign | 0x7f800000 | mantissa << 13 | (mantissa ? 0x400000 : 0));
    if (exponent == 0) {
        if (mantissa == 0) return fa_f32_of_bits(sign);
        exponent = 1;
        for (; !(mantissa & 0x400); mantissa <<= 1) exponent--; /* a subnormal of fp16 is normal in fp32 */
        mantissa &= 0x3ff;
    }
    return fa_f32_of_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t fa_f16_from_f32(float x) {
    uint32_t bits = fa_bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and larger values round to infinity */
    uint32_t rest, shift, half;
    if (magnitude >= 0x38800000) { /* 2^-14 and above: normal in fp16 */
        shift = 13;
        rest = magnitude - (112u << 23);
    } else {
        uint32_t exponent = magnitude >> 23;
        if (exponent < 102) return (uint16_t)sign; /* below 2^-25: rounds to zero */
        shift = 126 - exponent;
        rest = (magnitude & 0x7fffff) | 0x800000;
    }
    half = rest >> shift;
    uint32_t lost = rest & ((1u << shift) - 1), tie = 1u << (shift - 1);
    half += lost > tie || (lost == tie && (half & 1)); /* a carry into the exponent is the right result */
    return (uint16_t)(sign | half);
}

/* There is no infinity, and all ones are NaN. A subnormal counts units of 2^-9. */
static inline float fa_f32_from_e4m3(uint8_t x) {
    const uint32_t sign = (uint32_t)(x & 0x80) << 24, rest = x & 0x7f;
    if (rest < 8) return fa_f32_of_bits(sign | fa_bits_of((float)rest * 0x1p-9f));
    return fa_f32_of_bits(sign | (rest == 0x7f ? 0x7fc00000u : (rest << 20) + (120u << 23)));
}

static inline uint8_t fa_e4m3_from_f32(float x) {
    const uint32_t bits = fa_bits_of(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint8_t)(sign | 0x7f);
    if (magnitude >= 0x43e00000) return (uint8_t)(sign | 0x7e); /* 448 and above */
    uint32_t rest, shift;
    if (magnitude >= 0x3c800000) { /* 2^-6 and above: normal in e4m3 */
        shift = 20;
        rest = magnitude - (120u << 23);
    } else {
        const uint32_t exponent = magnitude >> 23;
        if (exponent < 117) return (uint8_t)sign; /* below 2^-10: rounds to zero */
        shift = 141 - exponent;
        rest = (magnitude & 0x7fffff) | 0x800000;
    }
    const uint32_t lost = rest & ((1u << shift) - 1), tie = 1u << (shift - 1);
    uint32_t code = rest >> shift;
    code += lost > tie || (lost == tie && (code & 1)); /* a carry into the exponent is the right result */
    return (uint8_t)(sign | code);
}

/* Loads one element of a tensor as a double, which holds every dtype exactly. fa_store_element rounds back. */
static inline double fa_load_element(const void *data, int64_t idx, fa_dtype dtype) {
    switch (dtype) {
    case FA_F16: return fa_f32_from_f16(((const uint16_t *)data)[idx]);
    case FA_BF16: return fa_f32_from_bf16(((const uint16_t *)data)[idx]);
    case FA_F32: return ((const float *)data)[idx];
    case FA_E4M3: return fa_f32_from_e4m3(((const uint8_t *)data)[idx]);
    case FA_F64: break;
    }
    return ((const double *)data)[idx];
}

static inline void fa_store_element(void *data, int64_t idx, double x, fa_dtype dtype) {
    switch (dtype) {
    case FA_F16: ((uint16_t *)data)[idx] = fa_f16_from_f32((float)x); break;
    case FA_BF16: ((uint16_t *)data)[idx] = fa_bf16_from_f32((float)x); break;
    case FA_F32: ((float *)data)[idx] = (float)x; break;
    case FA_F64: ((double *)data)[idx] = x; break;
    case FA_E4M3: ((uint8_t *)data)[idx] = fa_e4m3_from_f32((float)x); break;
    }
}

#endif
