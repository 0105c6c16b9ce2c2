/* The vector vocabulary (see vec_scalar.h) on AVX-512 F, DQ, BW, VL: 32 registers of 16 lanes. With VEC_BF16_WORDS the
 * words of products are pairs of bf16, and AVX512-BF16 multiplies these words. If VEC_TILES is also defined, AMX
 * multiplies these words (product_amx.h). */
#ifndef FA_CPU_VEC_AVX512_H
#define FA_CPU_VEC_AVX512_H

#include "convert.h"
#if defined(VEC_TILES)
#define VEC_TARGET "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16,avx2,fma,f16c"
#elif defined(VEC_BF16_WORDS)
#define VEC_TARGET "avx512f,avx512dq,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c"
#else
#define VEC_TARGET "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c"
#endif
#include "vec_target.h"

#define LANES       16
#define UNROLL_VECS 4
#define UNROLL_ROWS 4 /* 16 accumulators; other shapes that fill the pipes differ by 1-2% */
#if defined(VEC_TILES)
#define BLOCK_Q 32 /* the scores of a block of keys stay in the first-level cache */
#else
#define BLOCK_Q 64
#endif

typedef __m512 vec;
typedef __mmask16 vec_mask;

/* ---- moving ---- */
INLINE vec vec_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vec_store(float *p, vec a) { _mm512_storeu_ps(p, a); }
INLINE vec vec_load_first(const float *p, int64_t n) { return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p); }
INLINE vec vec_set(float x) { return _mm512_set1_ps(x); }
INLINE vec vec_broadcast(const float *word) { return _mm512_set1_ps(*word); }
INLINE void vec_pin(vec *a) { __asm__("" : "+v"(*a)); }

/* ---- arithmetic ---- */
INLINE vec vec_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec vec_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec vec_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec vec_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec vec_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec vec_min(vec a, vec b) { return _mm512_min_ps(a, b); }

