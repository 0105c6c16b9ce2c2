/* The shift of rows of attn_bias on a GPU (flash_attn/flex/options.py). */
#ifndef FA_GPU_BIAS_SHIFT_H
#define FA_GPU_BIAS_SHIFT_H

#include "flash_attn.h"

typedef struct {
    int device_idx;
    fa_dtype dtype; /* of bias: fp16, bf16 or fp32 */
    const void *bias;
    int64_t size[4], stride[4]; /* [b, h, rows, keys] */
    float *shift;               /* [b, h, rows] contiguous */
    float least;
} fa_bias_shift;

/* shift: the largest bias of each row, if it is finite and below `least`, else 0. On PyTorch's stream. */
fa_status fa_cuda_bias_shift(const fa_bias_shift *of, fa_error *err);

#endif
