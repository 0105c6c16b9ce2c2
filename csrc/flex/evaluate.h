/* Evaluates a program for lines of lanes. Either the lanes are keys and a line is a query row, or the lanes are query
 * rows and a line is a key.
 *
 *   fa_flex_start_head     values that depend on neither q_idx nor kv_idx
 *   fa_flex_start_lines    values that depend only on the index of the line
 *   fa_flex_start_lanes    values that depend only on the index of the lane
 *   fa_flex_line           all other values, for one of the lines and all of the lanes
 *
 * fa_flex_line needs the others, and the first comes first. Indices of gathers are clamped, so no step reads outside of
 * a capture. */
#ifndef FA_FLEX_EVALUATE_H
#define FA_FLEX_EVALUATE_H

#include "program.h"

#define FA_FLEX_TILE 128 /* the most lines, and the most lanes */

typedef struct fa_flex_evaluator fa_flex_evaluator;

/* One thread uses an evaluator. `bound` must outlive it. NULL: no memory. The instruction set must be legal here. The
 * results of exp, exp2, log, log2 and tanh of fp32 depend on the instruction set by a few units in the last place. */
fa_flex_evaluator *fa_flex_evaluator_new(const fa_flex_bound *bound, fa_isa isa, bool lanes_are_keys);
void fa_flex_evaluator_free(fa_flex_evaluator *e);

void fa_flex_start_head(fa_flex_evaluator *e, int64_t b, int64_t h);
void fa_flex_start_lines(fa_flex_evaluator *e, int64_t first, int num);
void fa_flex_start_lanes(fa_flex_evaluator *e, int64_t first, int num);

/* Returns a value of the result for each lane, valid until the next step: bool as bytes, int64, float or double. `line`
 * counts from the first line. scores and grads have a value for each lane, of the type that the program names, and room
 * up to a multiple of 16 lanes. They may be NULL if the program does not read them. */
const void *fa_flex_line(fa_flex_evaluator *e, int line, const void *scores, const void *grads);

/* A score_mod may only add a number to the score: what it reads, as a bias does, or what depends on the line, the lane
 * or their difference. For such a program the function returns the numbers of num_lines lines from `line` on, valid
 * until the next step. values NULL: it is another program, or fa_flex_line shall evaluate this line. Steps before are
 * those of fa_flex_line. */
typedef struct {
    const float *values;   /* [lanes] of the first line */
    int num_lines, stride; /* from line to line */
} fa_flex_bias_rows;

fa_flex_bias_rows fa_flex_bias_lines(fa_flex_evaluator *e, int line);

/* Scatters add to sums[capture]. Without this call, and with sums NULL, all scatters add nowhere. Lines of scatters may
 * wait for the next line. fa_flex_add_waiting adds them, before the sums are read or changed for others. */
void fa_flex_scatter_to(fa_flex_evaluator *e, const fa_flex_sums_at *sums);
void fa_flex_add_waiting(fa_flex_evaluator *e);

#endif
