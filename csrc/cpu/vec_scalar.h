/* The vector vocabulary in portable C. This file also documents the meaning of each verb on every instruction set.
 *
 *   vec         LANES floats, or LANES words
 *   word        32 bits of an operand of a product: one fp32 (WORD_ELEMS 1), or two neighbouring bf16 (WORD_ELEMS 2,
 *               the even element in the low half). Buffers of words are typed float * and only ever moved.
 *   vec_mask    one truth value per lane
 *
 *   UNROLL_VECS, UNROLL_ROWS   shape of the product kernel: accumulators that fit the registers, with room for operands
 *   BLOCK_Q                    query lanes of a tile, a multiple of UNROLL_VECS LANES and of 16
 *   DECODE_SUMS                optional: vectors of sums in registers in decode, a multiple of LANES (decode_task.h)
 *   VEC_BY_LANE                optional: products take words of A from lanes. vec_dot_lane(acc, a, LANE, b) then gives
 *                              acc + b times one word of a, and no load is moved across vec_hold_loads
 *
 * With VEC_BF16_WORDS the words are pairs of bf16 here, too. So the tests run the kernels for such words on any
 * processor.
 *
 * Pointers need no alignment. A comparison with NaN is false. vec_max and vec_min return their second operand if an
 * operand is NaN. Between vec_enter and vec_leave the vectors of other instruction sets may take
 * denormals for zero. */
#ifndef FA_CPU_VEC_SCALAR_H
#define FA_CPU_VEC_SCALAR_H

#include "convert.h"
#include "vec_target.h"

#ifdef VEC_BF16_WORDS
#define LANES       16
#define WORD_ELEMS  2
#define UNROLL_VECS 4
#define UNROLL_ROWS 4
#define BLOCK_Q     64
#else
#define LANES       4
#define WORD_ELEMS  1
#define UNROLL_VECS 2
#define UNROLL_ROWS 4
#define BLOCK_Q     32
#endif

/* gcc and clang support vectors on any processor and keep them in registers. For other compilers a vec is an array. The
 * macros below let one text serve both, after EACH_LANE:
 *
 *   OF(a)               all of a vector, or one of its lanes
 *   BITS(a), FLOATS(x)  the same 32 bits as the other type
 *   TRUTH(x)            a mask of a comparison
 *   WIDE(h)             32 bits of 16
 *
 * gcc takes four times as long to compile loops over arrays, in which it must find the vectors itself. */
#if defined(__GNUC__)
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t vec_bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t vec_half __attribute__((vector_size(2 * LANES)));
#define EACH_LANE
#define OF(a)     (a)
#define BITS(a)   ((vec_bits)(a))
#define FLOATS(x) ((vec)(x))
#define TRUTH(x)  ((vec_bits)(x))
#define WIDE(h)   __builtin_convertvector(h, vec_bits)
#else
typedef struct {
    float lane[LANES];
} vec;
typedef struct {
    uint32_t lane[LANES];
} vec_bits;
typedef struct {
    uint16_t lane[LANES];
} vec_half;
#define EACH_LANE for (int i = 0; i < LANES; i++)
#define OF(a)     (a).lane[i]
#define BITS(a)   fa_bits_of((a).lane[i])
#define FLOATS(x) fa_f32_of_bits(x)
#define TRUTH(x)  (0u - (uint32_t)(x))
#define WIDE(h)   ((uint32_t)(h).lane[i])
#endif
typedef vec_bits vec_mask; /* all bits of a lane or none */

/* ---- moving ---- */
INLINE vec vec_load(const float *p) {
    vec r;
    memcpy(&r, p, sizeof r);
    return r;
}
INLINE void vec_store(float *p, vec a) { memcpy(p, &a, sizeof a); }
/* Loads the first n < LANES floats. Memory behind them is not touched, and the other lanes are 0. */
INLINE vec vec_load_first(const float *p, int64_t n) {
    float lane[LANES] = {0};
    memcpy(lane, p, (size_t)n * sizeof *p);
    return vec_load(lane);
}
INLINE vec vec_set(float x) {
    vec r = {0};
    EACH_LANE OF(r) = x - OF(r);
    return r;
}
/* Each lane gets these bits. */
INLINE vec vec_set_bits(uint32_t bits) {
    const vec_bits zero = {0};
    vec r;
    EACH_LANE OF(r) = FLOATS(OF(zero) | bits);
    return r;
}
/* NOTE: vec_set computes x - 0. Without optimisation this turns a signaling NaN into a quiet NaN. A word of two bf16
 * looks like a signaling NaN if its odd element is infinite and its even element is not 0. */
