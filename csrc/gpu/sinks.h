/* Learned sinks on a GPU (cpu/sinks.h). */
#ifndef FA_GPU_SINKS_H
#define FA_GPU_SINKS_H

#include "flash_attn.h"

typedef struct {
    int device_idx;
    fa_dtype dtype, sinks_dtype; /* of out: fp16, bf16 or fp32; of sinks: one of these or fp64 */
    int64_t b, h, rows, d;
    fa_view out;
    fa_row_stats lse;
    const void *sinks; /* [h]; NULL: none */
    int64_t sinks_stride;
} fa_cuda_sinks;

/* Writes out' and lse' on PyTorch's stream. Without sinks, inf becomes -inf in lse, and nothing else happens. */
fa_status fa_cuda_add_sinks(const fa_cuda_sinks *sinks, fa_error *err);

#endif
