/* A score_mod that only adds an element of a tensor, as attn_bias does, and whose derivative passes the gradient on to
 * the score and to that element. The kernels then load and add to the elements of a whole tile, and the evaluator does
 * not run. */
#ifndef FA_CPU_FLEX_BIAS_H
#define FA_CPU_FLEX_BIAS_H

#include "flex/flex.h"
#include "flex/operations.h"

/* Where the element of a pair lies: first + b b_idx + h head + q query + kv key. */
typedef struct {
    int64_t first, b, h, q, kv;
} fa_flex_places;

typedef struct {
    const fa_flex_operations *operations;
    const void *data;
    fa_flex_dtype dtype; /* fp16, bf16 or fp32 */
    fa_flex_places of_value, of_sum;
    int32_t capture; /* of the derivative, which gets the gradient; -1: none */
} fa_flex_bias;

/* Finds the bias of a backward. Returns false if the score_mod is another one. */
bool fa_flex_bias_of(const fa_problem *p, fa_isa isa, fa_flex_bias *bias);

/* Does the kernel for few queries (attn_bwd_rows.h) know the mods of a backward? They are a bias, and no mask. Sums of
 * the gradient of a large bias would leave it few copies, and so few threads. */
bool fa_flex_is_for_few_rows(const fa_problem *p);

static inline int64_t fa_flex_place_of(const fa_flex_places *x, int64_t b_idx, int64_t head, int64_t query,
                                       int64_t key) {
    return x->first + b_idx * x->b + head * x->h + query * x->q + key * x->kv;
}

#endif