INLINE vec vec_broadcast(const float *word) {
    return WORD_ELEMS == 1 ? vec_set(*word) : vec_set_bits(fa_bits_of(*word));
}

/* Keeps a loaded vector in a register. Without vec_pin gcc folds the load into each multiply-add that uses the vector.
 * Then the two load ports bind, which costs a fifth of the speed on AVX-512 and AVX2. */
INLINE void vec_pin(vec *a) { (void)a; }

/* ---- arithmetic ---- */
INLINE vec vec_add(vec a, vec b) {
    EACH_LANE OF(a) += OF(b);
    return a;
}
INLINE vec vec_sub(vec a, vec b) {
    EACH_LANE OF(a) -= OF(b);
    return a;
}
INLINE vec vec_mul(vec a, vec b) {
    EACH_LANE OF(a) *= OF(b);
    return a;
}
INLINE vec vec_div(vec a, vec b) {
    EACH_LANE OF(a) /= OF(b);
    return a;
}
/* a b + c */
INLINE vec vec_fma(vec a, vec b, vec c) {
    EACH_LANE OF(c) += OF(a) * OF(b);
    return c;
}
/* acc + a b over the elements of a word */
#if WORD_ELEMS == 2
INLINE vec vec_dot(vec acc, vec a, vec b) {
    EACH_LANE OF(acc) += FLOATS(BITS(a) << 16) * FLOATS(BITS(b) << 16);
    EACH_LANE OF(acc) += FLOATS(BITS(a) & 0xffff0000u) * FLOATS(BITS(b) & 0xffff0000u);
    return acc;
}
#else
INLINE vec vec_dot(vec acc, vec a, vec b) { return vec_fma(a, b, acc); }
#endif

/* ---- masks ---- */
INLINE vec_mask vec_le(vec a, vec b) {
    vec_mask m;
    EACH_LANE OF(m) = TRUTH(OF(a) <= OF(b));
    return m;
}
INLINE vec_mask vec_lt(vec a, vec b) {
    vec_mask m;
    EACH_LANE OF(m) = TRUTH(OF(a) < OF(b));
    return m;
}
INLINE vec_mask mask_and(vec_mask a, vec_mask b) {
    EACH_LANE OF(a) &= OF(b);
    return a;
}
INLINE bool mask_any(vec_mask m) {
    uint32_t lane[LANES], any = 0;
    memcpy(lane, &m, sizeof lane);
    for (int i = 0; i < LANES; i++) any |= lane[i];
    return any != 0;
}
/* Compares LANES bytes with one limit. */
INLINE vec_mask mask_bytes_le(const uint8_t *bytes, uint8_t limit) {
    uint32_t lane[LANES];
    vec_mask m;
    for (int i = 0; i < LANES; i++) lane[i] = bytes[i];
    memcpy(&m, lane, sizeof m);
    EACH_LANE OF(m) = TRUTH(OF(m) <= limit);
    return m;
}
INLINE vec vec_select(vec_mask m, vec yes, vec no) {
    EACH_LANE OF(no) = FLOATS((BITS(yes) & OF(m)) | (BITS(no) & ~OF(m)));
    return no;
}
INLINE vec vec_max(vec a, vec b) { return vec_select(vec_lt(b, a), a, b); }
INLINE vec vec_min(vec a, vec b) { return vec_select(vec_lt(a, b), a, b); }

/* ---- bits: the lanes as unsigned 32-bit integers ---- */
INLINE vec vec_xor(vec a, vec b) {
    EACH_LANE OF(a) = FLOATS(BITS(a) ^ BITS(b));
    return a;
}
/* Returns the high halves of the 64-bit products a factor. *low receives the low halves. */
INLINE vec vec_multiply_bits(vec a, uint32_t factor, vec *low) {
    uint32_t x[LANES], y[LANES];
    memcpy(x, &a, sizeof x);
    for (int i = 0; i < LANES; i++) {
        const uint64_t product = (uint64_t)x[i] * factor;
        x[i] = (uint32_t)(product >> 32);
        y[i] = (uint32_t)product;
    }
    memcpy(&a, x, sizeof a);
    memcpy(low, y, sizeof y);
    return a;
}
/* Stores LANES bytes: from each lane the byte that starts at bit `shift`. */
INLINE void vec_store_bytes(uint8_t *p, vec a, int shift) {
    uint32_t lane[LANES];
    memcpy(lane, &a, sizeof lane);
    for (int i = 0; i < LANES; i++) p[i] = (uint8_t)(lane[i] >> shift);
}

