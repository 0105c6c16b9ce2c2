/* A plan for a GPU becomes launches on PyTorch's current stream. */
#ifndef FA_GPU_RUN_H
#define FA_GPU_RUN_H

#include "flash_attn.h"

/* Runs the plan. workspace is plan->workspace_bytes of the GPU's memory, or NULL if the plan needs none. The function
 * allocates no memory, reads nothing from the device, and waits for nothing. */
fa_status fa_cuda_run(const fa_problem *problem, const fa_plan *plan, bool zero_tensors, void *workspace,
                      fa_error *err);

#endif