/* ---- masks ---- */
INLINE vec_mask vec_le(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
INLINE vec_mask vec_lt(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE vec_mask mask_and(vec_mask a, vec_mask b) { return (vec_mask)(a & b); }
INLINE bool mask_any(vec_mask m) { return m != 0; }
INLINE vec_mask mask_bytes_le(const uint8_t *bytes, uint8_t limit) {
    return _mm_cmple_epu8_mask(_mm_loadu_si128((const __m128i *)bytes), _mm_set1_epi8((char)limit));
}
INLINE vec vec_select(vec_mask m, vec yes, vec no) { return _mm512_mask_blend_ps(m, no, yes); }

/* ---- bits ---- */
INLINE vec vec_set_bits(uint32_t bits) { return _mm512_castsi512_ps(_mm512_set1_epi32((int)bits)); }
INLINE vec vec_xor(vec a, vec b) { return _mm512_xor_ps(a, b); }
INLINE vec vec_multiply_bits(vec a, uint32_t factor, vec *low) {
    __m512i bits = _mm512_castps_si512(a), m = _mm512_set1_epi32((int)factor);
    __m512i even = _mm512_mul_epu32(bits, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(bits, 32), m);
    *low = _mm512_castsi512_ps(_mm512_mask_shuffle_epi32(even, 0xaaaa, odd, 0xa0));
    return _mm512_castsi512_ps(_mm512_mask_shuffle_epi32(odd, 0x5555, even, 0xf5));
}
INLINE void vec_store_bytes(uint8_t *p, vec a, int shift) {
    __m512i bits = _mm512_srl_epi32(_mm512_castps_si512(a), _mm_cvtsi32_si128(shift));
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(bits));
}
INLINE vec vec_load_bytes(const uint8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

/* ---- words ---- */
#ifdef VEC_BF16_WORDS

#define WORD_ELEMS 2
INLINE vec vec_dot(vec acc, vec a, vec b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

INLINE __m512i vec_halves_to_words(__m512i halves) { /* 16 even elements, then 16 odd ones */
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(interleave, halves);
}
INLINE vec vec_pack_words(vec even, vec odd) {
    return _mm512_castsi512_ps(vec_halves_to_words((__m512i)_mm512_cvtne2ps_pbh(odd, even)));
}
INLINE vec vec_store_rows(void *even_row, void *odd_row, vec even, vec odd) {
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    _mm256_storeu_si256(even_row, _mm512_castsi512_si256(halves));
    _mm256_storeu_si256(odd_row, _mm512_extracti64x4_epi64(halves, 1));
    return _mm512_castsi512_ps(vec_halves_to_words(halves));
}
INLINE vec vec_join_rows(const void *even, const void *odd) {
    __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(even));
    __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(odd));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
INLINE vec vec_load_words_first(const void *p, int64_t n) {
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((1u << n) - 1, p));
}
INLINE void vec_interleave(vec *a, vec *b) { /* inside 128-bit quarters */
    __m512i x = _mm512_castps_si512(*a), y = _mm512_castps_si512(*b);
    *a = _mm512_castsi512_ps(_mm512_unpacklo_epi16(x, y)); /* quarter i: columns 8 i ... 8 i + 3 */
    *b = _mm512_castsi512_ps(_mm512_unpackhi_epi16(x, y)); /* 8 i + 4 ... 8 i + 7 */
}
INLINE void vec_in_order(vec *a, vec *b) {
    vec first = _mm512_shuffle_f32x4(*a, *b, 0x44), second = _mm512_shuffle_f32x4(*a, *b, 0xee);
    *a = _mm512_shuffle_f32x4(first, first, 0xd8);
    *b = _mm512_shuffle_f32x4(second, second, 0xd8);
}

#else

#define WORD_ELEMS 1
INLINE vec vec_dot(vec acc, vec a, vec b) { return _mm512_fmadd_ps(a, b, acc); }

#endif

/* vreduceps gives a - floor(a), and vscalefps takes the floor of its second operand itself. reduce(-inf) is 0, and
 * scaling by -inf gives exactly 0, so nothing is clamped. Degree 5 has an error of 1e-7, degree 4, for bf16, of
 * 3e-6. */
INLINE vec vec_exp2(vec a) {
    vec f = _mm512_reduce_ps(a, 0x09), p; /* 0x09: towards -inf, no exceptions */
    if (WORD_ELEMS == 2) {
        p = vec_fma(vec_set(0.0134266857f), f, vec_set(0.0522424728f));
        p = vec_fma(p, f, vec_set(0.241280213f));
        p = vec_fma(p, f, vec_set(0.693044841f));
    } else {
        p = vec_fma(vec_set(0.00186713017f), f, vec_set(0.00901702978f));
        p = vec_fma(p, f, vec_set(0.0557999127f));
        p = vec_fma(p, f, vec_set(0.240164444f));
        p = vec_fma(p, f, vec_set(0.693151295f));
    }
    return _mm512_scalef_ps(vec_fma(p, f, vec_set(1.0f)), a);
}

/* ---- the caller's narrow types ---- */
INLINE vec vec_load_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE vec vec_load_bf16(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE void vec_store_f16(void *p, vec a) {
    _mm256_storeu_si256(p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE void vec_store_bf16(void *p, vec a) {
#ifdef VEC_BF16_WORDS
    _mm256_storeu_si256(p, (__m256i)_mm512_cvtneps_pbh(a));
#else
    __m512i bits = _mm512_castps_si512(a), one = _mm512_set1_epi32(1), quiet = _mm512_set1_epi32(0x7fc00000);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    bits = _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet); /* NaN must not round to inf */
    _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
#endif
}

#if WORD_ELEMS == 1
INLINE vec vec_of_e4m3(__m128i bytes) { /* as in vec_avx2.h */
    const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    const __m256i is_nan =
        _mm256_cmpeq_epi16(_mm256_or_si256(moved, _mm256_set1_epi16(-0x4000)), _mm256_set1_epi16(-0x80));
    const __m256i half = _mm256_or_si256(_mm256_and_si256(moved, _mm256_set1_epi16(-0x4001)), is_nan);
    return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
}
INLINE vec vec_load_e4m3(const void *p) { return vec_of_e4m3(_mm_loadu_si128(p)); }
INLINE vec vec_load_e4m3_first(const void *p, int64_t n) {
    return vec_of_e4m3(_mm_maskz_loadu_epi8((__mmask16)((1u << n) - 1), p));
}
#endif

#define VEC_LOADS_FIRST /* vec_load_first.h has these functions for the others. */
INLINE vec vec_load_f16_first(const void *p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p));
}
INLINE vec vec_load_bf16_first(const void *p, int64_t n) {
    __m256i half = _mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* A tree of additions. Every round adds two halves and puts two vectors into one. */
INLINE vec vec_sums(const vec a[LANES]) {
    vec pair[8], four[4], eight[2];
    UNROLL for (int i = 0; i < 8; i++) {
        pair[i] = _mm512_add_ps(_mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]));
    }
    UNROLL for (int i = 0; i < 4; i++) {
        __m512d x = _mm512_castps_pd(pair[2 * i]), y = _mm512_castps_pd(pair[2 * i + 1]);
        four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    }
    UNROLL for (int i = 0; i < 2; i++) {
        eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88),
                         _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
}

/* Transposes 16 x 16 words: two rounds inside 128-bit quarters, two rounds of quarters. */
INLINE void vec_transpose(vec row[LANES]) {
    vec t[LANES];
    UNROLL for (int i = 0; i < 16; i += 4) {
        __m512d low_01 = _mm512_castps_pd(_mm512_unpacklo_ps(row[i], row[i + 1]));
        __m512d high_01 = _mm512_castps_pd(_mm512_unpackhi_ps(row[i], row[i + 1]));
        __m512d low_23 = _mm512_castps_pd(_mm512_unpacklo_ps(row[i + 2], row[i + 3]));
        __m512d high_23 = _mm512_castps_pd(_mm512_unpackhi_ps(row[i + 2], row[i + 3]));
        t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(low_01, low_23));
        t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low_01, low_23));
        t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_01, high_23));
        t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_01, high_23));
    }
    UNROLL for (int i = 0; i < 4; i++) { /* t[4 a + i] quarter c: rows 4 a .. 4 a + 3 of column 4 c + i */
        vec a_02 = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), a_13 = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
        vec b_02 = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88),
            b_13 = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
        row[i] = _mm512_shuffle_f32x4(a_02, b_02, 0x88);
        row[i + 4] = _mm512_shuffle_f32x4(a_13, b_13, 0x88);
        row[i + 8] = _mm512_shuffle_f32x4(a_02, b_02, 0xdd);
        row[i + 12] = _mm512_shuffle_f32x4(a_13, b_13, 0xdd);
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