/* Loads LANES bytes as floats. */
INLINE vec vec_load_bytes(const uint8_t *p) {
    float lane[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = (float)p[i];
    return vec_load(lane);
}

/* 2^a for a <= 126, with a relative error of 1e-7. The result is exactly 1 at 0 and exactly 0 below -127, and NaN stays
 * NaN. The magic number moves the nearest integer n into the low bits. 2^(a - n) is a polynomial with constant term
 * 1. */
INLINE vec vec_exp2(vec a) {
    const vec lowest = vec_set(-126.0f), magic = vec_set(0x1.8p23f);
    const vec_mask is_zero = vec_lt(a, lowest);
    const vec x = vec_select(is_zero, lowest, a), shifted = vec_add(x, magic), f = vec_sub(x, vec_sub(shifted, magic));
    vec power, p = vec_fma(vec_set(0.00132647273f), f, vec_set(0.00967151299f));
    EACH_LANE OF(power) = FLOATS((BITS(shifted) + 127u) << 23);
    p = vec_fma(p, f, vec_set(0.0555073358f));
    p = vec_fma(p, f, vec_set(0.240222424f));
    p = vec_fma(p, f, vec_set(0.693147004f));
    p = vec_mul(vec_fma(p, f, vec_set(1.0f)), power);
    return vec_select(is_zero, vec_set(0.0f), p);
}

/* ---- the caller's narrow types, LANES elements at a time; stores round to nearest even ---- */
OUTLINE void lanes_to_f16(uint16_t half[LANES], const float lane[LANES]) {
    for (int i = 0; i < LANES; i++) half[i] = fa_f16_from_f32(lane[i]);
}
/* fa_f32_from_f16 without branches. A subnormal is the mantissa behind 2^-14, less 2^-14. */
INLINE vec vec_load_f16(const void *p) {
    vec_half half;
    vec_bits sign, rest, is_small, is_special, is_nan;
    vec r, small;
    memcpy(&half, p, sizeof half);
    EACH_LANE OF(sign) = (WIDE(half) & 0x8000u) << 16;
    EACH_LANE OF(rest) = (WIDE(half) & 0x7fffu) << 13;
    EACH_LANE OF(is_small) = TRUTH(OF(rest) < 1u << 23);
    EACH_LANE OF(is_special) = TRUTH(OF(rest) >= 31u << 23);
    EACH_LANE OF(is_nan) = TRUTH(OF(rest) > 31u << 23);
    EACH_LANE OF(rest) += (112u << 23) + (OF(is_special) & 112u << 23);
    EACH_LANE OF(rest) |= OF(is_nan) & 0x400000u;
    EACH_LANE OF(small) = FLOATS(OF(rest) + (1u << 23)) - 0x1p-14f;
    EACH_LANE OF(r) = FLOATS((OF(rest) & ~OF(is_small)) | (BITS(small) & OF(is_small)) | OF(sign));
    return r;
}
INLINE vec vec_load_bf16(const void *p) {
    vec_half half;
    vec r;
    memcpy(&half, p, sizeof half);
    EACH_LANE OF(r) = FLOATS(WIDE(half) << 16);
    return r;
}
INLINE void vec_store_f16(void *p, vec a) {
    uint16_t half[LANES];
    float lane[LANES];
    vec_store(lane, a);
    lanes_to_f16(half, lane);
    memcpy(p, half, sizeof half);
}
INLINE void vec_store_bf16(void *p, vec a) {
    uint16_t half[LANES];
    float lane[LANES];
    vec_store(lane, a);
    for (int i = 0; i < LANES; i++) half[i] = fa_bf16_from_f32(lane[i]);
    memcpy(p, half, sizeof half);
}

#if WORD_ELEMS == 1
/* fa_f32_from_e4m3 as in vec_load_f16. No processor has its own instruction for it. */
INLINE vec vec_load_e4m3(const void *p) {
    uint8_t byte[LANES];
    uint32_t lane[LANES];
    vec_bits bits, sign, rest, is_small, is_nan;
    vec r, small;
    memcpy(byte, p, sizeof byte);
    for (int i = 0; i < LANES; i++) lane[i] = byte[i];
    memcpy(&bits, lane, sizeof bits);
    EACH_LANE OF(sign) = (OF(bits) & 0x80u) << 24;
    EACH_LANE OF(rest) = (OF(bits) & 0x7fu) << 20;
    EACH_LANE OF(is_small) = TRUTH(OF(rest) < 1u << 23);
    EACH_LANE OF(is_nan) = TRUTH(OF(rest) == 0x7fu << 20);
    EACH_LANE OF(rest) = (OF(rest) + (120u << 23)) | (OF(is_nan) & 0x7fc00000u);
    EACH_LANE OF(small) = FLOATS(OF(rest) + (1u << 23)) - 0x1p-6f;
    EACH_LANE OF(r) = FLOATS((OF(rest) & ~OF(is_small)) | (BITS(small) & OF(is_small)) | OF(sign));
    return r;
}
#endif

/* Lane i of the result is the sum of the lanes of a[i]. */
INLINE vec vec_sums(const vec a[LANES]) {
    float lane[LANES][LANES], sum[LANES] = {0};
    memcpy(lane, a, sizeof lane);
    for (int j = 0; j < LANES; j++)
        for (int i = 0; i < LANES; i++) sum[i] += lane[i][j];
    return vec_load(sum);
}

/* Swaps row[i] lane j with row[j] lane i, for floats and for words. */
INLINE void vec_transpose(vec row[LANES]) {
    uint32_t from[LANES][LANES], to[LANES][LANES];
    memcpy(from, row, sizeof from);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) to[i][j] = from[j][i];
    memcpy(row, to, sizeof to);
}

