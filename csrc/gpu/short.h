/* Launches attn_bwd_short for the short ones of packed sequences. */
#ifndef FA_GPU_SHORT_H
#define FA_GPU_SHORT_H

#include "gpu_call.h"

/* Launches it for the sequences of up to short_rows (fa_gpu_plan) queries and keys. Another kernel takes the others. */
fa_status fa_cuda_bwd_short_beside(const fa_cuda_call *call, fa_error *err);

#endif
