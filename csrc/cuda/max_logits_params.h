/* The parameters of max_logits.cu. C code fills the struct, and CUDA code reads the struct. All types have the same
 * layout on both sides. Strides count elements. */
#ifndef FA_MAX_LOGITS_PARAMS_H
#define FA_MAX_LOGITS_PARAMS_H

#include "sinks_params.h"

enum { FA_MAX_LOGITS_WARPS = 32 };

typedef struct {
    fa_cuda_sink_rows scores, shift; /* the largest score of each row, and what was subtracted from its scores */
    float *largest;                  /* [h] contiguous */
    long long b, rows;
} fa_max_logits_params;

#endif
