/* The vector vocabulary (see vec_scalar.h) on Advanced SIMD, which every 64-bit ARM processor has: 32 registers of 4
 * lanes. With VEC_BF16_WORDS the words of products are pairs of bf16, and BFDOT multiplies these words.
 *
 * A multiply-add takes one operand from a lane of a register (VEC_BY_LANE). So products need no broadcasts, which would
 * take the pipes of the multiply-adds on many of these processors. */
#ifndef FA_CPU_VEC_NEON_H
#define FA_CPU_VEC_NEON_H

#include "convert.h"
#if defined(VEC_BF16_WORDS) && !defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define VEC_TARGET "arch=armv8.2-a+bf16"
#endif
#include "vec_target.h"

#define LANES       4
#define UNROLL_VECS 4
#define UNROLL_ROWS 4 /* 16 accumulators for four pipes of latency 4; 4 vectors of A and 4 of B */
#define DECODE_SUMS 16
#define VEC_BY_LANE
#define BLOCK_Q 64

typedef float32x4_t vec;
typedef uint32x4_t vec_mask;

INLINE uint32x4_t bits_of(vec a) { return vreinterpretq_u32_f32(a); }
INLINE vec floats_of(uint32x4_t bits) { return vreinterpretq_f32_u32(bits); }

/* ---- moving ---- */
INLINE vec vec_load(const float *p) { return vld1q_f32(p); }
INLINE void vec_store(float *p, vec a) { vst1q_f32(p, a); }
INLINE vec vec_set(float x) { return vdupq_n_f32(x); }
INLINE vec vec_load_first(const float *p, int64_t n) {
    vec r = vec_set(0.0f);
    if (n > 0) r = vld1q_lane_f32(p, r, 0);
    if (n > 1) r = vld1q_lane_f32(p + 1, r, 1);
    if (n > 2) r = vld1q_lane_f32(p + 2, r, 2);
    return r;
}
INLINE vec vec_broadcast(const float *word) { return vld1q_dup_f32(word); }
INLINE void vec_pin(vec *a) { (void)a; } /* no instruction multiplies an operand in memory */

/* gcc would load the vectors of several steps before the first multiply-add, and spill accumulators for them. */
INLINE void vec_hold_loads(void) { __asm__ volatile("" ::: "memory"); }

/* ---- arithmetic ---- */
INLINE vec vec_add(vec a, vec b) { return vaddq_f32(a, b); }
INLINE vec vec_sub(vec a, vec b) { return vsubq_f32(a, b); }
INLINE vec vec_mul(vec a, vec b) { return vmulq_f32(a, b); }
INLINE vec vec_div(vec a, vec b) { return vdivq_f32(a, b); }
INLINE vec vec_fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }

/* ---- masks ---- */
INLINE vec_mask vec_le(vec a, vec b) { return vcleq_f32(a, b); }
INLINE vec_mask vec_lt(vec a, vec b) { return vcltq_f32(a, b); }
INLINE vec_mask mask_and(vec_mask a, vec_mask b) { return vandq_u32(a, b); }
INLINE bool mask_any(vec_mask m) { return vmaxvq_u32(m) != 0; }
INLINE uint32x4_t load_4_bytes(const void *p) {
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
}
INLINE vec_mask mask_bytes_le(const uint8_t *bytes, uint8_t limit) {
    return vcleq_u32(load_4_bytes(bytes), vdupq_n_u32(limit));
}
INLINE vec vec_select(vec_mask m, vec yes, vec no) { return vbslq_f32(m, yes, no); }
/* vmaxq_f32 and vminq_f32 would return NaN if either operand is NaN. */
INLINE vec vec_max(vec a, vec b) { return vec_select(vec_lt(b, a), a, b); }
INLINE vec vec_min(vec a, vec b) { return vec_select(vec_lt(a, b), a, b); }

