/* The part of plan.c for GPUs. */
#ifndef FA_PLAN_GPU_H
#define FA_PLAN_GPU_H

#include "flash_attn.h"

/* Does fa_plan_make's work on a GPU. The planner reads only the GPU's members of the machine. */
fa_status fa_plan_cuda(const fa_problem *problem, const fa_machine *machine, fa_plan *plan, fa_error *err);

#endif
