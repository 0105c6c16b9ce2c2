/* problem -> parameters of a forward kernel -> launch. */
#ifndef FA_CUDA_FWD_H
#define FA_CUDA_FWD_H

#include "kernels.h"

/* Executes a forward plan on PyTorch's current stream of the problem's GPU. */
fa_status fa_cuda_fwd(const fa_problem *problem, const fa_plan *plan, fa_error *err);

/* Launches `kernel`, compiled from `tile` with `features`, on the stream. Allocates nothing, reads nothing from the
 * device, waits for nothing. */
fa_status fa_cuda_fwd_launch(const fa_problem *problem, const fa_tile *tile, unsigned features, const fa_gpu *gpu,
                             CUkernel kernel, CUstream stream, fa_error *err);

#endif
