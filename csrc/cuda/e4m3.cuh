/* Conversions of e4m3 for every GPU. Instructions for them begin at sm_89, so this file uses integers and fp16. All
 * results are exact, or rounded to nearest even.
 *
 *   e4m3   s eeee mmm            bias 7
 *   fp16   s eeeee mmmmmmmmmm    bias 15
 *
 * The bits of an e4m3, moved to their places in fp16, are 2^-8 times the number. This is true for subnormals, too. */
#ifndef FA_E4M3_CUH
#define FA_E4M3_CUH

#include "ptx_sm80.cuh"

/* Makes two fp16 of two e4m3. Each e4m3 is the upper byte of a half of `pair`. */
DEVICE u32 fp16_pair_of(u32 pair) {
    const u32 nan = (((pair & 0x7f007f00) + 0x01000100) & 0x80008000) >> 15; /* all ones carry into the sign */
    const u32 number = mul_f16x2((pair & 0x80008000) | (pair & 0x7f007f00) >> 1, 0x5c005c00 /* 2^8 */);
    return number | nan * 0x7fff;
}

/* Makes four fp16 of four e4m3. */
DEVICE uint2 fp16_of_e4m3(u32 four) {
    return {fp16_pair_of(prmt(four, 0, 0x1404)), fp16_pair_of(prmt(four, 0, 0x3424))};
}

DEVICE fp16 fp16_of(e4m3 x) { return {(u16)fp16_pair_of((u32)x.bits << 8)}; }

DEVICE float cvt_f32(e4m3 x) { return cvt_f32(fp16_of(x)); }

/* Numbers above 448 become 448, as in the instruction with .satfinite. */
template <> DEVICE e4m3 cvt<e4m3>(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return {(unsigned char)(sign | 0x7f)};
    if (magnitude >= 0x43e00000) return {(unsigned char)(sign | 0x7e)};
    const u32 exponent = magnitude >> 23;
    if (exponent < 117) return {(unsigned char)sign}; /* below 2^-10 */
    const bool is_normal = exponent >= 121;           /* 2^-6 and above */
    const u32 rest = is_normal ? magnitude - (120u << 23) : (magnitude & 0x7fffff) | 0x800000;
    const u32 shift = is_normal ? 20 : 141 - exponent, code = rest >> shift;
    const u32 lost = rest & ((1u << shift) - 1), tie = 1u << (shift - 1);
    return {(unsigned char)(sign | (code + (lost > tie || (lost == tie && (code & 1)))))};
}

#endif
