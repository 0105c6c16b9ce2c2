/* The part of plan.c for GPUs. */
#ifndef FA_PLAN_GPU_H
#define FA_PLAN_GPU_H

#include "flash_attn.h"

/* As fa_plan_make. Of the machine only the GPU's members are read. */
fa_status fa_plan_cuda(const fa_problem *problem, const fa_machine *machine, fa_plan *plan, fa_error *err);

#endif
