/* Copies pages that the kernel of a plan does not read. */
#ifndef FA_GPU_GATHER_H
#define FA_GPU_GATHER_H

#include "gpu_call.h"

/* Copies the pages of the call to the end of its workspace. *gathered becomes the problem with these copies. */
fa_status fa_cuda_gather(const fa_cuda_call *call, fa_problem *gathered, fa_error *err);

#endif
