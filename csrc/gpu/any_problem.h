/* What the launchers of the generic kernels share. */
#ifndef FA_GPU_ANY_PROBLEM_H
#define FA_GPU_ANY_PROBLEM_H

#include "cuda/cuda_problem.h"
#include "gpu_call.h"

/* The problem as the generic kernels see it. The queries are those of q, or q_rotated if there is rotary. */
fa_cuda_problem fa_cuda_problem_of(const fa_cuda_call *call);

/* Launches one generic kernel of the call's dtype, `threads` a CTA, no more CTAs than tasks; none without a task. */
fa_status fa_cuda_launch_any(const fa_cuda_call *call, fa_family_id family, int row, const fa_cuda_problem *problem,
                             int64_t num_tasks, int threads, fa_error *err);

#endif
