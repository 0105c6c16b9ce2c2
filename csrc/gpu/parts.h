/* Combines partial attention results inside of a call. */
#ifndef FA_GPU_PARTS_H
#define FA_GPU_PARTS_H

#include "combination.h"
#include "gpu_call.h"

fa_status fa_cuda_launch_combine(const fa_cuda_call *call, const fa_combination *combination, fa_error *err);

#endif
