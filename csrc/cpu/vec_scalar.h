/* The vector vocabulary in portable C, and its documentation: what each verb means on every instruction set.
 *
 *   vec         LANES floats, or LANES words
 *   word        32 bits of an operand of a product: one fp32 (WORD_ELEMS 1), or two neighbouring bf16 (WORD_ELEMS 2,
 *               the even element in the low half). Buffers of words are typed float * and only ever moved.
 *   vec_mask    one truth value per lane
 *
 *   UNROLL_VECS, UNROLL_ROWS   shape of the product kernel: accumulators that fit the registers, with room for operands
 *   BLOCK_Q                    query lanes of a tile, a multiple of UNROLL_VECS LANES and of 16
 *
 * With VEC_BF16_WORDS words are pairs of bf16 here too: so the tests run the kernels for such words on any processor.
 *
 * Pointers need no alignment. A comparison with NaN is false. vec_max and vec_min return their second operand when
 * either is NaN. Arithmetic runs with denormals flushed to zero between vec_enter and vec_leave. */
#ifndef FA_VEC_SCALAR_H
#define FA_VEC_SCALAR_H

#include "convert.h"
#include "vec_target.h"

#ifdef VEC_BF16_WORDS
#define LANES       16
#define WORD_ELEMS  2
#define UNROLL_VECS 4
#define UNROLL_ROWS 4
#define BLOCK_Q     64
#else
#define LANES       8
#define WORD_ELEMS  1
#define UNROLL_VECS 1
#define UNROLL_ROWS 4
#define BLOCK_Q     32
#endif

typedef struct {
    float lane[LANES];
} vec;
typedef struct {
    bool lane[LANES];
} vec_mask;

#define EACH_LANE for (int i = 0; i < LANES; i++)

/* ---- moving ---- */
INLINE vec vec_load(const float *p) {
    vec r;
    memcpy(&r, p, sizeof r);
    return r;
}
INLINE void vec_store(float *p, vec a) { memcpy(p, &a, sizeof a); }
/* The first n < LANES floats; nothing behind them is touched, the other lanes are 0. */
INLINE vec vec_load_first(const float *p, int64_t n) {
    vec r = {{0}};
    memcpy(&r, p, (size_t)n * sizeof *p);
    return r;
}
INLINE vec vec_set(float x) {
    vec r;
    EACH_LANE r.lane[i] = x;
    return r;
}
INLINE vec vec_broadcast(const float *word) { return vec_set(*word); }

/* Keeps a loaded vector in a register. Without it gcc folds the load into each multiply-add that uses it, and the two
 * load ports bind: a fifth of the speed on AVX-512 and AVX2. */
INLINE void vec_pin(vec *a) { (void)a; }

