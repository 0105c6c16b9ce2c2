/* CUDA C text of programs, for NVRTC. The text includes "flex_values.cuh", which lies with the kernels' sources. For
 * the programs that exist the text defines:
 *
 *   FLEX_SCORE, FLEX_MASK, FLEX_DERIVATIVE    macros: 1 if the program exists, else 0
 *   FLEX_LONG_MASK                            macro: 1 if the mask_mod has so many operations that one copy for each
 *                                             pair would take long to compile
 *   FLEX_FACTOR                               macro: 0 if the derivative is `grad` itself and its scatters do not read
 *                                             the score, or if there is none
 *   FLEX_PARTS                                macro: the number of scatters of the derivative
 *   FLEX_HIDDEN, FLEX_MAX                     macros: has_hidden, has_max
 *   FLEX_BLOCKS                               macro: 0 if no_blocks
 *   FLEX_ADDS                                 macro: 1 if there is flex_exponent
 *   FLEX_PREFETCHES, FLEX_PAIR_BITS, FLEX_ROW macros: 1 if there is flex_prefetch, flex_pair_bits, flex_row
 *   FLEX_OCTETS                               macro: has_octets
 *   FLEX_SUMS                                 macro: the number of members of flex_sums
 *
 *   struct flex_values { long long words[...]; };    captures and parameters; a kernel parameter of plain words
 *   struct flex_sums { ... };                        see below; `flex_sums sums = {}` has only zeros
 *
 *   DEVICE float flex_score(const flex_values &x, float score, int b, int h, int q_idx, int kv_idx,
 *                           int kv_step = -1);       kv_step: a constant as odd as kv_idx; -1: none is known
 *   DEVICE bool flex_mask(const flex_values &x, int b, int h, int q_idx, int kv_idx);
 *   DEVICE interval flex_mask_bounds(const flex_values &x, int b, int h, int q_idx, int q_last, int kv_idx,
 *                                    int kv_last);       with FLEX_BOUNDS: bounds over ranges, both ends included
 *   DEVICE float flex_derivative(const flex_values &x, float score, float grad, int b, int h, int q_idx, int kv_idx);
 *   DEVICE float flex_derivative(const flex_values &x, flex_sums &sums, float score, float grad,
 *                                int b, int h, int q_idx, int kv_idx);
 *   DEVICE void flex_add_sums(const flex_values &x, const flex_sums &sums, int b, int h);
 *
 * With FLEX_PARTS, for kernels that add up what pairs of queries and keys add to one element:
 *
 *   DEVICE float flex_derivative(const flex_values &x, float (&parts)[FLEX_PARTS], float score, float grad,
 *                                int b, int h, int q_idx, int kv_idx);    leaves what scatter n adds in parts[n]
 *   DEVICE constexpr flex_kind flex_kind_of(int part);                    which pairs share an element (scatters.h)
 *   DEVICE constexpr bool flex_place_has_b(int part);                    its element depends on b
 *   template <int PART> DEVICE auto flex_place_of(const flex_values &x, int b, int h, int q_idx, int kv_idx);
 *   template <int PART, class T> DEVICE void flex_add_part(const flex_values &x, T place, float value);
 *
 * With FLEX_ADDS, of a score_mod that is the score plus something of the indices, and whose derivative is `grad`
 * itself. Some rows may have a score of 0 in place of the score:
 *
 *   FLEX_HEAD_VALUES    macro: the number of floats that are loaded once for all pairs of a head
 *   FLEX_IS_FINITE      macro: 1 if the sum is finite where the floats of the head are, and all rows have a score
 *   DEVICE void flex_head_values(const flex_values &x, float *values, int b, int h);    loads them
 *   DEVICE float flex_exponent(const flex_values &x, const float *values, float start, int b, int h, int q_idx,
 *                              int kv_idx, int q_step, int kv_step[, unsigned short bits, float row]);
 *                              start + log2 e times what the score_mod adds; with FLEX_PAIR_BITS from both
 *   DEVICE float flex_score_factor(const flex_values &x, int b, int h, int q_idx, float row);
 *                              0 if the row has no score, else 1; row: of flex_row, if there is one
 *
 * A thread calls flex_exponent for many pairs, at steps of constants from one pair at (q_idx - q_step, kv_idx -
 * kv_step). Integers that are linear in the indices become floats once for all of these pairs.
 *
 * With FLEX_PAIR_BITS, of a score_mod that reads one such element (below), of 16 bits:
 *
 *   DEVICE unsigned short flex_pair_bits(const flex_values &x, int b, int h, int q_idx, int kv_idx);    reads it
 *   DEVICE float flex_row(const flex_values &x, int b, int h, int q_idx);    with FLEX_ROW: reads the only float that
 *                                                                            the score_mod reads of a query alone
 *   DEVICE const unsigned short *flex_pair_place(const flex_values &x, int b, int h, int q_idx, int kv_idx);
 *                                                                            where flex_pair_bits reads
 *   DEVICE float flex_score_of(const flex_values &x, unsigned short bits, float row, float score, int b, int h,
 *                              int q_idx, int kv_idx);    the score, from both
 *
 * With FLEX_PREFETCHES, of a score_mod that reads elements which no other pair of the head reads:
 *
 *   DEVICE void flex_prefetch(const flex_values &x, int b, int h, int q_idx, int kv_idx);    asks the L1 for one
 *
 * flex_derivative adds to the gradients of captures by atomicAdd, where what it adds is not 0. The overload with `sums`
 * keeps gradients of elements that only b and h choose in registers. The thread adds them to memory by flex_add_sums
 * when it is done with this b and h. Without FLEX_DERIVATIVE there is no flex_sums, and no function of it.
 *
 * b, h, q_idx and kv_idx are at least 0. They may lie outside of the problem, because indices of gathers are clamped.
 * The text of a program that is not wide (wide.h) takes them to be less than FA_FLEX_SMALL, and has integers and
 * places of 32 bits wherever the rest allows it. Each of its captures has elements.
 *
 * Each word of flex_values has 8 bytes. The score_mod's words come first, then the mask_mod's, then the derivative's.
 * A program's words are, for each capture, its address and then size and stride of each dimension; then one word for
 * each parameter. Behind the derivative's parameters stands the address of the gradient of each of its captures. */
#ifndef FA_FLEX_SOURCE_H
#define FA_FLEX_SOURCE_H

#include "flex.h"

/* What a text of the same programs may be. */
typedef struct {
    bool is_wide;      /* wide.h */
    bool has_hidden;   /* other kernels have looked at the mask before */
    bool has_max;      /* the kernel stores the largest score of each row */
    bool no_blocks;    /* Hopper's kernel knows no block mask */
    bool has_pairs;    /* pairs.h; never with is_wide */
    bool has_octets;   /* pairs.h, vectors of 8 keys; never with is_wide */
    bool has_exponent; /* the forward takes flex_exponent, if there is one */
} fa_flex_text;

/* A program that does not exist is NULL. The same programs give the same text. *text ends with 0 and belongs to the
 * caller, who calls free(). After a failure *text is NULL. FA_EINVAL: a program reads what its function has not. */
fa_status fa_flex_source(const fa_flex_program *score, const fa_flex_program *mask, const fa_flex_program *derivative,
                         fa_flex_text of, char **text, fa_error *err);

#endif
