/* Partial attention results over the same queries, which are combined into one result:
 *
 *   lse = log(sum_i exp(lse_i)),   out = sum_i exp(lse_i - lse) out_i
 *
 * A part with an infinite lse_i saw no key. It is -inf, or +inf if there were no keys at all. In flash-attn 2 it is
 * always +inf. This part counts for nothing, whatever its out_i holds. Without any other part out is 0, lse
 * empty_lse. A NaN in lse_i makes the row NaN. */
#ifndef FA_COMBINATION_H
#define FA_COMBINATION_H

#include "flash_attn.h"

#define FA_MAX_PARTS 256

typedef struct {
    fa_device device;
    int device_idx;
    int64_t num_parts, b, len, h, d;
    const float *out_partial; /* [part, b, row, h, d] */
    int64_t stride_part, stride_b, stride_row, stride_h;
    const float *lse_partial; /* [part, b, row, h], rows side by side */
    int64_t lse_stride_part, lse_stride_b, lse_stride_h;
    fa_dtype dtype;   /* of out: fp32, fp16 or bf16 */
    fa_view out;      /* [b, row, h, d] */
    fa_row_stats lse; /* [b, h, row], rows side by side */
    float empty_lse;  /* lse of a row that no part counts for */
    /* Of the parts of one call, on a GPU: sinks that the parts lack (fa_problem). */
    fa_sink_values sinks;
    fa_sink_rows sink_shift;
} fa_combination;

#endif
