/* The parameters of combine.cu. C code fills the struct, and CUDA code reads the struct. All types have the same layout
 * on both sides. Strides count elements. */
#ifndef FA_COMBINE_PARAMS_H
#define FA_COMBINE_PARAMS_H

#include "division.h"
#include "sinks_params.h"

enum { FA_COMBINE_THREADS = 256 };

typedef struct {
    const float *out_partial; /* [part, b, row, h, d] */
    long long stride_part, stride_b, stride_row, stride_h;
    const float *lse_partial; /* [part, b, row, h], rows side by side */
    long long lse_stride_part, lse_stride_b, lse_stride_h;
    void *out; /* [b, row, h, d] */
    long long out_stride_b, out_stride_row, out_stride_h;
    float *lse; /* [b, h, row], rows side by side; empty_lse for a row that no part counts for. NULL: not stored */
    long long lse_stride_to_b, lse_stride_to_h;
    float empty_lse;
    int num_parts, h;
    int takes_four;                      /* Four columns at a time are aligned in all rows of out_partial and of out. */
    int has_columns;                     /* A row without columns still has an lse, and one group. */
    long long len, groups, num_tasks;    /* groups: of columns, in a row. A task is a group of one row of one head. */
    fa_division by_groups, by_len, by_h; /* for fewer than 2^31 tasks */
    fa_cuda_sinks sinks;
} fa_combine_params;

#endif