/* ---- bits ---- */
INLINE vec vec_set_bits(uint32_t bits) { return floats_of(vdupq_n_u32(bits)); }
INLINE vec vec_xor(vec a, vec b) { return floats_of(veorq_u32(bits_of(a), bits_of(b))); }
INLINE vec vec_multiply_bits(vec a, uint32_t factor, vec *low) {
    const uint32x4_t bits = bits_of(a), m = vdupq_n_u32(factor);
    const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(bits), vget_low_u32(m)));
    const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(bits, m));
    *low = floats_of(vuzp1q_u32(first, second));
    return floats_of(vuzp2q_u32(first, second));
}
INLINE void vec_store_bytes(uint8_t *p, vec a, int shift) {
    const uint16x4_t halves = vmovn_u32(vshlq_u32(bits_of(a), vdupq_n_s32(-shift)));
    const uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(halves, halves))), 0);
    memcpy(p, &bytes, sizeof bytes);
}
INLINE vec vec_load_bytes(const uint8_t *p) { return vcvtq_f32_u32(load_4_bytes(p)); }

/* ---- words ---- */
#ifdef VEC_BF16_WORDS

#define WORD_ELEMS 2
INLINE bfloat16x8_t halves_of(vec a) { return vreinterpretq_bf16_f32(a); }

/* BFDOT rounds the sum of the two products to odd, and the new sum as well. */
INLINE vec vec_dot(vec acc, vec a, vec b) { return vbfdotq_f32(acc, halves_of(a), halves_of(b)); }

#define DOT_LANE(LANE) __asm__("bfdot %0.4s, %1.8h, %2.2h[" #LANE "]" : "+w"(acc) : "w"(b), "w"(a))

INLINE vec join_halves(uint16x4_t even, uint16x4_t odd) {
    return vreinterpretq_f32_u16(vcombine_u16(vzip1_u16(even, odd), vzip2_u16(even, odd)));
}
INLINE uint16x4_t round_to_halves(vec a) { return vreinterpret_u16_bf16(vcvt_bf16_f32(a)); }
INLINE vec vec_pack_words(vec even, vec odd) { return join_halves(round_to_halves(even), round_to_halves(odd)); }
INLINE vec vec_store_rows(void *even_row, void *odd_row, vec even, vec odd) {
    const uint16x4_t even_halves = round_to_halves(even), odd_halves = round_to_halves(odd);
    memcpy(even_row, &even_halves, sizeof even_halves);
    memcpy(odd_row, &odd_halves, sizeof odd_halves);
    return join_halves(even_halves, odd_halves);
}
INLINE vec vec_join_rows(const void *even, const void *odd) {
    uint16x4_t even_halves, odd_halves;
    memcpy(&even_halves, even, sizeof even_halves);
    memcpy(&odd_halves, odd, sizeof odd_halves);
    return join_halves(even_halves, odd_halves);
}
INLINE vec vec_load_words_first(const void *p, int64_t n) {
    uint16_t half[2 * LANES] = {0};
    memcpy(half, p, (size_t)n * sizeof *half);
    return vreinterpretq_f32_u16(vld1q_u16(half));
}
INLINE void vec_interleave(vec *a, vec *b) { /* in the natural order of the columns */
    const uint16x8_t x = vreinterpretq_u16_f32(*a), y = vreinterpretq_u16_f32(*b);
    *a = vreinterpretq_f32_u16(vzip1q_u16(x, y));
    *b = vreinterpretq_f32_u16(vzip2q_u16(x, y));
}
INLINE void vec_in_order(vec *a, vec *b) { (void)a, (void)b; }

#else

#define WORD_ELEMS     1
INLINE vec vec_dot(vec acc, vec a, vec b) { return vfmaq_f32(acc, a, b); }
#define DOT_LANE(LANE) __asm__("fmla %0.4s, %1.4s, %2.s[" #LANE "]" : "+w"(acc) : "w"(b), "w"(a))

#endif

/* acc + b times one word of a
 *
 * NOTE: clang 16 compiles vbfdotq_laneq_f32 to a broadcast and a plain BFDOT. With vfmaq_laneq_f32 gcc 12 copies
 * accumulators in the loop. */
INLINE vec vec_dot_lane(vec acc, vec a, int LANE, vec b) {
    switch (LANE) {
    case 0: DOT_LANE(0); break;
    case 1: DOT_LANE(1); break;
    case 2: DOT_LANE(2); break;
    default: DOT_LANE(3);
    }
    return acc;
}
#undef DOT_LANE

