/* Runs a kernel on copies of tensors whose rows it does not read. */
#ifndef FA_GPU_ALIGN_H
#define FA_GPU_ALIGN_H

#include "launchers.h"

/* If the plan wants so, copies the tensors to the end of the workspace, runs the launcher on the copies, and copies its
 * outputs back. */
fa_status fa_cuda_run_aligned(const fa_cuda_call *call, fa_cuda_launcher *launcher, fa_error *err);

#endif
