/* One launcher for each kernel that a plan can name. Each is defined in the file of its name. */
#ifndef FA_GPU_LAUNCHERS_H
#define FA_GPU_LAUNCHERS_H

#include "gpu_call.h"

/* A launcher fills the kernel's parameters and launches the kernel. A launcher also does the work that must run before
 * or after. */
typedef fa_status fa_cuda_launcher(const fa_cuda_call *call, fa_error *err);
fa_cuda_launcher fa_cuda_fwd_sm90, fa_cuda_fwd_fp8_sm90, fa_cuda_decode, fa_cuda_bwd_sm90, fa_cuda_fwd_any,
    fa_cuda_bwd_any, fa_cuda_fwd_sm80, fa_cuda_bwd_sm80, fa_cuda_short;

#endif
