/* Evaluates a program over tiles: FA_FLEX_TILE keys of one query row at a time.
 *
 *   fa_flex_start_head    values that depend on neither q_idx nor kv_idx
 *   fa_flex_start_rows    values that depend only on q_idx, for FA_FLEX_TILE rows
 *   fa_flex_start_keys    values that depend only on kv_idx, for FA_FLEX_TILE keys
 *   fa_flex_row           all other values, for one of the rows and all of the keys
 *
 * Each step needs those before it. A step computes whole tiles, also behind the last row and the last key. Indices of
 * gathers are clamped, so no step reads outside of a capture. */
#ifndef FA_FLEX_EVALUATE_H
#define FA_FLEX_EVALUATE_H

#include "program.h"

#define FA_FLEX_TILE 128

typedef struct fa_flex_evaluator fa_flex_evaluator;

/* One thread uses an evaluator. `bound` must outlive it. NULL: no memory. */
fa_flex_evaluator *fa_flex_evaluator_new(const fa_flex_bound *bound);
void fa_flex_evaluator_free(fa_flex_evaluator *e);

void fa_flex_start_head(fa_flex_evaluator *e, int64_t b, int64_t h);
void fa_flex_start_rows(fa_flex_evaluator *e, int64_t q_idx);
void fa_flex_start_keys(fa_flex_evaluator *e, int64_t kv_idx);

/* Returns FA_FLEX_TILE values of the result, valid until the next step: bool as bytes, int64, float or double. `row`
 * counts from the q_idx of fa_flex_start_rows. scores: FA_FLEX_TILE values of the type that the program names, or NULL
 * if the program does not read the score. */
const void *fa_flex_row(fa_flex_evaluator *e, int row, const void *scores);

#endif
