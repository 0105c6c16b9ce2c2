/* What options of flash_attn_func do to rows besides the kernels: learned sinks, the largest score of each head, and
 * the shift of wholly low biases. */
#ifndef FA_ROW_OPTIONS_H
#define FA_ROW_OPTIONS_H

#include "flash_attn.h"

/* Learned sinks: one more key for each row, of score sink[h] and value 0. Attention without sinks has come before.
 * Forwards add sinks themselves (fa_problem). Beside results of another call lse is all that is known of a row.
 *
 *   lse' = ln (exp(lse) + exp(sink - shift))      out' = out / (1 + exp(sink - shift - lse))
 *   gradient[h] = sum over rows of exp(sink - shift - lse') (0 - delta),      delta = dout'.out' - dlse'
 *
 * The shift was subtracted from the scores of a row. A row that saw no key keeps out 0. Its lse may be -inf or +inf. */
typedef struct {
    int device_idx;
    fa_dtype dtype; /* of out */
    int64_t b, h, rows, d;
    fa_sink_values sinks;
    fa_view out;
    fa_sink_rows lse, shift;
    const int32_t *end; /* rows from here on belong to no sequence; NULL: all rows belong to one */
    /* Of the gradient, for which lse is lse'. probability: of the sink, where a forward wrote it (CPU); data NULL: it
     * follows from lse'. */
    fa_sink_rows delta, probability;
    void *gradient; /* [h] contiguous, in the dtype of sinks */
} fa_sinks;

/* The largest score of each head. Rows that see no key have the score -inf. */
typedef struct {
    int device_idx;
    int64_t b, h, rows;
    fa_sink_rows scores; /* of each row the largest */
    fa_sink_rows shift;  /* was subtracted from the scores of a row */
    float *largest;      /* [h] contiguous; NaN if a score is NaN */
} fa_max_logits;

/* The shift of each row of attn_bias: its largest bias, if this is finite and below `least`, and if the sink is not far
 * above it. Else it is 0. */
typedef struct {
    int device_idx;
    fa_dtype dtype; /* of bias */
    const void *bias;
    int64_t size[4], stride[4]; /* [b, h, rows, keys], or 1 in place of a size */
    double least;
    fa_sink_values sinks;
    bool is_cut; /* row i sees the keys up to i + last, but at least one */
    int64_t last;
    const int64_t *sequence, *row; /* [total_q]: where the bias of each row of packed sequences lies; NULL: dense */
    void *shift;                   /* contiguous; fp32, or fp64 for a bias of fp64 */
    int64_t of_shift[3];           /* its sizes: [b, h, rows], or 1 in place of a size; [1, h, total_q] */
} fa_bias_shift;

#endif
