/* The parameters of bias_shift.cu. C code fills the struct, and CUDA code reads the struct. All types have the same
 * layout on both sides. Strides count elements. */
#ifndef FA_BIAS_SHIFT_PARAMS_H
#define FA_BIAS_SHIFT_PARAMS_H

#include "sinks_params.h"

enum { FA_BIAS_SHIFT_WARPS = 8 };

typedef struct {
    const void *bias; /* [b, h, row, key] */
    long long stride_b, stride_h, stride_row, stride_key;
    float *shift;                    /* [b, h, row] contiguous */
    fa_cuda_sink_values sinks;       /* data NULL: none */
    const long long *sequence, *row; /* of packed sequences: where the bias of each row lies; NULL: dense */
    float least;
    int h, is_cut; /* is_cut: row i sees the keys up to i + last, or the first, or all */
    long long last;
    long long rows, keys;   /* rows of the shift */
    long long rows_of_bias; /* of a packed sequence; rows behind them have the last one's shift */
    long long num_rows;     /* of all batches and heads */
    int rows_of_warp;       /* up to 32; a lane for each */
} fa_bias_shift_params;

#endif
