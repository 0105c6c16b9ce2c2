/* The shift of rows of attn_bias on a GPU (row_options.h). */
#ifndef FA_GPU_BIAS_SHIFT_H
#define FA_GPU_BIAS_SHIFT_H

#include "row_options.h"

/* On PyTorch's stream. The bias is fp16, bf16 or fp32. */
fa_status fa_cuda_bias_shift(const fa_bias_shift *of, fa_error *err);

#endif
