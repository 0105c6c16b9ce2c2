/* Combines partial attention results on a GPU. */
#ifndef FA_GPU_COMBINE_H
#define FA_GPU_COMBINE_H

#include "combination.h"
#include "gpu_call.h"

fa_status fa_cuda_combine(const fa_combination *combination, fa_error *err);

/* The same inside of a call. */
fa_status fa_cuda_launch_combine(const fa_cuda_call *call, const fa_combination *combination, fa_error *err);

#endif