/* ---- arithmetic ---- */
INLINE vec vec_add(vec a, vec b) {
    EACH_LANE a.lane[i] += b.lane[i];
    return a;
}
INLINE vec vec_sub(vec a, vec b) {
    EACH_LANE a.lane[i] -= b.lane[i];
    return a;
}
INLINE vec vec_mul(vec a, vec b) {
    EACH_LANE a.lane[i] *= b.lane[i];
    return a;
}
INLINE vec vec_div(vec a, vec b) {
    EACH_LANE a.lane[i] /= b.lane[i];
    return a;
}
/* a b + c */
INLINE vec vec_fma(vec a, vec b, vec c) {
    EACH_LANE c.lane[i] += a.lane[i] * b.lane[i];
    return c;
}
/* acc + a b over the elements of a word */
#if WORD_ELEMS == 2
INLINE vec vec_dot(vec acc, vec a, vec b) {
    EACH_LANE {
        uint32_t x = fa_bits_of(a.lane[i]), y = fa_bits_of(b.lane[i]);
        acc.lane[i] += fa_f32_of_bits(x << 16) * fa_f32_of_bits(y << 16);
        acc.lane[i] += fa_f32_of_bits(x & 0xffff0000) * fa_f32_of_bits(y & 0xffff0000);
    }
    return acc;
}
#else
INLINE vec vec_dot(vec acc, vec a, vec b) { return vec_fma(a, b, acc); }
#endif
INLINE vec vec_max(vec a, vec b) {
    EACH_LANE a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
INLINE vec vec_min(vec a, vec b) {
    EACH_LANE a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}

/* ---- masks ---- */
INLINE vec_mask vec_le(vec a, vec b) {
    vec_mask m;
    EACH_LANE m.lane[i] = a.lane[i] <= b.lane[i];
    return m;
}
INLINE vec_mask vec_lt(vec a, vec b) {
    vec_mask m;
    EACH_LANE m.lane[i] = a.lane[i] < b.lane[i];
    return m;
}
INLINE vec_mask mask_and(vec_mask a, vec_mask b) {
    EACH_LANE a.lane[i] = a.lane[i] && b.lane[i];
    return a;
}
INLINE bool mask_any(vec_mask m) {
    bool any = false;
    EACH_LANE any |= m.lane[i];
    return any;
}
/* LANES bytes against one limit */
INLINE vec_mask mask_bytes_le(const uint8_t *bytes, uint8_t limit) {
    vec_mask m;
    EACH_LANE m.lane[i] = bytes[i] <= limit;
    return m;
}
INLINE vec vec_select(vec_mask m, vec yes, vec no) {
    EACH_LANE no.lane[i] = m.lane[i] ? yes.lane[i] : no.lane[i];
    return no;
}

/* ---- bits: the lanes as unsigned 32-bit integers ---- */
INLINE vec vec_set_bits(uint32_t bits) { return vec_set(fa_f32_of_bits(bits)); }
INLINE vec vec_xor(vec a, vec b) {
    EACH_LANE a.lane[i] = fa_f32_of_bits(fa_bits_of(a.lane[i]) ^ fa_bits_of(b.lane[i]));
    return a;
}
/* The high halves of the 64-bit products a factor; *low receives the low halves. */
INLINE vec vec_multiply_bits(vec a, uint32_t factor, vec *low) {
    vec high;
    EACH_LANE {
        uint64_t product = (uint64_t)fa_bits_of(a.lane[i]) * factor;
        low->lane[i] = fa_f32_of_bits((uint32_t)product);
        high.lane[i] = fa_f32_of_bits((uint32_t)(product >> 32));
    }
    return high;
}
/* The byte of each lane that starts at bit `shift`: LANES bytes. */
INLINE void vec_store_bytes(uint8_t *p, vec a, int shift) {
    EACH_LANE p[i] = (uint8_t)(fa_bits_of(a.lane[i]) >> shift);
}

/* 2^a for a <= 126: a relative error of 1e-7, exactly 1 at 0, exactly 0 below -127, NaN stays NaN. The magic number
 * moves the nearest integer n into the low bits; 2^(a - n) is a polynomial whose constant term is 1. */
INLINE vec vec_exp2(vec a) {
    EACH_LANE {
        float x = a.lane[i] < -126.0f ? -126.0f : a.lane[i], shifted = x + 0x1.8p23f, f = x - (shifted - 0x1.8p23f),
              power;
        uint32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        bits = (bits + 127) << 23;
        memcpy(&power, &bits, sizeof power);
        float p = 0.00132647273f * f + 0.00967151299f;
        p = p * f + 0.0555073358f;
        p = p * f + 0.240222424f;
        p = p * f + 0.693147004f;
        p = (p * f + 1.0f) * power;
        a.lane[i] = a.lane[i] < -126.0f ? 0.0f : p;
    }
    return a;
}

/* ---- the caller's 16-bit types, LANES elements at a time; stores round to nearest even ---- */
INLINE vec vec_load_f16(const void *p) {
    vec r;
    uint16_t half[LANES];
    memcpy(half, p, sizeof half);
    EACH_LANE r.lane[i] = fa_f32_from_f16(half[i]);
    return r;
}
INLINE vec vec_load_bf16(const void *p) {
    vec r;
    uint16_t half[LANES];
    memcpy(half, p, sizeof half);
    EACH_LANE r.lane[i] = fa_f32_from_bf16(half[i]);
    return r;
}
INLINE void vec_store_f16(void *p, vec a) {
    uint16_t half[LANES];
    EACH_LANE half[i] = fa_f16_from_f32(a.lane[i]);
    memcpy(p, half, sizeof half);
}
INLINE void vec_store_bf16(void *p, vec a) {
    uint16_t half[LANES];
    EACH_LANE half[i] = fa_bf16_from_f32(a.lane[i]);
    memcpy(p, half, sizeof half);
}

/* vec_load_first for the other types */
INLINE vec vec_load_f16_first(const void *p, int64_t n) {
    uint16_t half[LANES] = {0};
    memcpy(half, p, (size_t)n * sizeof *half);
    return vec_load_f16(half);
}
INLINE vec vec_load_bf16_first(const void *p, int64_t n) {
    uint16_t half[LANES] = {0};
    memcpy(half, p, (size_t)n * sizeof *half);
    return vec_load_bf16(half);
}

/* lane i: the sum of the lanes of a[i] */
INLINE vec vec_sums(const vec a[LANES]) {
    vec r;
    EACH_LANE {
        r.lane[i] = 0.0f;
        for (int j = 0; j < LANES; j++) r.lane[i] += a[i].lane[j];
    }
    return r;
}

/* row[i] lane j <-> row[j] lane i, for floats and words alike */
INLINE void vec_transpose(vec row[LANES]) {
    EACH_LANE for (int j = 0; j < i; j++) {
        float t = row[i].lane[j];
        row[i].lane[j] = row[j].lane[i];
        row[j].lane[i] = t;
    }
}

/* ---- words of two bf16 ---- */
#if WORD_ELEMS == 2

INLINE vec vec_join(const uint16_t even[LANES], const uint16_t odd[LANES]) {
    vec r;
    EACH_LANE r.lane[i] = fa_f32_of_bits((uint32_t)odd[i] << 16 | even[i]);
    return r;
}
/* Two vectors of floats, rounded to bf16, as words. */
INLINE vec vec_pack_words(vec even, vec odd) {
    uint16_t half[2][LANES];
    vec_store_bf16(half[0], even);
    vec_store_bf16(half[1], odd);
    return vec_join(half[0], half[1]);
}
/* The same, which also stores each vector as a row of bf16. */
INLINE vec vec_store_rows(void *even_row, void *odd_row, vec even, vec odd) {
    vec_store_bf16(even_row, even);
    vec_store_bf16(odd_row, odd);
    return vec_pack_words(even, odd);
}
/* LANES bf16 of two rows as words. */
INLINE vec vec_join_rows(const void *even, const void *odd) {
    uint16_t half[2][LANES];
    memcpy(half[0], even, sizeof half[0]);
    memcpy(half[1], odd, sizeof half[1]);
    return vec_join(half[0], half[1]);
}
/* The first n < 2 LANES bf16 as words, zeros behind them. */
INLINE vec vec_load_words_first(const void *p, int64_t n) {
    vec r = {{0}};
    memcpy(&r, p, (size_t)n * sizeof(uint16_t));
    return r;
}
/* Rows a, b of 2 LANES bf16 become words (a[c], b[c]), columns in an order that suits the instruction set. */
INLINE void vec_interleave(vec *a, vec *b) {
    uint16_t half[2][2 * LANES];
    memcpy(half[0], a, sizeof half[0]);
    memcpy(half[1], b, sizeof half[1]);
    *a = vec_join(half[0], half[1]);
    *b = vec_join(half[0] + LANES, half[1] + LANES);
}
/* 2 LANES floats in that order: their natural order. */
INLINE void vec_in_order(vec *a, vec *b) { (void)a, (void)b; }

#endif

/* ---- denormals ---- */
typedef int vec_mode;
INLINE vec_mode vec_enter(void) { return 0; }
INLINE void vec_leave(vec_mode mode) { (void)mode; }

#undef EACH_LANE
#endif
