/* A plan for a GPU becomes launches on PyTorch's current stream. */
#ifndef FA_GPU_RUN_H
#define FA_GPU_RUN_H

#include "flash_attn.h"

/* workspace: plan->workspace_bytes of the GPU's memory, or NULL where the plan asks for none. Allocates nothing, reads
 * nothing from the device, waits for nothing. */
fa_status fa_cuda_run(const fa_problem *problem, const fa_plan *plan, bool zero_tensors, void *workspace,
                      fa_error *err);

#endif