/* ---- words of two bf16 ---- */
#if WORD_ELEMS == 2

INLINE vec vec_join(const uint16_t even[LANES], const uint16_t odd[LANES]) {
    uint32_t word[LANES];
    vec r;
    for (int i = 0; i < LANES; i++) word[i] = (uint32_t)odd[i] << 16 | even[i];
    memcpy(&r, word, sizeof r);
    return r;
}
/* Rounds two vectors of floats to bf16 and joins them as words. */
INLINE vec vec_pack_words(vec even, vec odd) {
    uint16_t half[2][LANES];
    vec_store_bf16(half[0], even);
    vec_store_bf16(half[1], odd);
    return vec_join(half[0], half[1]);
}
/* vec_pack_words that also stores each vector as a row of bf16. */
INLINE vec vec_store_rows(void *even_row, void *odd_row, vec even, vec odd) {
    vec_store_bf16(even_row, even);
    vec_store_bf16(odd_row, odd);
    return vec_pack_words(even, odd);
}
/* Joins LANES bf16 of each of two rows as words. */
INLINE vec vec_join_rows(const void *even, const void *odd) {
    uint16_t half[2][LANES];
    memcpy(half[0], even, sizeof half[0]);
    memcpy(half[1], odd, sizeof half[1]);
    return vec_join(half[0], half[1]);
}
/* Loads the first n < 2 LANES bf16 as words, with zeros behind them. */
INLINE vec vec_load_words_first(const void *p, int64_t n) {
    vec r = {0};
    memcpy(&r, p, (size_t)n * sizeof(uint16_t));
    return r;
}
/* Rows a, b of 2 LANES bf16 become words (a[c], b[c]). The order of the columns c suits the instruction set. */
INLINE void vec_interleave(vec *a, vec *b) {
    uint16_t half[2][2 * LANES];
    memcpy(half[0], a, sizeof half[0]);
    memcpy(half[1], b, sizeof half[1]);
    *a = vec_join(half[0], half[1]);
    *b = vec_join(half[0] + LANES, half[1] + LANES);
}
/* Puts 2 LANES floats from the order of vec_interleave into their natural order. */
INLINE void vec_in_order(vec *a, vec *b) { (void)a, (void)b; }

#endif

/* ---- denormals ---- */
typedef int vec_mode;
INLINE vec_mode vec_enter(void) { return 0; }
INLINE void vec_leave(vec_mode mode) { (void)mode; }

#undef EACH_LANE
#undef OF
#undef BITS
#undef FLOATS
#undef TRUTH
#undef WIDE
#endif