/* As in vec_avx2.h. vmaxq_f32 serves here, because only `a` can be NaN. */
INLINE vec vec_exp2(vec a) {
    const vec magic = vec_set(0x1.8p23f), x = vmaxq_f32(vec_set(-127.0f), a), shifted = vec_add(x, magic);
    const vec f = vec_sub(x, vec_sub(shifted, magic));
    const vec power = floats_of(vshlq_n_u32(vaddq_u32(bits_of(shifted), vdupq_n_u32(127)), 23));
    vec p;
    if (WORD_ELEMS == 2) { /* for bf16 degree 4 is enough, with an error of 3e-6 */
        p = vec_fma(vec_set(0.00958285295f), f, vec_set(0.0559064262f));
        p = vec_fma(p, f, vec_set(0.240240991f));
        p = vec_fma(p, f, vec_set(0.693124175f));
    } else {
        p = vec_fma(vec_set(0.00132647273f), f, vec_set(0.00967151299f));
        p = vec_fma(p, f, vec_set(0.0555073358f));
        p = vec_fma(p, f, vec_set(0.240222424f));
        p = vec_fma(p, f, vec_set(0.693147004f));
    }
    return vec_mul(vec_fma(p, f, vec_set(1.0f)), power);
}

/* ---- the caller's narrow types ---- */
INLINE uint16x4_t load_halves(const void *p) {
    uint16x4_t halves;
    memcpy(&halves, p, sizeof halves);
    return halves;
}
INLINE vec vec_load_f16(const void *p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_halves(p))); }
INLINE vec vec_load_bf16(const void *p) { return floats_of(vshll_n_u16(load_halves(p), 16)); }
INLINE void vec_store_f16(void *p, vec a) {
    const float16x4_t halves = vcvt_f16_f32(a);
    memcpy(p, &halves, sizeof halves);
}
INLINE void vec_store_bf16(void *p, vec a) {
#ifdef VEC_BF16_WORDS
    const uint16x4_t halves = round_to_halves(a);
#else
    const uint32x4_t bits = bits_of(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vdupq_n_u32(0x7fc00000); /* NaN must not round to inf */
    const uint16x4_t halves = vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
#endif
    memcpy(p, &halves, sizeof halves);
}

#if WORD_ELEMS == 1
/* As in vec_avx2.h. */
INLINE vec vec_load_e4m3(const void *p) {
    uint32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    const int8x8_t signed_bytes = vcreate_s8(bytes);
    const uint16x4_t moved = vreinterpret_u16_s16(vshl_n_s16(vget_low_s16(vmovl_s8(signed_bytes)), 7));
    const uint16x4_t is_nan = vceq_u16(vorr_u16(moved, vdup_n_u16(0xc000)), vdup_n_u16(0xff80));
    const uint16x4_t half = vorr_u16(vand_u16(moved, vdup_n_u16(0xbfff)), is_nan);
    return vec_mul(vcvt_f32_f16(vreinterpret_f16_u16(half)), vec_set(256.0f));
}
#endif

INLINE vec vec_sums(const vec a[LANES]) { return vpaddq_f32(vpaddq_f32(a[0], a[1]), vpaddq_f32(a[2], a[3])); }

INLINE void vec_transpose(vec row[LANES]) {
    const uint64x2_t even_01 = vreinterpretq_u64_f32(vtrn1q_f32(row[0], row[1])); /* columns 0 and 2 */
    const uint64x2_t odd_01 = vreinterpretq_u64_f32(vtrn2q_f32(row[0], row[1]));
    const uint64x2_t even_23 = vreinterpretq_u64_f32(vtrn1q_f32(row[2], row[3]));
    const uint64x2_t odd_23 = vreinterpretq_u64_f32(vtrn2q_f32(row[2], row[3]));
    row[0] = vreinterpretq_f32_u64(vtrn1q_u64(even_01, even_23));
    row[1] = vreinterpretq_f32_u64(vtrn1q_u64(odd_01, odd_23));
    row[2] = vreinterpretq_f32_u64(vtrn2q_u64(even_01, even_23));
    row[3] = vreinterpretq_f32_u64(vtrn2q_u64(odd_01, odd_23));
}

/* ---- denormals: bit 24 of FPCR flushes operands and results of fp32; conversions of fp16 stay exact ---- */
typedef uint64_t vec_mode;
INLINE vec_mode vec_enter(void) {
    vec_mode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode)::"memory");
    __asm__ volatile("msr fpcr, %0" ::"r"(mode | UINT64_C(1) << 24) : "memory");
    return mode;
}
INLINE void vec_leave(vec_mode mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode) : "memory"); }

#endif
