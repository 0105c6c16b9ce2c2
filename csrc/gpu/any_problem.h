/* Functions that the launchers of the generic kernels share. */
#ifndef FA_GPU_ANY_PROBLEM_H
#define FA_GPU_ANY_PROBLEM_H

#include "cuda/cuda_problem.h"
#include "gpu_call.h"

/* Returns the problem as the generic kernels see it. The launcher of a forward with rotary then points q at the rotated
 * queries. */
fa_cuda_problem fa_cuda_problem_of(const fa_cuda_call *call);

/* Launches one generic kernel of the call's dtype, with `threads` threads a CTA and at most one CTA per task. Without a
 * task nothing is launched. */
fa_status fa_cuda_launch_any(const fa_cuda_call *call, fa_family_id family, int row, const fa_cuda_problem *problem,
                             int64_t num_tasks, int threads, fa_error *err);

/* Returns the number of CTAs of one head: the tiles of `rows` rows in the longest sequence, at least one. */
int fa_count_tiles(int64_t len, int64_t total, bool packed, int rows);

/* Launches the kernel of the attention probabilities, if the problem wants them. */
fa_status fa_cuda_launch_probs(const fa_cuda_call *call, const fa_cuda_problem *problem, fa_error *err);

/* Launches the kernel that computes softmax_d. */
fa_status fa_cuda_launch_delta(const fa_cuda_call *call, fa_error *err);

#endif
