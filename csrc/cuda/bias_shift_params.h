/* The parameters of bias_shift.cu. C code fills the struct, and CUDA code reads the struct. All types have the same
 * layout on both sides. Strides count elements. */
#ifndef FA_BIAS_SHIFT_PARAMS_H
#define FA_BIAS_SHIFT_PARAMS_H

enum { FA_BIAS_SHIFT_WARPS = 8 };

typedef struct {
    const void *bias; /* [b, h, row, key] */
    long long stride_b, stride_h, stride_row, stride_key;
    float *shift; /* [b, h, row] contiguous */
    float least;
    int h;
    long long rows, keys;
    long long num_rows; /* of all batches and heads */
} fa_bias_shift_params;

#endif
