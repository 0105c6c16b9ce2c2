/* The vector vocabulary (see vec_scalar.h) on AVX2, FMA and F16C: 16 registers of 8 lanes. */
#ifndef FA_CPU_VEC_AVX2_H
#define FA_CPU_VEC_AVX2_H

#include "convert.h"
#define VEC_TARGET "avx2,fma,f16c"
#include "vec_target.h"

#define LANES       8
#define WORD_ELEMS  1
#define UNROLL_VECS 3
#define UNROLL_ROWS 4 /* all 16 registers: 12 accumulators, 3 vectors, 1 broadcast */
#define BLOCK_Q     48

typedef __m256 vec;
typedef __m256 vec_mask;

/* ---- moving ---- */
INLINE vec vec_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vec_store(float *p, vec a) { _mm256_storeu_ps(p, a); }
INLINE vec vec_load_first(const float *p, int64_t n) {
    const __m256i lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), lane));
}
INLINE vec vec_set(float x) { return _mm256_set1_ps(x); }
INLINE vec vec_broadcast(const float *word) { return _mm256_set1_ps(*word); }
INLINE void vec_pin(vec *a) { __asm__("" : "+x"(*a)); }

/* ---- arithmetic ---- */
INLINE vec vec_add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec vec_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec vec_div(vec a, vec b) { return _mm256_div_ps(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec vec_dot(vec acc, vec a, vec b) { return _mm256_fmadd_ps(a, b, acc); }
INLINE vec vec_max(vec a, vec b) { return _mm256_max_ps(a, b); }
INLINE vec vec_min(vec a, vec b) { return _mm256_min_ps(a, b); }

/* ---- masks ---- */
INLINE vec_mask vec_le(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
INLINE vec_mask vec_lt(vec a, vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
INLINE vec_mask mask_and(vec_mask a, vec_mask b) { return _mm256_and_ps(a, b); }
INLINE bool mask_any(vec_mask m) { return _mm256_movemask_ps(m) != 0; }
INLINE vec_mask mask_bytes_le(const uint8_t *bytes, uint8_t limit) {
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(limit + 1), wide));
}
INLINE vec vec_select(vec_mask m, vec yes, vec no) { return _mm256_blendv_ps(no, yes, m); }

/* ---- bits ---- */
INLINE vec vec_set_bits(uint32_t bits) { return _mm256_castsi256_ps(_mm256_set1_epi32((int)bits)); }
INLINE vec vec_xor(vec a, vec b) { return _mm256_xor_ps(a, b); }
INLINE vec vec_multiply_bits(vec a, uint32_t factor, vec *low) {
    __m256i bits = _mm256_castps_si256(a), m = _mm256_set1_epi32((int)factor);
    __m256i even = _mm256_mul_epu32(bits, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(bits, 32), m);
    *low = _mm256_castsi256_ps(_mm256_blend_epi32(even, _mm256_shuffle_epi32(odd, 0xa0), 0xaa));
    return _mm256_castsi256_ps(_mm256_blend_epi32(_mm256_shuffle_epi32(even, 0xf5), odd, 0xaa));
}
INLINE void vec_store_bytes(uint8_t *p, vec a, int shift) {
    __m256i bits = _mm256_srl_epi32(_mm256_castps_si256(a), _mm_cvtsi32_si128(shift));
    bits = _mm256_and_si256(bits, _mm256_set1_epi32(0xff));
    __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(pairs, pairs));
}
INLINE vec vec_load_bytes(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

/* As in vec_scalar.h, the magic number finds the nearest integer and its place in the exponent. Here -127 gives
 * zero. */
INLINE vec vec_exp2(vec a) {
    const vec lowest = vec_set(-127.0f), magic = vec_set(0x1.8p23f);
    vec x = _mm256_max_ps(lowest, a); /* NaN stays, because a is the second operand */
    vec shifted = _mm256_add_ps(x, magic), f = _mm256_sub_ps(x, _mm256_sub_ps(shifted, magic));
    __m256i exponent = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    vec power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    vec p = vec_fma(vec_set(0.00132647273f), f, vec_set(0.00967151299f));
    p = vec_fma(p, f, vec_set(0.0555073358f));
    p = vec_fma(p, f, vec_set(0.240222424f));
    p = vec_fma(p, f, vec_set(0.693147004f));
    return vec_mul(vec_fma(p, f, vec_set(1.0f)), power);
}

/* ---- the caller's narrow types ---- */
INLINE vec vec_load_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
INLINE vec vec_load_bf16(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
INLINE void vec_store_f16(void *p, vec a) {
    _mm_storeu_si128(p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void vec_store_bf16(void *p, vec a) {
    __m256i bits = _mm256_castps_si256(a), one = _mm256_set1_epi32(1), quiet = _mm256_set1_epi32(0x7fc00000);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    bits = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    bits = _mm256_blendv_epi8(bits, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
    bits = _mm256_srli_epi32(bits, 16);
    bits = _mm256_permute4x64_epi64(_mm256_packus_epi32(bits, bits), 0x08);
    _mm_storeu_si128(p, _mm256_castsi256_si128(bits));
}

/* The bits s eeee mmm become the fp16 s 0eeee mmm0000000. Its bias is 8 larger, so its value is 2^8 times as small. The
 * sign, extended to 16 bits, also stands where the 0 belongs. NaN becomes a word of ones. */
INLINE vec vec_load_e4m3(const void *p) {
    const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p)), 7);
    const __m128i is_nan = _mm_cmpeq_epi16(_mm_or_si128(moved, _mm_set1_epi16(-0x4000)), _mm_set1_epi16(-0x80));
    const __m128i half = _mm_or_si128(_mm_and_si128(moved, _mm_set1_epi16(-0x4001)), is_nan);
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}

/* A tree of additions. Every round adds two halves and puts two vectors into one. */
INLINE vec vec_sums(const vec a[LANES]) {
    vec pair[4], four[2];
    UNROLL for (int i = 0; i < 4; i++) {
        pair[i] = _mm256_add_ps(_mm256_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm256_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    }
    UNROLL for (int i = 0; i < 2; i++) {
        __m256d x = _mm256_castps_pd(pair[2 * i]), y = _mm256_castps_pd(pair[2 * i + 1]);
        four[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                         _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

/* Transposes 8 x 8 words: two rounds inside 128-bit halves, one round of halves. */
INLINE void vec_transpose(vec row[LANES]) {
    vec t[LANES];
    UNROLL for (int i = 0; i < 8; i += 4) {
        __m256d low_01 = _mm256_castps_pd(_mm256_unpacklo_ps(row[i], row[i + 1]));
        __m256d high_01 = _mm256_castps_pd(_mm256_unpackhi_ps(row[i], row[i + 1]));
        __m256d low_23 = _mm256_castps_pd(_mm256_unpacklo_ps(row[i + 2], row[i + 3]));
        __m256d high_23 = _mm256_castps_pd(_mm256_unpackhi_ps(row[i + 2], row[i + 3]));
        t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(low_01, low_23));
        t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low_01, low_23));
        t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(high_01, high_23));
        t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(high_01, high_23));
    }
    UNROLL for (int i = 0; i < 4; i++) { /* t[4 a + i] half c: rows 4 a .. 4 a + 3 of column 4 c + i */
        row[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
        row[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
    }
}

/* ---- denormals: flush results (bit 15), read as zero (bit 6) ---- */
typedef unsigned vec_mode;
INLINE vec_mode vec_enter(void) {
    vec_mode mode = _mm_getcsr();
    _mm_setcsr(mode | 0x8040);
    return mode;
}
INLINE void vec_leave(vec_mode mode) { _mm_setcsr(mode); }

#endif
